"""A rank that restores its state copies each verified part while the agent still writes the rest.

The fake agent sends its next message whenever the rank polls, so the tests need no clock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from everstep.protocol.ids import Generation, JobName, Rank, RunId, Step
from everstep.protocol.rank_messages import AgentHalf, Arriving, RankFault, RankHalf, SlotsRefused, Welcome
from everstep.protocol.slot import HEADER_BYTES, SlotHeader, SlotIndex, SlotState, pack_header, unpack_index
from everstep.training import session as sessions
from everstep.training.adapters.base import AdapterState
from everstep.training.adapters.plain import PlainAdapter
from everstep.training.capture import CapturePlan, SlotMemory
from everstep.training.copier import Copies, CpuCopier, copy_now
from everstep.training.errors import AgentUnreachable, RestoreMismatch, SessionMisuse
from everstep.training.restore import encode_facts
from everstep.training.script import Environment
from everstep.training.session import TrainingSession
from everstep.training.state import FORMAT, RankState

GENERATION = Generation(2)
ENVIRONMENT = Environment(Rank(0), 1, None, JobName("job"), RunId("ab" * 16), GENERATION, 1.0, 30.0)
WITHOUT_FINAL_ROUND = replace(ENVIRONMENT, final_round_seconds=0.0)
"""Environment in which the rank does not wait for the final round, because the fake agent never answers it."""
STEP = Step(7)
Word = Callable[[], None]


class Trained:
    """A small model with an optimizer."""

    def __init__(self, seed: int, steps: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(3, 40), nn.BatchNorm1d(40), nn.Linear(40, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.state = RankState([PlainAdapter({"": self.model}, {"": self.optimizer})], {}, {}, ENVIRONMENT)
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.randn(4, 3)).sum().backward()
            self.optimizer.step()

    def bytes(self) -> dict[str, bytes]:
        return {
            item.name: item.tensor.detach().numpy().tobytes()
            for item in self.state.observe().tensors
            if not item.name.startswith("value/")
        }


class Slot:
    """A slot file whose content the fake agent writes piece by piece."""

    def __init__(self, path: Path, of: Trained) -> None:
        observed = of.state.observe()
        plan = CapturePlan.make(observed.tensors)
        capacity = plan.capacity_bytes(observed.values)
        path.write_bytes(bytes(HEADER_BYTES + capacity))
        memory = SlotMemory(path, capacity)
        copy_now(Copies([item.tensor for item in observed.tensors], memory.views(plan)))
        self.path = path
        self.index_offset = plan.index_offset
        self.index_bytes = memory.write_values(plan, observed.values)
        self.data = path.read_bytes()[HEADER_BYTES:]
        self.layout_hash = of.state.layout_hash
        self._capacity = capacity
        self.write(0, b"\xa5" * self.index_offset)

    def ends(self) -> list[int]:
        """Return the end offset of each tensor."""
        index: SlotIndex = unpack_index(
            self.data[self.index_offset : self.index_offset + self.index_bytes], self.index_offset
        )
        return [entry.offset + entry.bytes for entry in index.tensors]

    def write(self, offset: int, data: bytes) -> None:
        with self.path.open("r+b") as file:
            file.seek(HEADER_BYTES + offset)
            file.write(data)

    def seal(self, step: int = STEP) -> None:
        header = SlotHeader(
            job=ENVIRONMENT.job,
            run=ENVIRONMENT.run,
            owner_rank=ENVIRONMENT.rank,
            origin_generation=Generation(1),
            step=Step(step),
            state=SlotState.SEALED,
            capacity_bytes=self._capacity,
            payload_bytes=self.index_offset + self.index_bytes,
            index_offset=self.index_offset,
            index_bytes=self.index_bytes,
            layout_hash=self.layout_hash,
        )
        with self.path.open("r+b") as file:
            file.write(pack_header(header))


class Agent:
    """An `AgentLink` whose fake agent sends its next message at every poll."""

    generation = GENERATION
    has_agent = True
    slots = SlotsRefused(layout_hash=b"", reason="nothing is kept here")

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.page = AgentHalf(GENERATION)
        self.named: Arriving | Welcome
        self.words: Iterator[Word] = iter(())
        self.sent: list[object] = []
        self.published: list[RankHalf] = []
        self.hinted_by: list[str] = []

    def arrives(self, load: int) -> None:
        """Announce that the agent has begun to write the state to restore, and that the state's index is readable.

        `load` is the number of this attempt to load the state.
        """
        self.page = AgentHalf(GENERATION, load=load, verified=0)
        self.named = Arriving(
            generation=GENERATION,
            word_path="",
            base_step=STEP,
            base_slot_path=str(self.slot.path),
            load=load,
            index_offset=self.slot.index_offset,
            index_bytes=self.slot.index_bytes,
        )

    def verified(self, end: int, data: bytes | None = None) -> None:
        """Announce that the first `end` bytes of the state to restore are verified."""
        begin = self.page.verified
        self.slot.write(begin, (self.slot.data if data is None else data)[begin:end])
        self.page = AgentHalf(GENERATION, load=self.page.load, verified=end)

    def start(self, step: int = STEP) -> None:
        """Announce that every rank's state is complete, so that training may start."""
        self.slot.seal(step)
        self.named = Welcome(generation=GENERATION, word_path="", base_step=STEP, base_slot_path=str(self.slot.path))

    def welcome(self) -> Arriving | Welcome:
        return self.named

    def watch(self, is_enough: Callable[[AgentHalf | None], bool]) -> None:
        while not is_enough(self.poll()):
            word = next(self.words, None)
            if word is None:
                raise AgentUnreachable("the agent has nothing more to say")
            word()

    @property
    def word(self) -> AgentHalf | None:
        return self.page

    def poll(self) -> AgentHalf | None:
        return self.page

    def publish(self, half: RankHalf) -> None:
        self.published.append(half)

    def send(self, message: object) -> None:
        self.sent.append(message)

    def hint(self, message: object) -> None:
        self.hinted_by.append(threading.current_thread().name)

    def hold(self, message: object) -> None: ...

    def let_go(self) -> None: ...

    def wait(self, seconds: float) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def trained() -> Trained:
    return Trained(seed=1, steps=3)


@pytest.fixture
def agent(tmp_path: Path, trained: Trained) -> Agent:
    agent = Agent(Slot(tmp_path / "slot", trained))
    agent.arrives(load=1)
    return agent


Open = Callable[[Trained], TrainingSession]


@pytest.fixture
def open_session(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    opened: list[TrainingSession] = []
    asked: list[Any] = []

    def agree(step: Step, problem: str) -> None:
        asked.append(step)
        if problem:
            raise RestoreMismatch(problem)

    monkeypatch.setattr(sessions, "agree", agree)

    def make(fresh: Trained) -> TrainingSession:
        opened.append(TrainingSession(fresh.state, agent, WITHOUT_FINAL_ROUND, CpuCopier()))
        return opened[-1]

    yield make
    for session in opened:
        session.close()
    assert len(asked) <= len(opened), "ranks meet once"


def test_each_tensor_is_copied_as_soon_as_its_bytes_are_verified(
    agent: Agent, trained: Trained, open_session: Open
) -> None:
    fresh, expected = Trained(seed=2, steps=0), trained.bytes()
    ends, seen = agent.slot.ends(), []

    def bring(number: int) -> Word:
        def word() -> None:
            seen.append([name for name, data in fresh.bytes().items() if data == expected.get(name)])
            agent.verified(ends[number])

        return word

    agent.words = iter([*map(bring, range(len(ends))), agent.start])
    assert open_session(fresh).restore() == STEP
    assert fresh.bytes() == expected
    names = list(expected)
    # The parameters are copied first. A parameter's optimizer state is copied when all of its tensors have arrived.
    for number in range(1, 6):
        assert names[number - 1] in seen[number], f"{names[number - 1]} waits for more than its own bytes"
        assert names[number] not in seen[number], "nothing is copied before it is there"
    assert not agent.sent[1:], "slots are asked for, and nothing is complained of"


def test_what_was_copied_of_a_load_that_began_anew_is_void(agent: Agent, trained: Trained, open_session: Open) -> None:
    fresh = Trained(seed=2, steps=0)
    wrong = bytes(reversed(agent.slot.data))
    ends = agent.slot.ends()
    agent.words = iter(
        [
            lambda: agent.verified(ends[2], wrong),
            lambda: agent.verified(ends[6], wrong),
            lambda: agent.arrives(load=2),
            lambda: agent.verified(ends[3]),
            lambda: agent.verified(ends[-1]),
            agent.start,
        ]
    )
    assert open_session(fresh).restore() == STEP
    assert fresh.bytes() == trained.bytes()


def test_a_load_that_begins_anew_behind_the_last_byte_counts_too(
    agent: Agent, trained: Trained, open_session: Open
) -> None:
    fresh = Trained(seed=2, steps=0)
    end = agent.slot.ends()[-1]
    agent.words = iter(
        [
            lambda: agent.verified(end, bytes(reversed(agent.slot.data))),
            lambda: agent.arrives(load=2),
            lambda: agent.verified(end),
            agent.start,
        ]
    )
    assert open_session(fresh).restore() == STEP
    assert fresh.bytes() == trained.bytes()


def test_one_that_is_whole_when_it_is_named_again_is_read_in_one_go(
    agent: Agent, trained: Trained, open_session: Open
) -> None:
    fresh = Trained(seed=2, steps=0)
    end = agent.slot.ends()[-1]

    def again() -> None:
        agent.arrives(load=2)
        agent.verified(end)
        agent.start()

    agent.words = iter([lambda: agent.verified(agent.slot.ends()[1], b"\0" * end), again])
    assert open_session(fresh).restore() == STEP
    assert fresh.bytes() == trained.bytes()


def test_a_thread_that_a_script_may_end_beside_calls_no_torch(
    agent: Agent, open_session: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    callers, frombuffer = [], torch.frombuffer

    def noting(*given: Any, **more: Any) -> torch.Tensor:
        callers.append(threading.current_thread())
        return frombuffer(*given, **more)

    monkeypatch.setattr(torch, "frombuffer", noting)
    open_session(Trained(seed=2, steps=0))
    for thread in threading.enumerate():
        if thread.name == "everstep-prefault":
            thread.join()
    assert set(callers) == {threading.current_thread()}


def test_training_goes_on_while_the_agent_is_told_of_it(agent: Agent, open_session: Open) -> None:
    agent.words = iter([lambda: agent.verified(agent.slot.ends()[-1]), agent.start])
    open_session(Trained(seed=2, steps=0)).restore()
    for thread in threading.enumerate():
        if thread.name == "everstep-slots":
            thread.join()
    assert agent.hinted_by == ["everstep-slots"]


def test_nobody_goes_on_with_what_has_not_come_everywhere(agent: Agent, open_session: Open) -> None:
    fresh = Trained(seed=2, steps=0)
    agent.words = iter([lambda: agent.verified(agent.slot.ends()[-1])])
    session = open_session(fresh)
    with pytest.raises(AgentUnreachable):
        session.restore()
    with pytest.raises(SessionMisuse):
        session.boundary()
    assert {half.boundary for half in agent.published} == {-1}


def test_a_load_that_fails_in_the_middle_is_no_state(agent: Agent, open_session: Open) -> None:
    fresh = Trained(seed=2, steps=0)
    agent.words = iter([lambda: agent.verified(agent.slot.ends()[3])])
    session = open_session(fresh)
    with pytest.raises(AgentUnreachable):
        session.restore()
    with pytest.raises(SessionMisuse):
        session.boundary()


def test_a_slot_that_is_not_what_was_named_is_refused_at_the_end(agent: Agent, open_session: Open) -> None:
    fresh = Trained(seed=2, steps=0)
    agent.words = iter([lambda: agent.verified(agent.slot.ends()[-1]), lambda: agent.start(step=STEP + 1)])
    with pytest.raises(RestoreMismatch, match="holds"):
        open_session(fresh).restore()
    assert any(isinstance(message, RankFault) for message in agent.sent)


def test_what_does_not_fit_is_refused_before_anything_is_written(
    tmp_path: Path, agent: Agent, open_session: Open
) -> None:
    fresh = Trained(seed=2, steps=0)
    fresh.state.facts["rank"] = "5"
    before = fresh.bytes()
    agent.words = iter([lambda: agent.verified(agent.slot.ends()[-1]), agent.start])
    with pytest.raises(RestoreMismatch, match="rank was 0, is 5"):
        open_session(fresh).restore()
    assert fresh.bytes() == before


def test_what_an_earlier_library_kept_is_refused_before_anything_is_written(
    tmp_path: Path, agent: Agent, open_session: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = Trained(seed=1, steps=3)
    (adapter,) = older.state.adapters
    observe = adapter.observe

    def without_buffers() -> AdapterState:
        state = observe()
        del state.values["buffers"]  # type: ignore[attr-defined]
        return state

    monkeypatch.setattr(adapter, "observe", without_buffers)
    older.state._facts_data, older.state.layout_hash = encode_facts(
        {name: fact for name, fact in older.state.facts.items() if name != "format"}
    )
    agent.slot = Slot(tmp_path / "older", older)
    agent.arrives(load=1)
    fresh = Trained(seed=2, steps=0)
    before = fresh.bytes()
    agent.words = iter([lambda: agent.verified(agent.slot.ends()[-1]), agent.start])
    with pytest.raises(RestoreMismatch, match=f"format was absent, is {FORMAT}"):
        open_session(fresh).restore()
    assert fresh.bytes() == before
