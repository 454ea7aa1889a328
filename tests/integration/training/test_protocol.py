"""One rank in this process, with an agent in a thread.

The tests check which steps the rank captures, when it captures them, and what it reports to the agent.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everstep.training
from everstep.protocol import slot
from everstep.protocol.ids import Step
from everstep.protocol.rank_messages import (
    FINISHED,
    NONE,
    Abandoned,
    AgentHalf,
    Boundary,
    Captured,
    Capturing,
    IdleSpan,
    IdleSpans,
    PageChanged,
    Phase,
    RankFault,
    RankHalf,
    RankHello,
    RankStanding,
    SlotsRefused,
    SlotsRequest,
    StopState,
    read_rank_half,
)
from everstep.protocol.slot import HEADER_BYTES, payload_digest, unpack_header, unpack_index
from everstep.training import TrainingSession, agent_link, snapshots
from everstep.training.agent_link import AgentLink
from everstep.training.capture import SlotMemory, view_of
from everstep.training.copier import Copier, Copies, CopyTicket, CpuCopier, Done, Progress
from everstep.training.cuda_copier import CudaCopier
from everstep.training.script import UNCROWDED_CORES, Environment
from everstep.training.session import QUIET_SECONDS
from everstep.training.snapshots import STREAMED_BYTES
from everstep.training.state import RankState
from everstep.training.transfer_plan import Gathering
from tests.integration.training.fake_agent import FakeAgent
from tests.integration.training.recorded_links import Links

pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def _rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("EVERSTEP_FINAL_ROUND_SECONDS", "5")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclass(frozen=True)
class OptimizerStep:
    """Callable that makes one optimizer step of a small model."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 3)).sum().backward()
        self.optimizer.step()


class TestEnds(Exception):
    """Error with which a test closes its sessions: a session of a failed script does not wait for a commit."""

    __test__ = False


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> Links:
    """Return the connections of the sessions that the test will begin."""
    found = Links()
    monkeypatch.setattr("everstep.training.registration.UnixAgentLink", found.open)
    return found


Begin = Callable[..., tuple[TrainingSession, OptimizerStep]]


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Begin]:
    """Yield a function that starts a session of a small model, and returns it with an `OptimizerStep`."""
    sessions: list[TrainingSession] = []

    def make(
        agent: FakeAgent,
        *,
        width: int = 5,
        frozen_bytes: int = 0,
        clock: Callable[[], float] = time.monotonic,
        world_size: int = 1,
        **register: Any,
    ) -> tuple[TrainingSession, OptimizerStep]:

        def create(
            state: RankState, link: AgentLink, environment: Environment, copier: Copier, **options: Any
        ) -> TrainingSession:
            environment = replace(environment, world_size=world_size)
            return TrainingSession(state, link, environment, copier, clock=clock, **options)

        monkeypatch.setattr("everstep.training.registration.TrainingSession", create)
        for name, value in agent.environment.items():
            monkeypatch.setenv(name, value)
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(3, width), nn.Dropout(0.5), nn.Linear(width, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        if frozen_bytes:
            model.register_parameter("frozen", nn.Parameter(torch.rand(frozen_bytes // 4), requires_grad=False))
        session = everstep.training.init(model=model, optimizer=optimizer, **register)
        sessions.append(session)
        session.restore()
        return session, OptimizerStep(model, optimizer)

    yield make
    for session in sessions:
        with contextlib.suppress(TestEnds), contextlib.closing(session):
            raise TestEnds


def train(session: TrainingSession, step: Callable[[], None], until: Callable[[], bool], limit: int = 5000) -> int:
    for _ in range(limit):
        step()
        session.boundary()
        if until():
            return session.step - 1
    raise AssertionError("it never happened")


def join_slot_mapper() -> None:
    """Wait for the thread that maps a session's slots."""
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "everstep-slots")
    thread.join()


def wait_told(agent: FakeAgent, boundary: int) -> None:
    """Wait until the agent has received the message that a step is finished."""
    agent.wait_for(lambda: any(message.boundary == boundary for _, message in agent.of_kind(Boundary)))  # type: ignore[attr-defined]


class Changing:
    """A user object with a tensor that tests change."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def state_dict(self) -> dict[str, Any]:
        return {"tensor": self.tensor}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def outcomes(agent: FakeAgent, session: TrainingSession, step: Callable[[], None], count: int) -> list[str]:
    """Train until `count` more proposed steps are captured or abandoned. At each proposal, wait until the agent has
    received the outcome.

    Return the outcomes in the order of steps: the reason of an abandoned step, or an empty text for a captured step.
    """
    found = []
    for _ in range(count):
        agent.wait_for(lambda: agent.proposed != NONE)
        proposed = agent.proposed
        while session.step <= proposed:
            step()
            session.boundary()
        session.fence()
        agent.wait_for(partial(settled, agent, proposed))
        (message,) = settled(agent, proposed)
        found.append(message.reason if isinstance(message, Abandoned) else "")
    return found


def settled(agent: FakeAgent, step: int) -> list[Captured | Abandoned]:
    """Return the messages that report a proposed step as captured or abandoned."""
    with agent.changed:
        return [
            message
            for _, message in agent.messages
            if isinstance(message, Captured | Abandoned) and message.step == step
        ]


def newest_sealed(agent: FakeAgent) -> dict[str, tuple[tuple[int, ...], bytes]]:
    """Return shape and bytes of each tensor of the newest committed step, by name."""
    data = agent.sealed[0, agent.committed].read_bytes()
    header = unpack_header(data[:HEADER_BYTES])
    payload = data[HEADER_BYTES : HEADER_BYTES + header.payload_bytes]
    index = unpack_index(payload[header.index_offset :], header.index_offset)
    return {
        entry.name: (tuple(entry.shape), payload[entry.offset : entry.offset + entry.bytes]) for entry in index.tensors
    }


def live(step: OptimizerStep, changing: Changing) -> dict[str, tuple[tuple[int, ...], bytes]]:
    """Return shape and bytes of each live tensor, by the name that the session gives it."""
    model, optimizer = step.model, step.optimizer
    tensors: dict[str, torch.Tensor] = {f"model/{name}": parameter for name, parameter in model.named_parameters()}
    tensors |= {
        f"optimizer/{name}/{key}": kept
        for name, parameter in model.named_parameters()
        for key, kept in optimizer.state[parameter].items()
    }
    tensors["value/objects/extra/changing/tensor"] = changing.tensor
    return {name: (tuple(tensor.shape), tensor.detach().numpy().tobytes()) for name, tensor in tensors.items()}


def rank_half(agent: FakeAgent) -> RankHalf:
    half = read_rank_half(agent.lines[0].page)
    assert half is not None
    return half


def test_a_captured_slot_is_the_state_and_nothing_else(tmp_path: Path, begin: Begin) -> None:
    with FakeAgent(tmp_path, 1, commit_target=6) as agent:
        begun = time.monotonic()
        session, step = begin(agent)
        train(session, step, agent.reached.is_set)
        slots = [path.read_bytes() for path in agent.lines[0].slot_paths]
        assert len(agent.commits) == 6
        session.fence()
        assert len(session.blocked_seconds) >= 6
        assert all(seconds > 0 for seconds in session.blocked_seconds)
        assert sum(session.blocked_seconds) < time.monotonic() - begun
    for data in slots:
        header = unpack_header(data[:HEADER_BYTES])
        payload = data[HEADER_BYTES : HEADER_BYTES + header.payload_bytes]
        assert payload_digest(payload) == header.payload_digest
        index = unpack_index(payload[header.index_offset :], header.index_offset)
        covered = bytearray(payload[: header.index_offset])
        for entry in index.tensors:
            covered[entry.offset : entry.offset + entry.bytes] = bytes(entry.bytes)
        assert not any(covered), "the gaps between tensors are zero"
        names = {entry.name for entry in index.tensors}
        assert {"model/0.weight", "optimizer/0.weight/exp_avg", "optimizer/2.bias/step"} <= names


def test_slots_have_their_pages_before_a_boundary_asks_for_them(
    tmp_path: Path, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: queue.SimpleQueue[int] = queue.SimpleQueue()
    monkeypatch.setattr(CpuCopier, "prepare", lambda _copier, memory: prepared.put(memory.capacity_bytes))
    with FakeAgent(tmp_path, 1, commit_target=0) as agent:
        session, _ = begin(agent)
        assert {prepared.get(timeout=30), prepared.get(timeout=30)} == {
            agent.of_kind(SlotsRequest)[0][1].capacity_bytes
        }  # type: ignore[attr-defined]
        assert rank_half(agent).boundary == session.step - 1 == 0


def test_what_is_said_while_the_page_is_looked_at_is_not_slept_over(
    tmp_path: Path, begin: Begin, links: Links, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeAgent(tmp_path, 1, commit_target=0) as agent:
        begin(agent)
        link, line, read = links.newest, agent.lines[0], agent_link.read_agent_half
        # The thread that maps slots also reads the agent's messages. It could read the message that this test sends.
        join_slot_mapper()
        link.poll()

        def slow(page: memoryview) -> AgentHalf | None:
            found = read(page)
            if found is not None and found.verified == 0:
                line.write(verified=7)
                line.say(PageChanged())
                select.select([links.sockets[-1]], [], [])
            return found

        def nothing_wakes(_seconds: float) -> None:
            raise AssertionError("it sleeps over what was said")

        monkeypatch.setattr(agent_link, "read_agent_half", slow)
        monkeypatch.setattr(link, "wait", nothing_wakes)
        link.watch(lambda half: half is not None and half.verified == 7)


def test_slots_that_cannot_be_mapped_are_tried_again(
    tmp_path: Path, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    mapped, fails = snapshots.SlotMemory, iter([True, True])

    def failing(path: Path, capacity_bytes: int) -> SlotMemory:
        if next(fails, False):
            raise OSError("not there")
        return mapped(path, capacity_bytes)

    monkeypatch.setattr(snapshots, "SlotMemory", failing)
    with FakeAgent(tmp_path, 1) as agent:
        session, step = begin(agent)
        train(session, step, agent.reached.is_set)


def test_who_hears_of_a_step_too_late_says_so_once(tmp_path: Path, begin: Begin) -> None:
    with FakeAgent(tmp_path, 1, commit_target=0) as agent:
        session, step = begin(agent)
        for _ in range(4):
            step()
            session.boundary()
        agent.lines[0].write(proposed=2, slot=0)
        for _ in range(3):
            step()
            session.boundary()
        agent.wait_for(lambda: bool(agent.of_kind(Abandoned)))
        assert [(message.step, message.reason) for _, message in agent.of_kind(Abandoned)] == [(2, "late")]  # type: ignore[attr-defined]


def test_the_base_is_never_captured_again(tmp_path: Path, begin: Begin) -> None:
    with FakeAgent(tmp_path, 1, commit_target=1) as agent:
        session, step = begin(agent)
        train(session, step, agent.reached.is_set)
        base = agent.committed
        slots = {0: agent.sealed[0, base]}
    with FakeAgent(tmp_path, 1, 2, base_step=base, base_slots=slots, commit_target=0) as agent:
        session, step = begin(agent)
        agent.lines[0].write(proposed=base, slot=0)
        for _ in range(5):
            step()
            session.boundary()
        wait_told(agent, base + 5)
        assert agent.of_kind(Abandoned) == agent.of_kind(Captured) == []


def test_boundaries_say_when_they_were_passed_and_what_saving_took(tmp_path: Path, begin: Begin) -> None:
    with FakeAgent(tmp_path, 1) as agent:
        session, step = begin(agent)
        begun = time.monotonic()
        last = train(session, step, agent.reached.is_set)
        ended = time.monotonic()
        wait_told(agent, last)
        passed = [message for _, message in agent.of_kind(Boundary) if message.at_seconds]  # type: ignore[attr-defined]
        times = [message.at_seconds for message in passed]
        assert times == sorted(set(times))
        assert all(begun <= at <= ended for at in times)
        assert passed[-1].boundary == last
        assert session.blocked_seconds
        told = sum(message.blocked_seconds for message in passed)
        assert 0 < told <= sum(session.blocked_seconds) + 1e-9
        agent.wait_for(lambda: bool(agent.of_kind(Captured)))
        assert all(0 < message.seconds < time.monotonic() - begun for _, message in agent.of_kind(Captured))  # type: ignore[attr-defined]


def test_boundaries_from_which_nothing_follows_are_told_together(tmp_path: Path, begin: Begin, links: Links) -> None:
    with FakeAgent(tmp_path, 1, lead=12) as agent:
        session, step = begin(agent, clock=lambda: session.step * QUIET_SECONDS / 2)
        agent.wait_for(lambda: agent.proposed == 12)
        for _ in range(12):
            train(session, step, lambda: True)
        wait_told(agent, 12)
    told = [
        [message.boundary for message in found if isinstance(message, Boundary) and message.at_seconds]
        for _, found in links.messages()
    ]
    assert [found for found in told if found and found[-1] <= 12] == [
        [1],
        [2, 3],
        [4, 5],
        [6, 7],
        [8, 9],
        [10, 11],
        [12],
    ]


def test_a_small_capture_is_told_with_its_boundary_in_one_go(tmp_path: Path, begin: Begin, links: Links) -> None:
    with FakeAgent(tmp_path, 1, commit_target=6) as agent:
        session, step = begin(agent)
        last = train(session, step, agent.reached.is_set)
        wait_told(agent, last)
        passed = [message.boundary for _, message in agent.of_kind(Boundary) if message.at_seconds]  # type: ignore[attr-defined]
        assert passed == list(range(1, last + 1)), "each boundary is told once"
        audited = [message.step for _, message in agent.of_kind(Captured)][:3]  # type: ignore[attr-defined]
    told = [
        found
        for _, found in links.messages()
        if any(isinstance(message, Captured) and message.step not in audited for message in found)
    ]
    assert len(told) >= 3
    for *_, boundary, captured in told:
        assert isinstance(boundary, Boundary)
        assert isinstance(captured, Captured)
        assert boundary.boundary == captured.step


def test_refused_slots_make_it_abandon_with_the_reason(tmp_path: Path, begin: Begin, links: Links) -> None:
    with FakeAgent(tmp_path, 1, commit_target=0) as agent:
        take = agent.take

        def refuse(line: Any, message: object) -> None:
            if isinstance(message, SlotsRequest):
                line.say(SlotsRefused(layout_hash=message.layout_hash, reason="8 GiB needed, 4 GiB there"))
            else:
                take(line, message)

        agent.take = refuse  # type: ignore[method-assign]
        session, step = begin(agent)
        train(session, step, lambda: isinstance(links.newest.slots, SlotsRefused))
        train(session, step, lambda: True)  # the session notices the refusal here at the latest
        agent.lines[0].write(proposed=session.step, slot=NONE)
        step()
        session.boundary()
        agent.wait_for(lambda: bool(agent.of_kind(Abandoned)))
        assert agent.of_kind(Abandoned)[0][1].reason == "8 GiB needed, 4 GiB there"  # type: ignore[attr-defined]


def test_a_layout_that_outgrows_its_slots_costs_one_snapshot_and_asks_anew(tmp_path: Path, begin: Begin) -> None:
    changing = Changing(torch.zeros(500))
    with FakeAgent(tmp_path, 1, commit_target=100) as agent:
        session, step = begin(agent, extra={"changing": changing})
        assert outcomes(agent, session, step, 4) == [""] * 4
        changing.tensor = torch.ones(20_000)
        lost, *kept = outcomes(agent, session, step, 4)
        assert lost == "the layout of the state has changed; the rank requests new slots"
        assert kept == [""] * 3
        requests = [message for _, message in agent.of_kind(SlotsRequest)]
        assert len(requests) == 2
        assert requests[0].layout_hash == requests[1].layout_hash, "what grows is not what must fit"  # type: ignore[attr-defined]
        assert newest_sealed(agent).items() >= live(step, changing).items()


def reshape_extra(changing: Changing, _: torch.optim.Optimizer) -> None:
    changing.tensor = torch.ones(20, 25)


def shrink_extra(changing: Changing, _: torch.optim.Optimizer) -> None:
    changing.tensor = torch.ones(400)


def replace_extra(changing: Changing, _: torch.optim.Optimizer) -> None:
    changing.tensor = torch.ones(500)


def replace_moments(_: Changing, optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].clone()


def reshape_counts(_: Changing, optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["step"] = state["step"].reshape(1).clone()


def add_to_optimizer(_: Changing, optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["mine"] = torch.ones(7)


def move_parameters(_: Changing, optimizer: torch.optim.Optimizer) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.data = parameter.data.clone()


@pytest.mark.parametrize("before", [1, 4], ids=["while snapshots are audited", "afterwards"])
@pytest.mark.parametrize(
    "change",
    [reshape_extra, shrink_extra, replace_extra, replace_moments, reshape_counts, add_to_optimizer, move_parameters],
    ids=lambda change: change.__name__.replace("_", " "),
)
def test_tensors_that_are_others_or_have_another_shape_cost_no_snapshot_where_slots_have_room(
    tmp_path: Path, begin: Begin, change: Callable[[Changing, torch.optim.Optimizer], None], before: int
) -> None:
    changing = Changing(torch.zeros(500))
    with FakeAgent(tmp_path, 1, commit_target=100) as agent:
        session, step = begin(agent, extra={"changing": changing})
        assert outcomes(agent, session, step, before) == [""] * before
        change(changing, step.optimizer)
        for _ in range(3):
            assert outcomes(agent, session, step, 1) == [""]
            assert newest_sealed(agent).items() >= live(step, changing).items()
        assert len(agent.of_kind(SlotsRequest)) == 1


def test_values_that_outgrow_their_room_ask_for_more(tmp_path: Path, begin: Begin) -> None:
    class Record:
        values: list[float]

        def __init__(self) -> None:
            self.values = []

        def state_dict(self) -> dict[str, Any]:
            return {"values": self.values}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    record = Record()
    with FakeAgent(tmp_path, 1, commit_target=3) as agent:
        session, step = begin(agent, extra={"record": record})
        train(session, step, lambda: len(agent.commits) >= 1)
        record.values = [0.5] * 50_000
        train(session, step, agent.reached.is_set)
        first, second = (message for _, message in agent.of_kind(SlotsRequest))
        assert second.capacity_bytes > first.capacity_bytes + 9 * 50_000  # type: ignore[attr-defined]


def test_state_that_turns_into_what_cannot_be_kept_costs_snapshots_not_training(
    tmp_path: Path, begin: Begin, caplog: pytest.LogCaptureFixture
) -> None:
    class Turning:
        value: object = None

        def state_dict(self) -> dict[str, Any]:
            return {"value": self.value}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    turning = Turning()
    with FakeAgent(tmp_path, 1, commit_target=4) as agent:
        session, step = begin(agent, extra={"turning": turning})
        turning.value = object()
        train(
            session,
            step,
            lambda: any("extra/turning/value" in message.reason for _, message in agent.of_kind(Abandoned)),
        )  # type: ignore[attr-defined]
        turning.value = None
        train(session, step, lambda: len(agent.commits) >= 2)
        turning.value = object()
        train(
            session,
            step,
            lambda: any("extra/turning/value" in message.reason for _, message in agent.of_kind(Abandoned)),
        )  # type: ignore[attr-defined]
        turning.value = 3
        train(session, step, agent.reached.is_set)
    assert caplog.text.count("snapshots fail") == 1, "the same reason is said once"


def test_an_optimizer_that_outgrows_its_slots_gets_new_ones(tmp_path: Path, begin: Begin) -> None:
    with FakeAgent(tmp_path, 1, commit_target=100) as agent:
        session, step = begin(agent, frozen_bytes=1 << 20)
        assert outcomes(agent, session, step, 1) == [""]
        frozen = step.model.frozen
        assert isinstance(frozen, nn.Parameter)

        def train_all() -> None:
            step.optimizer.zero_grad()
            (step.model(torch.randn(4, 3)).sum() + frozen.sum()).backward()
            step.optimizer.step()

        frozen.requires_grad_(True)
        step.optimizer.add_param_group({"params": [frozen]})
        lost, *later = outcomes(agent, session, train_all, 3)
        assert lost == "the layout of the state has changed; the rank requests new slots"
        assert later == ["", ""]
        assert "optimizer/frozen/exp_avg" in session.state_tensors()


def test_a_parameter_group_added_after_init_is_not_kept_by_halves(tmp_path: Path, begin: Begin) -> None:
    with FakeAgent(tmp_path, 1, commit_target=2) as agent:
        session, step = begin(agent)
        train(session, step, lambda: len(agent.commits) >= 1)
        step.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
        newest = agent.committed
        train(
            session,
            step,
            lambda: any("of shape [3], is not" in message.reason for _, message in agent.of_kind(Abandoned)),
        )  # type: ignore[attr-defined]
        assert agent.committed <= newest + 1, "a step that was being captured already may still be committed"
        assert "model/0.weight" in session.state_tensors(), "results can be written all the same"


@pytest.mark.parametrize(("until_step", "target"), [(4, 4), (1000.0, 1000), (2**60, 0), (float("inf"), 0)])
def test_the_agent_is_told_once_how_far_the_script_will_go(
    tmp_path: Path, begin: Begin, until_step: Any, target: int
) -> None:
    with FakeAgent(tmp_path, 1, commit_target=0) as agent:
        session, step = begin(agent)
        assert rank_half(agent).target == 0
        batches = session.batches(until_step=until_step)
        next(batches)
        assert rank_half(agent).target == target
        step()
        next(batches)
        assert (rank_half(agent).boundary, rank_half(agent).target) == (1, target)


def test_a_stop_ahead_is_echoed_and_obeyed_at_its_step(tmp_path: Path, begin: Begin) -> None:
    def confirm(agent: FakeAgent, _rank: int, message: object) -> None:
        half = read_rank_half(agent.lines[0].page)
        if isinstance(message, Boundary) and half is not None and half.echo_step == 4 and half.boundary == 4:
            assert half.echo == 1
            agent.announce_stop(4, StopState.CONFIRMED)

    with FakeAgent(tmp_path, 1, commit_target=0, on_message=confirm) as agent:
        session, step = begin(agent)
        agent.announce_stop(4, StopState.ANNOUNCED)
        stops = []
        for _ in range(4):
            step()
            stops.append(session.boundary().stop)
            if len(stops) == 3:
                assert (rank_half(agent).echo_step, rank_half(agent).echo) == (4, 1)
        assert stops == [False, False, False, True]
        assert rank_half(agent).standing is RankStanding.STOPPED
        assert list(session.batches(until_step=100)) == [], "a stopped session hands out no more batches"


def test_a_stop_that_was_passed_is_answered_no(tmp_path: Path, begin: Begin) -> None:
    with FakeAgent(tmp_path, 1, commit_target=0) as agent:
        session, step = begin(agent)
        for _ in range(3):
            step()
            session.boundary()
        agent.announce_stop(2, StopState.ANNOUNCED)
        step()
        assert not session.boundary().stop
        assert (rank_half(agent).echo_step, rank_half(agent).echo) == (2, 2)


def test_a_withdrawn_stop_lets_the_waiting_rank_go_on(tmp_path: Path, begin: Begin) -> None:
    with FakeAgent(tmp_path, 1, commit_target=0) as agent:
        session, step = begin(agent)
        agent.announce_stop(1, StopState.ANNOUNCED)

        def withdraw() -> None:
            agent.wait_for(lambda: rank_half(agent).echo_step == 1)
            agent.announce_stop(NONE, StopState.NONE)

        thread = threading.Thread(target=withdraw)
        thread.start()
        step()
        assert not session.boundary().stop
        thread.join()


def test_a_rank_that_waits_for_a_stop_outlives_its_agent(tmp_path: Path, begin: Begin) -> None:
    with FakeAgent(tmp_path, 1, commit_target=0) as agent:
        session, step = begin(agent)
        agent.announce_stop(1, StopState.ANNOUNCED)

        def restart() -> None:
            agent.wait_for(lambda: rank_half(agent).echo_step == 1)
            agent.stop()
            agent.start()
            agent.wait_for(lambda: len(agent.of_kind(RankHello)) == 2)
            agent.announce_stop(1, StopState.CONFIRMED)

        thread = threading.Thread(target=restart)
        thread.start()
        step()
        assert session.boundary().stop
        thread.join()


def test_a_stop_that_was_confirmed_is_obeyed_while_the_agent_is_away(
    tmp_path: Path, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERSTEP_FINAL_ROUND_SECONDS", "0.2")
    with FakeAgent(tmp_path, 1, commit_target=0) as agent:
        session, step = begin(agent)
        agent.announce_stop(2, StopState.ANNOUNCED)
        step()
        assert not session.boundary().stop
        agent.announce_stop(2, StopState.CONFIRMED)
        agent.stop()
        step()
        assert session.boundary().stop
        assert rank_half(agent).standing is RankStanding.STOPPED


def test_a_rank_stands_at_the_stop_that_it_agreed_to_until_its_agent_is_back(
    tmp_path: Path, begin: Begin, links: Links, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeAgent(tmp_path, 1, commit_target=0) as agent:
        session, step = begin(agent)
        links.notify(agent)
        agent.announce_stop(2, StopState.ANNOUNCED)
        step()
        assert not session.boundary().stop
        agent.stop()

        def confirm() -> None:
            agent.wait_for(lambda: rank_half(agent).boundary == 2)
            agent.start()
            agent.wait_for(lambda: len(agent.of_kind(RankHello)) == 2)
            agent.announce_stop(2, StopState.CONFIRMED)

        thread = threading.Thread(target=confirm)
        thread.start()
        step()
        assert session.boundary().stop
        thread.join()


@pytest.mark.parametrize("stop", [1, 2])
def test_a_rank_stands_at_the_stop_that_it_agreed_to_while_the_page_cannot_be_read(
    tmp_path: Path, begin: Begin, monkeypatch: pytest.MonkeyPatch, stop: int
) -> None:
    """The script overwrites the shared-memory page before or while the rank waits at an agreed stop.

    The rank waits at the stop until the agent has repaired the page.
    """
    read, unreadable, is_lost = agent_link.read_agent_half, threading.Semaphore(0), threading.Event()

    def look(page: memoryview) -> AgentHalf | None:
        if (half := read(page)) is None:
            unreadable.release()
        return half

    def confirm() -> None:
        agent.wait_for(lambda: rank_half(agent).echo_step == stop)
        agent.lines[0].page[:2048] = b"\xee" * 2048  # overwrite the page, as a faulty script would
        is_lost.set()
        for _ in range(5):
            agent.lines[0].say(PageChanged())
            assert unreadable.acquire(timeout=10)
        agent.announce_stop(stop, StopState.CONFIRMED)

    with FakeAgent(tmp_path, 1, commit_target=0) as agent:
        session, step = begin(agent)
        monkeypatch.setattr(agent_link, "read_agent_half", look)
        agent.announce_stop(stop, StopState.ANNOUNCED)
        thread = threading.Thread(target=confirm)
        thread.start()
        if stop == 2:
            step()
            assert not session.boundary().stop
            assert is_lost.wait(10)
        step()
        assert session.boundary().stop
        thread.join()


def test_training_goes_on_without_its_agent_and_captures_when_it_is_back(
    tmp_path: Path, begin: Begin, profilers: list[Profiler]
) -> None:
    with FakeAgent(tmp_path, 1, commit_target=2) as agent:
        session, step = begin(agent, world_size=2)
        train(session, step, lambda: len(agent.commits) >= 1)
        profilers[0].report(0.2, (IdleSpan(0.0, 0.1, 0.0),))
        agent.is_held = True
        agent.stop()
        for _ in range(20):
            step()
            assert not session.boundary().stop
        agent.is_held = False
        agent.start()
        train(session, step, agent.reached.is_set, limit=100_000)
        assert len(agent.of_kind(RankHello)) == 2
        assert len(agent.of_kind(SlotsRequest)) == 2, "asked again of the agent that came back"
        assert agent.of_kind(IdleSpans), (
            "which is told when the network is idle, too, though nobody looks again: all nodes go by what its "
            "trial finds"
        )
        assert rank_half(agent).boundary == session.step - 1


def propose_the_last(agent: FakeAgent, _rank: int, message: object) -> None:
    """When the rank waits in `close`, propose the step that it has reached.

    If the rank abandons it, propose no more steps.
    """
    half = read_rank_half(agent.lines[0].page)
    if half is None or half.standing is not RankStanding.CLOSING:
        return
    if isinstance(message, Abandoned):
        agent.commit_target = 0
    elif agent.proposed == NONE and agent.committed != half.boundary:
        agent.commit_target, agent.lead, agent.newest = 10, 0, half.boundary - 1


def test_the_last_step_is_captured_inside_close(tmp_path: Path, begin: Begin) -> None:
    with FakeAgent(tmp_path, 1, commit_target=1, on_message=propose_the_last, polls=True) as agent:
        session, step = begin(agent, data=[1, 2, 3])
        for _ in session.batches(until_step=2):
            step()
        last = train(session, step, agent.reached.is_set)
        step()
        session.boundary()
        session.close()
        agent.wait_for(lambda: rank_half(agent).standing is RankStanding.CLOSED)
        assert agent.committed == last + 1
        assert rank_half(agent).phase is Phase.CLOSE
        session.close()  # closing twice has no effect


@pytest.mark.parametrize("is_stop", [True, False])
def test_an_evaluation_behind_the_loop_leaves_no_trace_in_the_last_step(
    tmp_path: Path, begin: Begin, is_stop: bool
) -> None:
    with FakeAgent(tmp_path, 1, commit_target=1, on_message=propose_the_last, polls=True) as agent:
        session, step = begin(agent)
        last = train(session, step, agent.reached.is_set) + 1
        if is_stop:
            agent.announce_stop(last, StopState.CONFIRMED)
            step()
            assert session.boundary().stop
        else:
            for _ in session.batches(until_step=last):
                step()
        step.model.eval()
        drawn = torch.rand(3)
        assert list(session.batches(until_step=last)) == []
        session.close()
        assert agent.committed == last
        slots = {0: agent.sealed[0, last]}
    with FakeAgent(tmp_path, 1, 2, base_step=last, base_slots=slots, commit_target=0) as agent:
        session, step = begin(agent)
        assert session.step == last + 1
        assert all(module.training for module in step.model.modules())
        assert torch.equal(torch.rand(3), drawn), "as if nothing had been drawn behind the loop"


@pytest.mark.parametrize("leave", ["step", "fence", "batch", "break"])
def test_a_state_that_went_on_behind_the_last_boundary_is_not_captured_as_that_boundary(
    tmp_path: Path, begin: Begin, caplog: pytest.LogCaptureFixture, leave: str
) -> None:
    with FakeAgent(tmp_path, 1, commit_target=1, on_message=propose_the_last, polls=True) as agent:
        session, step = begin(agent, data=[1, 2, 3])
        last = train(session, step, agent.reached.is_set) + 1
        step()
        session.boundary()
        {
            "step": step,
            "fence": session.fence,
            "batch": lambda: next(iter(session.data["data"])),  # type: ignore[attr-defined]
            "break": lambda: next(session.batches(until_step=last + 5)),  # type: ignore[call-overload]
        }[leave]()
        session.close()
        (abandoned,) = (message for _, message in agent.of_kind(Abandoned) if message.step == last)  # type: ignore[attr-defined]
        assert "continued after it" in abandoned.reason  # type: ignore[attr-defined]
        assert agent.committed < last
        assert f"step {last} is not captured at the end: the script has continued after it" in caplog.text
        assert "not committed within" not in caplog.text, "nobody waits for what cannot come"


def test_a_step_that_was_captured_at_its_boundary_is_kept_however_the_script_went_on(
    tmp_path: Path, begin: Begin, links: Links
) -> None:
    def is_captured() -> bool:
        """Return whether the rank has begun to capture its newest step."""
        return any(half.copying == session.step - 1 for half in links.newest.published)

    with FakeAgent(tmp_path, 1, commit_target=4) as agent:
        session, step = begin(agent)
        train(session, step, is_captured)
        last = session.step - 1
        step()
        session.close()
        assert last in agent.commits


@pytest.mark.parametrize(("is_end", "is_generator"), [(True, False), (False, False), (False, True)])
def test_a_script_that_fails_is_known_to_have_failed_without_a_final_round(
    tmp_path: Path, begin: Begin, caplog: pytest.LogCaptureFixture, is_end: bool, is_generator: bool
) -> None:
    def close() -> Iterator[None]:
        try:
            yield
        finally:
            session.close()

    def run() -> None:
        with contextlib.closing(close()) if is_generator else contextlib.closing(session) as closes:
            if is_generator:
                next(closes)  # type: ignore[call-overload]
            raise SystemExit(0) if is_end else FloatingPointError("the loss is NaN")

    with FakeAgent(tmp_path, 1, commit_target=1, on_message=propose_the_last, polls=True) as agent:
        session, step = begin(agent)
        last = train(session, step, agent.reached.is_set) + 1
        step()
        session.boundary()
        with pytest.raises((SystemExit, FloatingPointError)):
            run()
        agent.wait_for(lambda: rank_half(agent).standing is RankStanding.CLOSED)
        assert (agent.committed == last) == is_end
        assert (
            f"step {last} is not captured at the end: close() was called while the script handles FloatingPointError"
            in caplog.text
        ) != is_end


@pytest.mark.parametrize("way", ["except", "closing generator"])
def test_an_iterator_that_ends_is_a_good_end(
    tmp_path: Path, begin: Begin, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    def loop(session: TrainingSession, batches: Iterator[Any], step: Callable[[], None]) -> Iterator[None]:
        try:
            while True:
                try:
                    next(batches)
                except StopIteration:
                    if way == "except":
                        session.close()
                    yield
                else:
                    step()
        finally:
            if way == "closing generator":
                session.close()

    with FakeAgent(tmp_path, 1, commit_target=1, on_message=propose_the_last, polls=True) as agent:
        session, step = begin(agent)
        last = train(session, step, agent.reached.is_set) + 1
        run = loop(session, session.batches(until_step=last), step)
        next(run)
        run.close()  # type: ignore[attr-defined]
        assert agent.committed == last
        assert "not captured" not in caplog.text


def test_close_is_over_where_the_agent_said_so_before_it_went(
    tmp_path: Path, begin: Begin, caplog: pytest.LogCaptureFixture
) -> None:
    with FakeAgent(tmp_path, 1, commit_target=0) as agent:
        session, step = begin(agent)
        step()
        session.boundary()
        agent.lines[0].write(proposed=FINISHED)
        agent.stop()
        session.close()
        assert "not committed within" not in caplog.text


def test_close_is_bounded(
    tmp_path: Path, begin: Begin, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("EVERSTEP_FINAL_ROUND_SECONDS", "0.2")
    with FakeAgent(tmp_path, 1, commit_target=0) as agent:
        agent.is_held = True
        session, step = begin(agent)
        step()
        session.boundary()
        session.close()
        assert "not committed within" in caplog.text


def test_what_cannot_be_resumed_reaches_the_agent_before_it_is_raised(tmp_path: Path, begin: Begin) -> None:
    with FakeAgent(tmp_path, 1) as agent:
        with pytest.raises(everstep.training.CannotResume, match=r"data: builtins\.generator can be walked once only"):
            begin(agent, data=(number for number in range(3)))
        agent.wait_for(lambda: bool(agent.faults()))
        assert agent.faults()[0].code == "cannot_resume"


def test_a_snapshot_of_another_layout_is_refused_by_what_differs(tmp_path: Path, begin: Begin) -> None:
    with FakeAgent(tmp_path, 1) as agent:
        session, step = begin(agent)
        train(session, step, agent.reached.is_set)
        base, slot = agent.committed, agent.sealed[0, agent.committed]
    with FakeAgent(tmp_path, 1, 2, base_step=base, base_slots={0: slot}) as agent:
        with pytest.raises(
            everstep.training.RestoreMismatch, match=r"tensor model/0.bias was float32\[5\], is float32\[6\]"
        ):
            begin(agent, width=6)
        agent.wait_for(lambda: bool(agent.faults()))
        assert agent.faults()[0].code == "restore_mismatch"


@pytest.mark.parametrize("where", ["magic", "index", "step"])
def test_a_damaged_slot_is_refused(tmp_path: Path, begin: Begin, where: str) -> None:
    with FakeAgent(tmp_path, 1) as agent:
        session, step = begin(agent)
        train(session, step, agent.reached.is_set)
        base, slot = agent.committed, agent.sealed[0, agent.committed]
    data = bytearray(slot.read_bytes())
    header = unpack_header(bytes(data[:HEADER_BYTES]))
    data[{"magic": 0, "index": HEADER_BYTES + header.index_offset, "step": 16}[where]] ^= 1
    slot.write_bytes(data)
    with (
        FakeAgent(tmp_path, 1, 2, base_step=base, base_slots={0: slot}) as agent,
        pytest.raises(everstep.training.RestoreMismatch),
    ):
        begin(agent)


def test_what_is_logged_arrives_with_its_step(tmp_path: Path, begin: Begin) -> None:
    with FakeAgent(tmp_path, 1, commit_target=0) as agent:
        session, step = begin(agent)
        for _ in range(3):
            step()
            session.log(loss=torch.tensor(2.5, requires_grad=True), rate=1)
            session.boundary()
        session.close()
        agent.wait_for(lambda: rank_half(agent).standing is RankStanding.CLOSED)
        records = [record for message in agent.logged() for record in message.records]
        assert [record.step for record in records] == [1, 2, 3]
        assert records[0].values == {"loss": 2.5, "rate": 1.0}


def test_phases_are_on_the_page(tmp_path: Path, begin: Begin) -> None:
    with FakeAgent(tmp_path, 1, commit_target=0) as agent:
        session, _ = begin(agent)
        assert rank_half(agent).phase is Phase.TRAIN
        with session.phase("eval"):
            assert rank_half(agent).phase is Phase.EVAL
        assert rank_half(agent).phase is Phase.TRAIN


def test_a_wait_tells_its_limit_until_it_is_over_and_a_limit_is_checked_before_anything_is_said(
    tmp_path: Path, begin: Begin
) -> None:
    with FakeAgent(tmp_path, 1, commit_target=0) as agent:
        session, _ = begin(agent)
        with session.phase("eval", limit_seconds=90):
            with session.phase("wait", limit_seconds=0.2):
                assert (rank_half(agent).phase, rank_half(agent).limit) == (Phase.WAIT, 1)
            assert (rank_half(agent).phase, rank_half(agent).limit) == (Phase.EVAL, 90)
            with session.phase("train"):
                assert (rank_half(agent).phase, rank_half(agent).limit) == (Phase.TRAIN, 0)
        assert (rank_half(agent).phase, rank_half(agent).limit) == (Phase.TRAIN, 0)
        for wrong in (0, -1, 86_401, float("nan"), float("inf")):
            with (
                pytest.raises(everstep.training.SessionMisuse, match="limit_seconds"),
                session.phase("wait", limit_seconds=wrong),
            ):
                pytest.fail("nobody comes here")
        assert rank_half(agent).phase is Phase.TRAIN


def test_an_agent_of_another_generation_is_refused(
    tmp_path: Path, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeAgent(tmp_path, 1) as agent:
        welcome = agent.send_welcome

        def later(line: Any, hello: RankHello) -> None:
            agent.generation += 1
            welcome(
                line, RankHello(job=hello.job, run=hello.run, generation=hello.generation + 1, rank=hello.rank, pid=1)
            )  # type: ignore[arg-type]

        monkeypatch.setattr(agent, "send_welcome", later)
        with pytest.raises(everstep.training.StaleGeneration):
            begin(agent)


def test_no_agent_at_the_socket_is_said(tmp_path: Path, begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERSTEP_WELCOME_SECONDS", "0.3")
    agent = FakeAgent(tmp_path, 1)
    with pytest.raises(everstep.training.AgentUnreachable, match="no agent listens at"):
        begin(agent)
    agent.lines[0].page.release()


def test_boundary_has_its_place(tmp_path: Path, begin: Begin) -> None:
    with FakeAgent(tmp_path, 1, commit_target=0) as agent:
        session, _ = begin(agent)
        session.close()
        with pytest.raises(everstep.training.SessionMisuse):
            session.boundary()


class LazyTicket(CopyTicket):
    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__()
        self._work = work

    def wait(self) -> None:
        self._work()
        self.finish()


class LazyCopier(CpuCopier):
    """A copier that copies only when the session waits for it, as the slowest possible copier does."""

    def start(self, copies: Copies, done: Done, progress: Progress | None = None) -> CopyTicket:
        def work() -> None:
            self.copy(copies)
            done(None)

        return LazyTicket(work)


@pytest.fixture
def slow_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everstep.training.registration.CpuCopier", LazyCopier)


def weights_of(slot: Path) -> torch.Tensor:
    data = slot.read_bytes()
    header = unpack_header(data[:HEADER_BYTES])
    payload = torch.frombuffer(bytearray(data[HEADER_BYTES:]), dtype=torch.uint8)
    index = unpack_index(data[HEADER_BYTES + header.index_offset :][: header.index_bytes], header.index_offset)
    (entry,) = [entry for entry in index.tensors if entry.name == "model/0.weight"]
    return view_of(payload, entry)


@pytest.mark.usefixtures("slow_copies")
def test_no_step_is_made_before_the_copy_is_done(tmp_path: Path, begin: Begin) -> None:
    with FakeAgent(tmp_path, 1, commit_target=6) as agent:
        session, step = begin(agent)
        seen: dict[int, torch.Tensor] = {}

        def note() -> bool:
            seen[session.step - 1] = session.state_tensors()["model/0.weight"].clone()
            return agent.reached.is_set()

        train(session, step, note)
        assert len(agent.commits) == 6, "of which the first three are audited"
        for commit in agent.commits[-2:]:
            assert torch.equal(weights_of(agent.sealed[0, commit]), seen[commit])


@pytest.mark.usefixtures("slow_copies")
@pytest.mark.parametrize("is_hidden", [True, False])
def test_a_change_before_the_copy_is_noticed(tmp_path: Path, begin: Begin, is_hidden: bool) -> None:
    """A tensor changes between a step and its copy, and the rank abandons the step.

    The rank audits the first three snapshots: it compares the copy with the live tensors, and so detects every change.
    In later snapshots, the rank detects only changes that torch's version counter counts.
    """
    with FakeAgent(tmp_path, 1, commit_target=5) as agent:
        session, step = begin(agent)
        if not is_hidden:
            # train until the three audited snapshots are over, so that only the version counter can detect the change
            train(session, step, lambda: len(agent.commits) >= 4)
        agent.messages.clear()
        weight = next(step.model.parameters())

        def meddle() -> None:
            with torch.no_grad():
                (weight.data if is_hidden else weight).add_(1)
            step()

        with pytest.warns(RuntimeWarning, match=r"model/0\.weight changed outside an optimizer step"):
            train(session, meddle, agent.reached.is_set)
        reasons = [message.reason for _, message in agent.of_kind(Abandoned)]  # type: ignore[attr-defined]
        assert "model/0.weight changed outside an optimizer step" in reasons


class LateEvent:
    """An event of a device stream. It completes when the test lets the device become idle."""

    def __init__(self, device: LateDevice) -> None:
        self._device = device

    def record(self, stream: Any) -> None: ...

    def query(self) -> bool:
        return self._device.is_idle.is_set()

    def synchronize(self) -> None:
        assert self._device.is_idle.wait(30)


class LateDevice:
    """A device that is late: it executes work long after the host has enqueued it.

    The copies complete in their order once the device has caught up.
    """

    def __init__(self) -> None:
        self.is_idle = threading.Event()
        self.is_idle.set()

    def holds(self, tensor: torch.Tensor) -> bool:
        return True

    def enter_thread(self, stream: Any) -> None: ...

    def new_stream(self) -> str:
        return "copier"

    def current_stream(self) -> str:
        return "training"

    def is_capturing(self) -> bool:
        return False

    def new_event(self) -> LateEvent:
        return LateEvent(self)

    def wait(self, stream: Any, event: Any) -> None: ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.no_grad():
            target.copy_(source)

    def gather(self, gathering: Gathering) -> None:
        gathering.run()

    def buffer(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8)

    def pinned(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8)

    def register(self, address: int, size: int) -> bool:
        return True

    def unregister(self, address: int) -> None: ...


@pytest.mark.parametrize("is_meddled", [False, True])
def test_a_device_ends_its_copy_when_the_next_step_was_asked_for_long_ago(
    tmp_path: Path, begin: Begin, monkeypatch: pytest.MonkeyPatch, is_meddled: bool
) -> None:
    """A late device executes the copy before all work that the host enqueues after the session's guard.

    Work that the host enqueued before the guard may run before the copy and change the tensor. The rank must then
    abandon the step.
    """
    device = LateDevice()
    tickets: list[CopyTicket] = []

    class NotingCopier(CudaCopier):
        def start(self, copies: Copies, done: Done, progress: Progress | None = None) -> CopyTicket:
            tickets.append(super().start(copies, done, progress))
            return tickets[-1]

    monkeypatch.setattr("everstep.training.registration.make_copier", lambda *_: NotingCopier(device))
    with FakeAgent(tmp_path, 1, commit_target=8) as agent:
        session, step = begin(agent)
        # Train until the three audited snapshots are over. In an audited snapshot, the training thread itself waits for
        # the device to copy the state, so the copy could not be late.
        train(session, step, lambda: len(agent.commits) >= 4)
        weight = next(step.model.parameters())
        session.fence()
        tickets[-1].join()
        agent.messages.clear()

        def step_of_late_device() -> None:
            if is_meddled:
                with torch.no_grad():
                    weight.add_(1)
            step()
            device.is_idle.set()
            tickets[-1].join()
            device.is_idle.clear()

        device.is_idle.clear()
        try:
            if is_meddled:
                with pytest.warns(RuntimeWarning, match=r"model/0\.weight changed outside an optimizer step"):
                    train(session, step_of_late_device, agent.reached.is_set)
            else:
                train(session, step_of_late_device, agent.reached.is_set)
        finally:
            device.is_idle.set()
        spoilt = [message for _, message in agent.of_kind(Abandoned) if "changed outside" in message.reason]  # type: ignore[attr-defined]
        assert len(spoilt) == is_meddled, "once, and from then on it is copied at the boundary"


def test_the_forward_guard_waits_before_the_next_forward(tmp_path: Path, begin: Begin, slow_copies: None) -> None:
    with FakeAgent(tmp_path, 1, commit_target=5) as agent:
        session, step = begin(agent, guard="forward")
        train(session, step, lambda: len(agent.commits) >= 4)
        train(session, step, lambda: rank_half(agent).copying != NONE)
        step.model(torch.zeros(1, 3))
        assert rank_half(agent).copying == NONE


@pytest.mark.usefixtures("slow_copies")
def test_the_page_says_whose_copier_runs(tmp_path: Path, begin: Begin) -> None:
    with FakeAgent(tmp_path, 1, commit_target=5) as agent:
        session, step = begin(agent)
        # Train until the three audited snapshots are over. The training thread copies them itself, so no copier runs.
        train(session, step, lambda: len(agent.commits) >= 4)
        train(session, step, lambda: rank_half(agent).copying != NONE)
        assert rank_half(agent).copying == rank_half(agent).boundary
        session.fence()
        assert rank_half(agent).copying == NONE


def test_a_captured_step_is_settled_until_another_is_proposed(tmp_path: Path, begin: Begin) -> None:
    with FakeAgent(tmp_path, 1) as agent:
        agent.commit = lambda: None  # type: ignore[method-assign]
        session, step = begin(agent)
        train(session, step, lambda: bool(agent.of_kind(Captured)))
        for _ in range(5):
            step()
            session.boundary()
        wait_told(agent, session.step - 1)
        assert len(agent.of_kind(Captured)) == 1
        assert not agent.of_kind(Abandoned)
        settled = agent.proposed
        for proposed in (NONE, settled):
            agent.lines[0].write(proposed=proposed)
            step()
            session.boundary()
        agent.wait_for(lambda: bool(agent.of_kind(Abandoned)))
        assert [message.step for _, message in agent.of_kind(Abandoned)] == [settled], "it is answered once more"  # type: ignore[attr-defined]


def test_a_parameter_that_is_given_other_memory_is_captured_from_there(tmp_path: Path, begin: Begin) -> None:
    """The script gives a parameter other memory of the same shape. The snapshot contains the bytes of the new memory.

    The rank need not request slots again.
    """
    with FakeAgent(tmp_path, 1, commit_target=6) as agent:
        session, step = begin(agent)
        weight = step.model.get_parameter("0.weight")
        seen: dict[int, torch.Tensor] = {}

        def step_elsewhere() -> None:
            step()
            weight.data = weight.data.clone()

        def note() -> bool:
            seen[session.step - 1] = weight.detach().clone()
            return agent.reached.is_set()

        train(session, step_elsewhere, note)
        session.fence()
        assert len(agent.of_kind(SlotsRequest)) == 1, "the plan is the same"
        assert all(torch.equal(weights_of(agent.sealed[0, commit]), seen[commit]) for commit in agent.commits[-2:])


class Profiler:
    """Stands in for the profiler of the network. The test reports its results."""

    def __init__(self, report: Callable[[float, tuple[IdleSpan, ...]], None], trace: object) -> None:
        self.report = report

    def boundary(self, *_: object) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def profilers(monkeypatch: pytest.MonkeyPatch) -> list[Profiler]:
    """Return the profilers of the sessions that the test will begin with several ranks."""
    found: list[Profiler] = []

    def make(*arguments: Any) -> Profiler:
        found.append(Profiler(*arguments))
        return found[-1]

    monkeypatch.setattr("everstep.training.session.NetworkProfiler", make)
    return found


def test_what_the_network_leaves_idle_is_told_with_the_words_of_boundaries(
    tmp_path: Path, begin: Begin, links: Links, profilers: list[Profiler]
) -> None:
    """The session sends measured idle times of the network together with the message about the next finished step.

    A separate message would wake the agent on a core that training needs.
    """
    with FakeAgent(tmp_path, 1, commit_target=5) as agent:
        session, step = begin(agent, world_size=2)
        # The thread that maps slots also sends the agent a message, which must not be among the counted ones.
        join_slot_mapper()
        before = len(links.sent)
        profilers[0].report(0.2, (IdleSpan(0.0, 0.1, 0.0),))
        assert len(links.sent) == before
        train(session, step, agent.reached.is_set)
        (spans,) = (found for _, found in links.messages() if any(isinstance(each, IdleSpans) for each in found))
        assert any(isinstance(each, Boundary) for each in spans)

        link, before = links.newest, len(links.sent)
        fault = RankFault(generation=link.generation, code="resume_failed", message="")
        links.is_full = True
        link.send(fault)
        profilers[0].report(0.2, ())
        link.hold(Boundary(generation=link.generation, boundary=Step(9), at_seconds=0.0, blocked_seconds=0.0))
        links.is_full = False
        link.let_go()
        kept = IdleSpans(generation=link.generation, iteration_seconds=0.2, spans=())
        assert [each for _, found in links.messages(before) for each in found] == [fault, kept]


def copy_in_pieces(monkeypatch: pytest.MonkeyPatch, piece_bytes: int) -> None:
    """Make new sessions copy the state in pieces of this size."""

    def make(_: set[int], environment: Environment) -> CpuCopier:
        return CpuCopier(is_crowded=environment.is_crowded, piece_bytes=piece_bytes)

    monkeypatch.setattr("everstep.training.registration.make_copier", make)


def have_cores(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Let new sessions find this number of processor cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(count)))


def slot_bytes(agent: FakeAgent, rank: int, number: int, size: int) -> memoryview:
    """Return the first bytes of a slot's payload."""
    with agent.lines[rank].slot_paths[number].open("rb") as file:
        return memoryview(file.read(HEADER_BYTES + size))[HEADER_BYTES:]


@pytest.fixture
def streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give new sessions enough cores to report the progress of copies, which they make in pieces of 4 MiB."""
    have_cores(monkeypatch, 2 * UNCROWDED_CORES)
    copy_in_pieces(monkeypatch, 4 << 20)


def test_without_cores_to_spare_nothing_is_said_ahead(
    tmp_path: Path, begin: Begin, streamed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    have_cores(monkeypatch, 1)
    with FakeAgent(tmp_path, 1, commit_target=5) as agent:
        session, step = begin(agent, width=100, frozen_bytes=STREAMED_BYTES)
        train(session, step, agent.reached.is_set)
        assert agent.of_kind(Captured)
        assert not agent.of_kind(Capturing)
        assert copier_policies() == [os.SCHED_BATCH], "its copier takes a core from nobody"


def copier_policies() -> list[int]:
    return [
        os.sched_getscheduler(thread.native_id or 0)
        for thread in threading.enumerate()
        if thread.name == "everstep-copier"
    ]


@pytest.mark.parametrize("is_large", [False, True])
def test_the_copier_digests_what_lies_in_the_slot_and_tells_of_its_boundary(
    tmp_path: Path, begin: Begin, links: Links, streamed: None, monkeypatch: pytest.MonkeyPatch, is_large: bool
) -> None:
    """The copier thread computes the digests of the snapshots that it copies.

    The training thread copies the first three snapshots of a launch, to audit them. The agent computes their digests.
    """
    have_cores(monkeypatch, 1)
    told: dict[int, tuple[bytes, bytes]] = {}

    def note(agent: FakeAgent, rank: int, message: object) -> None:
        if isinstance(message, Captured):
            data = slot_bytes(agent, rank, message.slot, message.payload_bytes)
            ends = [slot.chunk_range(index, len(data)) for index in range(slot.chunk_count(len(data)))]
            told[message.step] = message.chunk_digests, b"".join(slot.digest(data[start:stop]) for start, stop in ends)

    with FakeAgent(tmp_path, 1, commit_target=8, on_message=note) as agent:
        session, step = begin(agent, width=100, frozen_bytes=STREAMED_BYTES if is_large else 2 * slot.CHUNK_BYTES)
        train(session, step, agent.reached.is_set)
        passed = [message.boundary for _, message in agent.of_kind(Boundary) if message.at_seconds]  # type: ignore[attr-defined]
    assert [told[step][0] for step in agent.commits[:3]] == [b""] * 3
    assert all(given == found and len(found) > 16 for given, found in (told[step] for step in agent.commits[3:]))
    assert passed == list(range(1, len(passed) + 1)), "each boundary is told once"
    tellers = {thread for thread, found in links.messages() if {type(each) for each in found} == {Boundary}}
    assert ("everstep-copier" in tellers) is is_large, "else it goes with the word of the copy's end"


@pytest.mark.usefixtures("streamed")
def test_what_is_said_to_be_final_is_what_is_captured(tmp_path: Path, begin: Begin) -> None:
    """Bytes of a running capture that the session reports as final never change afterwards.

    This also holds for tensors that change in the forward pass, because the session copies them as soon as the step
    ends.
    """
    seen: dict[int, list[tuple[int, bytes]]] = {}

    def note(agent: FakeAgent, rank: int, message: object) -> None:
        if isinstance(message, Capturing):
            content = slot_bytes(agent, rank, message.slot, message.final_bytes)
            seen.setdefault(message.step, []).append((message.final_bytes, slot.digest(content)))
        elif isinstance(message, Captured):
            content = slot_bytes(agent, rank, message.slot, message.payload_bytes)
            for end, part in seen.get(message.step, []):
                assert part == slot.digest(content[:end])
                assert end <= message.payload_bytes

    with FakeAgent(tmp_path, 1, commit_target=8, on_message=note) as agent:
        session, step = begin(agent, width=100, frozen_bytes=STREAMED_BYTES)
        session._guard.unstable.add("model/0.bias")
        train(session, step, agent.reached.is_set)
        assert agent.committed in seen
        assert copier_policies() == [os.sched_getscheduler(0)]
        told = [message for _, message in agent.of_kind(Capturing)]
    ends = {number: [end for end, _ in said] for number, said in seen.items()}
    assert all(each == sorted(each) for each in ends.values())
    whole = {message.step: message.payload_bytes for message in told}  # type: ignore[attr-defined]
    assert [ends[number] for number in agent.commits[:3]] == [[whole[number]] for number in agent.commits[:3]], (
        "audited: all is there at once"
    )
    assert all(len(ends[number]) > 4 and ends[number][-1] < whole[number] for number in agent.commits[4:])


@pytest.mark.usefixtures("streamed")
def test_what_an_audit_refuses_was_said_to_be_written_and_is_given_up(tmp_path: Path, begin: Begin) -> None:
    with FakeAgent(tmp_path, 1, commit_target=5) as agent:
        session, step = begin(agent, width=100, frozen_bytes=STREAMED_BYTES)
        weight = step.model.get_parameter("0.weight")

        def meddle() -> None:
            with torch.no_grad():
                weight.data.add_(1)
            step()

        with pytest.warns(RuntimeWarning, match=r"model/0\.weight changed outside an optimizer step"):
            train(session, meddle, agent.reached.is_set)
        spoilt = next(message for _, message in agent.of_kind(Abandoned) if "changed outside" in message.reason)  # type: ignore[attr-defined]
        about = [type(message) for _, message in agent.messages if getattr(message, "step", None) == spoilt.step]  # type: ignore[attr-defined]
        assert about == [Capturing, Abandoned]


def test_of_a_small_state_nothing_is_said_until_it_is_captured(
    tmp_path: Path, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_in_pieces(monkeypatch, 16)
    with FakeAgent(tmp_path, 1, commit_target=5) as agent:
        session, step = begin(agent)
        train(session, step, agent.reached.is_set)
        assert agent.of_kind(Capturing) == []
