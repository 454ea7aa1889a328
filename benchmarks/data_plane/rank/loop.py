"""The measured training loop, in which an adapter calls a compared system (for Everstep: `everstep_job.py`).

    first snapshot ─▶ steps with long spans ─▶ steps with short spans ─▶ snapshots, each with `Adapter.protect`
    ─▶ byte comparison on the holder ─▶ restores from the own node ─▶ restores from the peer

The two ranks synchronize before and after every timing, so that they run the same operation at the same time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.data_plane.rank.adapter import Adapter
from benchmarks.data_plane.rank.memory import own_tree, private_bytes, tmpfs_bytes
from benchmarks.data_plane.rank.repeats import Repeats
from benchmarks.data_plane.rank.state import Meeting, State, equal_to_dump, pause

SLOW_SECONDS = 5.0
SLOW_REPEATS = 3
"""Repetitions of an operation that takes longer than `SLOW_SECONDS`."""


@dataclass
class Samples:
    """One rank's measured seconds of one launch."""

    state_bytes: int = 0
    first_blocked: float = 0.0
    blocked: list[float] = field(default_factory=list)
    """Blocked seconds per step with a snapshot, with the wait before the optimizer's next change."""
    tight_blocked: list[float] = field(default_factory=list)
    first_protect: float = 0.0
    protect: list[float] = field(default_factory=list)
    restore_local: list[float] = field(default_factory=list)
    restore_peer: list[float] = field(default_factory=list)
    verified: dict[str, bool] = field(default_factory=dict)
    """Whether all byte comparisons on this rank found equal bytes, by metric."""
    private_before_bytes: int = 0
    private_after_bytes: int = 0
    tmpfs_before_bytes: int = 0
    tmpfs_after_bytes: int = 0

    def as_dict(self) -> dict[str, object]:
        """Return the samples for JSON."""
        return asdict(self)


def measure(
    make: Callable[[State, Meeting], Adapter],
    offers: Collection[str],
    state: State,
    meeting: Meeting,
    repeats: Repeats,
    dumps: Path,
) -> Samples:
    """Train with a compared system, take and restore snapshots, and measure each operation in `offers`.

    Both ranks can read `dumps`, with which restored states are compared.
    """
    # Create the adapter before memory is measured, so that the system's imports and helper processes do not count.
    adapter = make(state, meeting)
    samples = Samples(
        state_bytes=state.nbytes, private_before_bytes=private_bytes(*own_tree()), tmpfs_before_bytes=tmpfs_bytes()
    )
    try:
        if "blocked" in offers:
            _snapshots(adapter, offers, state, meeting, repeats, samples)
        meeting.wait()
        samples.private_after_bytes, samples.tmpfs_after_bytes = private_bytes(*own_tree()), tmpfs_bytes()
        own, other = (dumps / f"dump{rank}" for rank in (meeting.rank, 1 - meeting.rank))
        state.dump(own)
        meeting.wait()
        if "protect" in offers:
            samples.verified["protect"] = equal_to_dump(adapter.replica(), other)
        if "restore_local" in offers:
            samples.restore_local = _repeat(repeats.local_restores, meeting, adapter.restore_local, before=state.spoil)
            samples.verified["restore_local"] = state.equals_dump(own)
        if "restore_peer" in offers:
            found = _repeat(
                repeats.peer_restores,
                meeting,
                adapter.restore_peer,
                before=state.spoil if meeting.rank == 1 else do_nothing,
            )
            if meeting.rank == 1:
                samples.restore_peer = found
                samples.verified["restore_peer"] = state.equals_dump(own if adapter.gives_back_own_state else other)
        meeting.wait()
    finally:
        adapter.close()
    return samples


def _snapshots(
    adapter: Adapter, offers: Collection[str], state: State, meeting: Meeting, repeats: Repeats, samples: Samples
) -> None:
    meeting.wait()
    begun = time.perf_counter()
    adapter.snapshot(state.steps)
    samples.first_blocked = time.perf_counter() - begun
    adapter.protect()
    samples.first_protect = time.perf_counter() - begun
    samples.blocked = _steps(adapter, state, meeting, repeats.spaced_steps, repeats.span_seconds)
    adapter.protect()
    samples.tight_blocked = _steps(adapter, state, meeting, repeats.tight_steps, repeats.tight_span_seconds)
    adapter.protect()
    if "protect" in offers:

        def protect() -> None:
            adapter.snapshot(state.steps)
            adapter.protect()

        def change() -> None:
            adapter.fence()
            state.advance()

        samples.protect = _repeat(repeats.protects, meeting, protect, before=change)


def do_nothing() -> None:
    """Prepare nothing for a restore."""


def _steps(adapter: Adapter, state: State, meeting: Meeting, count: int, span_seconds: float) -> list[float]:
    """Train with a snapshot at every step. Return the blocked seconds of each."""
    taken: list[float] = []
    at_boundary = 0.0
    for number in range(count + 1):
        pause(span_seconds)
        meeting.wait()
        begun = time.perf_counter()
        adapter.fence()
        fenced = time.perf_counter() - begun
        if number:
            taken.append(at_boundary + fenced)
        if number == count:
            break
        state.advance()
        begun = time.perf_counter()
        adapter.snapshot(state.steps)
        at_boundary = time.perf_counter() - begun
    return taken


def _repeat(count: int, meeting: Meeting, work: Callable[[], None], *, before: Callable[[], None]) -> list[float]:
    taken: list[float] = []
    while len(taken) < count:
        before()
        meeting.wait()
        begun = time.perf_counter()
        work()
        taken.append(time.perf_counter() - begun)
        if meeting.largest(taken[-1]) > SLOW_SECONDS:
            count = min(count, SLOW_REPEATS)
    return taken
