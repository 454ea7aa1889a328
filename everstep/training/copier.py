"""Copiers: they bring live tensors into slots while the script trains on.

Invariant: a copy has stopped for good when its ticket is joined, whether it went well or not; until `wait` has returned
its sources must not change.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from everstep.training.capture import SlotMemory

log = logging.getLogger(__name__)
TENSORS_AT_ONCE = 256
"""Reading the arguments of a call takes a microsecond a tensor, with the lock held."""
_this_core = ctypes.CDLL(None).sched_getcpu
PIECE_BYTES = 4 * 1024 * 1024
"""Of one call, where somebody follows the copy: as much as a chunk, which is still in the processor's cache when it is digested. With twice as much
two ranks at once took 121 ms a GiB for both instead of 108 (AMD EPYC)."""


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies to make: each source into the target at its place."""

    sources: Sequence[torch.Tensor]
    targets: Sequence[torch.Tensor]


Done = Callable[[BaseException | None], None]
Progress = Callable[[int, int], None]
"""Told how many targets are complete, from the first on, and how many bytes of the one behind them."""


class CopyTicket:
    """A copy that was begun."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self.error: BaseException | None = None

    def finish(self, error: BaseException | None = None) -> None:
        """Say that the copy has stopped. Called once, by the copier."""
        self.error = error
        self._done.set()

    def wait(self) -> None:
        """Return when the calling thread may change the sources: on a device, when its stream will do so behind the copy."""
        self._done.wait()

    def join(self) -> None:
        """Return when the copy has stopped and all bytes are in the slot."""
        self._done.wait()

    @property
    def hides_sources(self) -> bool:
        """The calling thread cannot read the sources now: it captures a graph, which would contain that."""
        return False


class Copier(Protocol):
    """Brings tensors into slots. The CPU's form is `CpuCopier`; `CudaCopier` copies on a stream of its own."""

    is_prompt: bool
    """A copy begins when it is asked for; else when a device has done what it was asked for before."""

    def copy(self, copies: Copies) -> None:
        """Copy now; returns when the calling thread may change the sources.

        The bytes are there when the next ticket is joined.
        """

    def start(self, copies: Copies, done: Done, progress: Progress | None = None) -> CopyTicket:
        """Begin to copy, in order; the sources must not change until the ticket's `wait` has returned.

        Args:
            copies: to make.
            done: called once, from any thread.
            progress: called from any thread as the copy goes on, as often as the copier sees fit; every call comes
                before that of `done`.

        Returns:
            The ticket.
        """

    def do_later(self, work: Callable[[], object]) -> None:
        """Do some work in the copier's thread, behind the copies that were begun. Any thread; never blocks."""

    def prepare(self, memory: SlotMemory) -> None:
        """Get a slot ready in the background: the copies after it will be faster."""

    def release(self, memory: SlotMemory) -> None:
        """The slot is not written any more."""

    def drain(self, limit_seconds: float) -> bool:
        """Let what was begun come to its end, for so long at most, and say whether it has; nothing can be begun after it. For a process that ends
        without `close`.
        """

    def close(self) -> None:
        """End what was begun."""


class CopierThread:
    """The thread that a copier does its work in, in order.

    It outlives a fault of any of it: training waits for what it does next.

    Args:
        is_crowded: there are few cores for each rank. Then the thread wakes up behind whoever gave it work, on the same
            core, and is free to leave it once it runs. The kernel would wake it on the core of a rank that is still at
            its boundary, in front of it, and leave it there until the next tick, 4 ms: of two ranks on two cores, a
            boundary in twenty to thirty lasted that much longer.
    """

    def __init__(self, *, is_crowded: bool = False) -> None:
        self._is_crowded = is_crowded
        self._waiting: int | None = None
        """The thread's id for the kernel, while it waits for work."""
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="everstep-copier", daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], object]) -> None:
        """Let it be done behind what was put before."""
        if self._is_crowded and (waiting := self._waiting) is not None:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(waiting, {_this_core()})
        self._work.put(work)

    def close(self, limit_seconds: float | None = None) -> bool:
        """End the thread once all that was put is done; with a limit, wait no longer than that for it.

        Say whether it has ended. Idempotent.
        """
        self._work.put(None)
        self._thread.join(limit_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        cores = os.sched_getaffinity(0)  # 0: of this thread
        if self._is_crowded and os.sched_getscheduler(0) == os.SCHED_OTHER:
            with contextlib.suppress(OSError):
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # who wakes up takes a core from nobody
        while (work := self._next()) is not None:
            if self._is_crowded:
                with contextlib.suppress(OSError):
                    os.sched_setaffinity(0, cores)
            try:
                work()
            except Exception:
                log.exception("a part of the copier's work failed")

    def _next(self) -> Callable[[], object] | None:
        self._waiting = threading.get_native_id()
        try:
            return self._work.get()
        finally:
            self._waiting = None


class CpuCopier:
    """Copies host memory in one background thread; torch copies without the interpreter's lock, so that training goes on meanwhile.

    One thread, not two: a second gained a tenth where it was measured, and took a core from training.

    Args:
        is_crowded: there are few cores for each rank (see `CopierThread`).
    """

    is_prompt = True

    def __init__(self, *, is_crowded: bool = False) -> None:
        self._thread = CopierThread(is_crowded=is_crowded)

    def copy(self, copies: Copies) -> None:
        copy_now(copies)

    def start(self, copies: Copies, done: Done, progress: Progress | None = None) -> CopyTicket:
        ticket = CopyTicket()
        self._thread.put(lambda: self._copy(copies, done, progress, ticket))
        return ticket

    def do_later(self, work: Callable[[], object]) -> None:
        self._thread.put(work)

    def prepare(self, memory: SlotMemory) -> None:
        self._thread.put(memory.prefault)

    def release(self, memory: SlotMemory) -> None:
        """Nothing was taken."""

    def drain(self, limit_seconds: float) -> bool:
        return self._thread.close(limit_seconds)

    def close(self) -> None:
        self._thread.close()

    def _copy(self, copies: Copies, done: Done, progress: Progress | None, ticket: CopyTicket) -> None:
        error: BaseException | None = None
        try:
            if progress is None:
                self.copy(copies)
            else:
                for part, complete_count, piece_bytes in parts(copies):
                    self.copy(part)
                    progress(complete_count, piece_bytes)
        except Exception as caught:
            # a failed copy, or progress that cannot be told: training waits for the end, whatever came before it
            error = caught
        try:
            done(error)
        finally:
            ticket.finish(error)


def copy_now(copies: Copies) -> None:
    """Copy, many tensors to a call: within a call the interpreter's lock is free, between two of them others can take it.

    Args:
        copies: of equal shapes; where either end lies on a device, it returns when the bytes are there.
    """
    with torch.no_grad():
        for start in range(0, len(copies.sources), TENSORS_AT_ONCE):
            end = start + TENSORS_AT_ONCE
            torch._foreach_copy_(list(copies.targets[start:end]), list(copies.sources[start:end]))


def parts(copies: Copies) -> Iterator[tuple[Copies, int, int]]:
    """Yield copies in parts of about `PIECE_BYTES`, in order: many small tensors, or a piece of a large one.

    Args:
        copies: to divide; a source that does not lie in one piece is not divided.

    Yields:
        The part, and behind it: how many targets are complete, and the bytes of the next one.
    """
    begun = size = 0
    for number, (source, target) in enumerate(zip(copies.sources, copies.targets, strict=True)):
        size += target.nbytes
        if size < PIECE_BYTES and number - begun < TENSORS_AT_ONCE:
            continue
        if begun < number:
            yield Copies(copies.sources[begun:number], copies.targets[begun:number]), number, 0
        begun, size = number, target.nbytes
        if size >= PIECE_BYTES:
            yield from _pieces(source, target, number)
            begun, size = number + 1, 0
    if begun < len(copies.sources):
        yield Copies(copies.sources[begun:], copies.targets[begun:]), len(copies.sources), 0


def _pieces(source: torch.Tensor, target: torch.Tensor, number: int) -> Iterator[tuple[Copies, int, int]]:
    pairs = [(source, target)]
    if source.is_contiguous():
        count = PIECE_BYTES // target.element_size()
        pairs = list(zip(torch.split(source.view(-1), count), torch.split(target.view(-1), count), strict=True))
    copied = 0
    for of, to in pairs:
        copied += to.nbytes
        is_complete = copied == target.nbytes
        yield Copies([of], [to]), number + is_complete, 0 if is_complete else copied
