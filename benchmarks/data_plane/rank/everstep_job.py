"""Training script of Everstep's job: the training loop of `loop.py`, with an Everstep session as in a user's script.

    first launch    first snapshots ─▶ steps with long spans ─▶ with short spans ─▶ bytes compared on the holder ─▶ wait
    later launches  restore, timed from the call ─▶ bytes compared with the first launch's dump ─▶ wait

A thread detects commits on the rank's page. At the end of a launch, the script waits until the benchmark kills a rank
or creates the file `finish`.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

import everstep.training
from benchmarks.data_plane.rank.memory import own_tree, private_bytes
from benchmarks.data_plane.rank.state import State, least, leave, pause
from everstep.protocol.rank_messages import RANK_WORD_BYTES, read_agent_half
from everstep.protocol.slot import HEADER_BYTES, SlotHeader, SlotState, unpack_header, unpack_index
from everstep.training.session import TrainingSession
from infra.local_cloud.processes import memory_files, memory_of

LOOK_SECONDS = 0.002
QUIET_RATIO = 0.9
"""Pause from a boundary to the first check of its commit, relative to the shortest time to a commit. A check takes 0.1
ms of CPU time from the measured work.
"""
FIRST_SNAPSHOTS = 4
"""Snapshots that are reported separately: three audited ones, and the first without an audit."""
FIRST_STEPS = 60
SETTLE_STEPS = 100
COMMIT_PATIENCE_SECONDS = 60.0


@dataclass
class Steps:
    """One rank's measurements of consecutive steps with equal spans."""

    numbers: list[int] = field(default_factory=list)
    blocked: list[float] = field(default_factory=list)
    """Blocked seconds per step: the boundary call, and the wait before the optimizer's next change."""
    has_snapshot: list[bool] = field(default_factory=list)
    began_at: list[float] = field(default_factory=list)
    """Monotonic time of each call of `boundary`."""
    committed_at: list[float | None] = field(default_factory=list)
    """Time at which the page showed each step as committed, or None."""


class CommitWatch:
    """Detects commits of a generation in a thread, which reads the rank's page every `look_seconds`."""

    def __init__(self, page: str, generation: int, look_seconds: float = LOOK_SECONDS) -> None:
        self._page = page
        self._look_seconds = look_seconds
        self._generation = generation
        self.at: dict[int, float] = {}
        self.committed = -1
        self._expected = -1
        self._begun = 0.0
        self._look_at = 0.0
        self._quickest: float | None = None
        self._changed = threading.Condition()
        threading.Thread(target=self._look, daemon=True).start()

    def expect(self, step: int) -> None:
        """Begin to poll for a step whose boundary has just passed, after a pause unless an earlier one is missing."""
        with self._changed:
            self._begun = time.perf_counter()
            is_quiet = self._quickest is not None and self.committed >= self._expected
            self._look_at = self._begun + QUIET_RATIO * (self._quickest or 0.0) if is_quiet else self._begun
            self._expected = step
            self._changed.notify_all()

    def _look(self) -> None:
        idle = threading.Event()
        while (path := memory_files(os.getpid()).get(self._page)) is None:
            idle.wait(self._look_seconds)
        with path.open("rb") as file:
            page = memoryview(mmap.mmap(file.fileno(), RANK_WORD_BYTES, prot=mmap.PROT_READ))
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._expected > self.committed)
                quiet_seconds = self._look_at - time.perf_counter()
            idle.wait(max(self._look_seconds, quiet_seconds))
            half = read_agent_half(page)
            if half is not None and half.generation == self._generation and half.committed > self.committed:
                self._saw(half.committed)

    def _saw(self, committed: int) -> None:
        with self._changed:
            now = time.perf_counter()
            if committed == self._expected:
                self._quickest = min(now - self._begun, self._quickest or now - self._begun)
            self.at[committed] = now
            self.committed = committed
            self._changed.notify_all()

    def wait(self, step: int, seconds: float) -> bool:
        """Wait for at most `seconds`, and return whether `step` is committed."""
        with self._changed:
            return self._changed.wait_for(lambda: self.committed >= step, seconds)


class Rank:
    """The training loop of one rank of the job."""

    def __init__(self, session: TrainingSession, state: State, watch: CommitWatch) -> None:
        self._session = session
        self._state = state
        self._watch = watch

    def steps(self, count: int, span_seconds: float, *, snapshots: int | None = None) -> Steps:
        """Train `count` steps, as `loop._steps` does, or until every rank has taken `snapshots` snapshots."""
        found = Steps()
        at_boundary = 0.0
        for number in range(count + 1):
            pause(span_seconds)
            dist.barrier()
            before = len(self._session.blocked_seconds)
            begun = time.perf_counter()
            # Wait here until the snapshot is copied, and not in the optimizer's step, to time the wait.
            self._session.fence()
            fenced = time.perf_counter() - begun
            if number:
                found.blocked.append(at_boundary + fenced)
                found.has_snapshot.append(len(self._session.blocked_seconds) > before)
            if number == count or (snapshots is not None and least(sum(found.has_snapshot)) >= snapshots):
                break
            self._state.advance()
            dist.barrier()
            begun = time.perf_counter()
            control = self._session.boundary()
            at_boundary = time.perf_counter() - begun
            self._watch.expect(control.step)
            found.numbers.append(control.step)
            found.began_at.append(begun)
        self._watch.wait(found.numbers[-1], span_seconds)
        found.committed_at = [self._watch.at.get(step) for step in found.numbers]
        return found

    def settle(self, span_seconds: float) -> int:
        """Train steps with a pause before each until one is committed, and return it."""
        for _ in range(SETTLE_STEPS):
            found = self.steps(1, span_seconds)
            # Wait for the commit only if every rank took a snapshot: a step without a snapshot is never committed.
            if least(sum(found.has_snapshot)):
                # Allow much time for the commit. These steps are longer or shorter than the steps before. Until
                # Everstep has profiled the new duration, it sends snapshots at unsuitable times.
                self._watch.wait(found.numbers[-1], COMMIT_PATIENCE_SECONDS)
            if least(self._watch.committed) >= found.numbers[-1]:
                return found.numbers[-1]
        raise RuntimeError(f"no step was committed where it was waited for, the last is {self._watch.committed}")


def holder_has(session: TrainingSession, memory: Path, run: str, step: int, rank: int) -> bool:
    """Return whether another node's slot has all bytes of the live state at `step`; False without tensors.

    `memory` is this node's folder. The other nodes' folders have the same parent.
    """
    found = held(memory, run, step, rank)
    if found is None:
        return False
    path, header = found
    file = torch.from_file(str(path), shared=True, size=HEADER_BYTES + header.payload_bytes, dtype=torch.uint8)
    return equals(file[HEADER_BYTES:], header, session.state_tensors())


def held(memory: Path, run: str, step: int, rank: int) -> tuple[Path, SlotHeader] | None:
    """Return the sealed slot of a rank's shard of a step on another node, or None."""
    for folder in sorted(memory.parent.glob("everstep-*")):
        files = {} if folder == memory else memory_of(folder)
        for name, path in files.items():
            if name.startswith(f"{run}/rank-{rank}.slot-"):
                header = header_of(path)
                if header.state is SlotState.SEALED and header.step == step:
                    return path, header
    return None


def header_of(path: Path) -> SlotHeader:
    with path.open("rb") as file:
        return unpack_header(file.read(HEADER_BYTES))


def equals(payload: torch.Tensor, header: SlotHeader, live: Mapping[str, torch.Tensor]) -> bool:
    """Return whether a slot's payload, uint8[payload_bytes], has the bytes of all `live` tensors; False without any."""
    index = unpack_index(
        bytes(payload[header.index_offset : header.index_offset + header.index_bytes].numpy()), header.index_offset
    )
    places = {entry.name: (entry.offset, entry.offset + entry.bytes) for entry in index.tensors}
    return bool(live) and all(
        name in places
        and torch.equal(payload[slice(*places[name])], tensor.contiguous().reshape(-1).view(torch.uint8).cpu())
        for name, tensor in live.items()
    )


def main() -> None:
    """Run one rank in one launch: train in the first, restore in later ones."""
    settings = everstep.training.hyperparameters(
        state_mib=256, spaced_steps=20, tight_steps=20, span_seconds=0.5, tight_span_seconds=0.1
    )
    directory = Path(os.environ["BENCH_DIRECTORY"])
    rank, generation = int(os.environ["RANK"]), int(os.environ["EVERSTEP_GENERATION"])
    memory = Path(os.environ["EVERSTEP_AGENT_SOCKET"]).parent
    run = os.environ["EVERSTEP_RUN_ID"]
    dist.init_process_group("gloo")
    state = State(settings.state_mib, rank)
    private_before = private_bytes(*own_tree())
    session = everstep.training.init(model=state.module, optimizer=state.optimizer)
    watch = CommitWatch(f"{run}/rank-{rank}.word", generation)
    dump = Path(os.environ["BENCH_DUMPS"]) / f"dump{rank}"
    result: dict[str, object] = {
        "generation": generation,
        "state_bytes": state.nbytes,
        "private_before_bytes": private_before,
    }
    if generation > 1:
        state.spoil()
    dist.barrier()
    begun = time.perf_counter()
    base = session.restore()
    result["restore_seconds"] = time.perf_counter() - begun
    if base:
        result["verified"] = state.equals_dump(dump)
        watch.expect(base)
        watch.wait(base, COMMIT_PATIENCE_SECONDS)
    else:
        me = Rank(session, state, watch)
        result["first"] = asdict(me.steps(FIRST_STEPS, settings.span_seconds, snapshots=FIRST_SNAPSHOTS))
        result["spaced"] = asdict(me.steps(settings.spaced_steps, settings.span_seconds))
        result["tight"] = asdict(me.steps(settings.tight_steps, settings.tight_span_seconds))
        step = me.settle(settings.span_seconds)
        result["holder_verified"] = holder_has(session, memory, run, step, rank)
        result["private_after_bytes"] = private_bytes(*own_tree())
        state.dump(dump)
        result["step"] = step
    leave(directory / f"rank{rank}.gen{generation}.json", result)
    while not (directory / "finish").exists():
        pause(0.02)
    session.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
