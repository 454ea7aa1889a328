"""Tests of the data-plane benchmark: its measured loop, its comparisons of bytes, and its real processes.

These processes run another checkpoint system (`PEERS`), or measure floors. A floor is the time of a plain memcpy,
digest or network transfer, which no checkpoint system can beat.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import everstep.training
from benchmarks.data_plane import launches
from benchmarks.data_plane.arrivals import run_arrivals
from benchmarks.data_plane.everstep import RESTORED, _spoil
from benchmarks.data_plane.rank import everstep_job
from benchmarks.data_plane.rank.loop import Samples, measure
from benchmarks.data_plane.rank.repeats import Repeats
from benchmarks.data_plane.rank.state import State, equal_to_dump
from benchmarks.data_plane.systems import PEERS
from everstep.protocol.ids import Generation, JobName, Rank, RunId, Step
from everstep.protocol.rank_messages import RANK_WORD_BYTES, AgentHalf, write_agent_half
from everstep.protocol.slot import HEADER_BYTES, SlotHeader, SlotIndex, SlotState, TensorEntry, pack_header, pack_index
from worker.shm.held_files import HeldFiles
from worker.shm.rank_page import RankPage

pytestmark = pytest.mark.integration
REPEATS = Repeats(
    spaced_steps=3,
    tight_steps=2,
    protects=2,
    local_restores=2,
    peer_restores=2,
    span_seconds=0.0,
    tight_span_seconds=0.0,
)
OFFERS = ("blocked", "protect", "restore_local", "restore_peer", "memory")
RUN = "0" * 31 + "1"


class Alone:
    """Lets a single rank run the measured loop: a wait for the other ranks returns at once."""

    rank = 1

    def wait(self) -> None: ...

    def largest(self, value: float) -> float:
        return value


class Memory:
    """A checkpoint system that keeps clones of the state in this process.

    Tests replace methods to make it lose state.
    """

    gives_back_own_state = True

    def __init__(self, state: State) -> None:
        self.state = state
        self.kept: list[torch.Tensor] = []
        self.calls: list[str] = []

    def snapshot(self, step: int) -> None:
        self.calls.append(f"snapshot {step}")
        self.kept = [tensor.clone() for _, tensor in self.state.tensors()]

    def fence(self) -> None:
        self.calls.append("fence")

    def protect(self) -> None:
        self.calls.append("protect")

    def replica(self) -> list[torch.Tensor]:
        return self.kept

    def restore_local(self) -> None:
        self.calls.append("restore")
        for (_, live), saved in zip(self.state.tensors(), self.kept, strict=True):
            live.copy_(saved)

    restore_peer = restore_local

    def close(self) -> None:
        self.calls.append("close")


@pytest.fixture
def state() -> Iterator[State]:
    threads = torch.get_num_threads()
    yield State(1, 0)
    torch.set_num_threads(threads)


def run(adapter: Memory, dumps: Path) -> Samples:
    # Both ranks have the same state, so the comparison with the other rank's dump must pass.
    (dumps / "dump0").symlink_to(dumps / "dump1")
    return measure(lambda *_: adapter, OFFERS, adapter.state, Alone(), REPEATS, dumps)  # type: ignore[arg-type, return-value]


def test_the_loop_takes_what_it_says_and_compares_bytes(state: State, tmp_path: Path) -> None:
    adapter = Memory(state)
    samples = run(adapter, tmp_path)
    assert [len(values) for values in (samples.blocked, samples.tight_blocked, samples.protect)] == [3, 2, 2]
    assert [len(values) for values in (samples.restore_local, samples.restore_peer)] == [2, 2]
    assert samples.verified == {"protect": True, "restore_local": True, "restore_peer": True}
    steps = [int(call.split()[1]) for call in adapter.calls if call.startswith("snapshot")]
    assert steps == sorted(set(steps))  # every snapshot is of a newer step
    assert adapter.calls[-1] == "close"


@pytest.mark.parametrize("broken", ["restore_local", "restore_peer"])
def test_a_restore_that_does_nothing_is_noticed(state: State, tmp_path: Path, broken: str) -> None:
    adapter = Memory(state)
    setattr(adapter, broken, lambda: None)
    assert run(adapter, tmp_path).verified[broken] is False


def test_a_stale_replica_is_noticed(state: State, tmp_path: Path) -> None:
    adapter = Memory(state)
    first = [tensor.clone() for _, tensor in state.tensors()]
    adapter.replica = lambda: first  # type: ignore[method-assign]
    assert run(adapter, tmp_path).verified["protect"] is False


def test_a_dump_tells_one_bit(state: State, tmp_path: Path) -> None:
    state.dump(tmp_path / "dump")
    assert state.equals_dump(tmp_path / "dump")
    tensors = [tensor.clone() for _, tensor in state.tensors()]
    tensors[-1].view(torch.uint8)[-1] ^= 1
    assert not equal_to_dump(tensors, tmp_path / "dump")
    assert not equal_to_dump(tensors[:-1], tmp_path / "dump")


def test_every_step_changes_every_tensor_throughout() -> None:
    state = State(1, 0)
    for _ in range(200):
        state.advance()
    before = [tensor.clone() for _, tensor in state.tensors()]
    state.advance()
    assert all((tensor != old).float().mean() > 0.99 for old, (_, tensor) in zip(before, state.tensors(), strict=True))


class Session:
    """A stand-in for a training session. It has only the live tensors, as the benchmark uses nothing else."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def state_tensors(self) -> dict[str, torch.Tensor]:
        return self._tensors


def write_slot(path: Path, tensor: torch.Tensor, step: int, state: SlotState = SlotState.SEALED) -> None:
    index = pack_index(SlotIndex((TensorEntry("w", "float32", tuple(tensor.shape), 0, tensor.nbytes),), b""))
    header = SlotHeader(
        job=JobName("job"),
        run=RunId(RUN),
        owner_rank=Rank(0),
        origin_generation=Generation(1),
        step=Step(step),
        state=state,
        capacity_bytes=tensor.nbytes + len(index),
        payload_bytes=tensor.nbytes + len(index),
        index_offset=tensor.nbytes,
        index_bytes=len(index),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pack_header(header) + tensor.numpy().tobytes() + index)


def test_the_holder_is_asked_for_its_bytes_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def memory_of(folder: Path) -> dict[str, Path]:
        return {str(path.relative_to(folder)): path for path in folder.glob("*/*")}

    monkeypatch.setattr(everstep_job, "memory_of", memory_of)
    live = torch.arange(64, dtype=torch.float32)
    own, other = tmp_path / "everstep-0-own", tmp_path / "everstep-0-other"
    session = Session({"w": live})

    def held() -> bool:
        return everstep_job.holder_has(session, own, RUN, 5, 0)  # type: ignore[arg-type]

    write_slot(own / RUN / "rank-0.slot-0", live, 5)
    assert not held()  # the copy on the owner's node does not count as a copy at a holder
    write_slot(other / RUN / "rank-0.slot-0", live, 4)
    assert not held()  # the holder has only an older step
    write_slot(other / RUN / "rank-0.slot-1", live, 5, SlotState.WRITING)
    assert not held()
    write_slot(other / RUN / "rank-0.slot-1", live, 5)
    assert held()
    assert not everstep_job.holder_has(Session({}), own, RUN, 5, 0)  # type: ignore[arg-type]
    wrong = live.clone()
    wrong[63] += 1
    write_slot(other / RUN / "rank-0.slot-1", wrong, 5)
    assert not held()


def test_a_spoiled_slot_keeps_its_header_and_nothing_else(tmp_path: Path) -> None:
    slot = tmp_path / "slot"
    slot.write_bytes(b"h" * HEADER_BYTES + b"p" * (3 * 1024**2 + 5))
    _spoil(slot)
    assert slot.read_bytes() == b"h" * HEADER_BYTES + bytes(3 * 1024**2 + 5)


def test_the_agents_word_on_a_restore_is_understood() -> None:
    line = "2026-01-01 00:00:00,000 I worker.member.base_loading: rank 1: step 12 restored from peer in 0.250 s\n"
    (match,) = RESTORED.finditer(line)
    assert match.groups() == ("1", "peer", "0.250")
    text = (Path(everstep.training.__file__).parents[2] / "worker" / "member" / "base_loading.py").read_text()
    assert '"rank %d: step %d restored from %s in %.3f s"' in text


@pytest.mark.timeout(180)  # two processes import torch, which is slow on a busy machine
def test_floors_are_measured_by_two_processes_at_once(tmp_path: Path) -> None:
    with launches.FloorPair(tmp_path / "floors", 8) as pair:
        found = pair.measure(rounds=2)
    assert {name: len(values) for name, values in found.items()} == dict.fromkeys(
        ("memcpy", "digest", "one_way", "both_ways"), 4
    )
    assert all(value > 0 for values in found.values() for value in values)


@pytest.mark.timeout(180)  # a process imports torch, which is slow on a busy machine
def test_a_rank_that_waits_gets_its_state_from_the_other_node_behind_the_fetch(tmp_path: Path) -> None:
    found = run_arrivals(tmp_path / "home", state_mib=1, count=2)
    assert [each.verified for each in found] == [True, True]
    assert all(0 < each.fetch_seconds < each.model_seconds for each in found)
    log = (tmp_path / "home" / "rank0.log").read_text()
    assert [match[2] for match in RESTORED.finditer(log)] == ["peer", "peer"]
    assert not (launches.MEMORY / f"everstep-bench-{os.getpid()}").exists()


def test_a_commit_is_seen_when_it_is_looked_for() -> None:
    held = HeldFiles()
    RankPage(f"{RUN}/rank-0.word", held, generation=1).close()
    page = memoryview(mmap.mmap(held.descriptor(f"{RUN}/rank-0.word"), RANK_WORD_BYTES))
    watch = everstep_job.CommitWatch(f"{RUN}/rank-0.word", 2)
    for generation, step in ((1, 9), (2, 4), (2, 5)):
        write_agent_half(page, AgentHalf(generation, committed=step))
        watch.expect(step)
        # The watch ignores the page of generation 1, because it watches generation 2.
        assert watch.wait(step, 30.0 if generation == 2 else 0.05) is (generation == 2)
    assert sorted(watch.at) == [4, 5]
    held.close()


@pytest.mark.timeout(180)  # two processes import torch, which is slow on a busy machine
def test_a_peer_is_launched_measured_and_leaves_nothing(tmp_path: Path) -> None:
    (system,) = (peer for peer in PEERS if peer.name == "torch.save")
    ranks = launches.run_peer(
        system, tmp_path, tmp_path / "home", state_mib=1, repeats=replace(REPEATS, spaced_steps=1), timeout_seconds=150
    )
    assert [rank["verified"] for rank in ranks] == [{"restore_local": True}] * 2
    assert all(len(rank["blocked"]) == 1 and len(rank["restore_local"]) == 2 for rank in ranks)
    assert not (launches.MEMORY / f"everstep-bench-{os.getpid()}").exists()
