"""Copies live tensors into slots in the background, while the script continues to train.

Invariant: when a ticket's `join` returns, its copy has ended, with success or an error. The caller must not change the
sources before the ticket's `wait` has returned.
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
# A call holds the interpreter's lock for about a microsecond per tensor. The training thread must not wait longer.
TENSORS_AT_ONCE = 256
_this_core = ctypes.CDLL(None).sched_getcpu
# The size of a chunk, so each chunk is still in the cache for its digest. Larger pieces were slower in measurements.
PIECE_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Copies:
    """Source tensors, and the targets to which the copier copies them."""

    sources: Sequence[torch.Tensor]
    targets: Sequence[torch.Tensor]


Done = Callable[[BaseException | None], None]
Progress = Callable[[int, int], None]
"""Receives the number of complete targets, and the copied bytes of the next one."""


class CopyTicket:
    """A started copy."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self.error: BaseException | None = None

    def finish(self, error: BaseException | None = None) -> None:
        """Record that the copy has ended. The copier calls this once."""
        self.error = error
        self._done.set()

    def wait(self) -> None:
        """Wait until the calling thread may change the sources. On a GPU, only the thread's CUDA stream waits."""
        self._done.wait()

    def join(self) -> None:
        """Wait until the copy has ended and all its bytes are in the slot."""
        self._done.wait()

    @property
    def hides_sources(self) -> bool:
        """True while the calling thread captures a CUDA graph, of which a read of the sources would become part."""
        return False


class Copier(Protocol):
    """Copies tensors into slots."""

    is_prompt: bool
    """Whether a copy starts immediately. False if it first waits for earlier work on a GPU."""

    def copy(self, copies: Copies) -> None:
        """Copy tensors, and return as soon as the calling thread may change the sources. On a GPU, the copy may still
        run on the thread's CUDA stream. `join` of a later `start` waits for it.
        """

    def start(self, copies: Copies, done: Done, progress: Progress | None = None) -> CopyTicket:
        """Start to copy tensors in order. The sources must not change until the ticket's `wait` has returned. From any
        thread, `done` is called once at the end, and `progress` during the copy, never after `done`.
        """
        ...

    def do_later(self, work: Callable[[], object]) -> None:
        """Run `work` in the copier's thread, after all earlier copies. Safe from any thread; never blocks."""

    def prepare(self, memory: SlotMemory) -> None:
        """Prepare a mapped slot in the background, so that later copies into it are faster."""

    def release(self, memory: SlotMemory) -> None:
        """Release the resources of a slot that no copy will write again."""

    def drain(self, limit_seconds: float) -> bool:
        """Wait for started copies, and return whether they have ended. The copier then starts no further copy."""
        ...

    def close(self) -> None:
        """Wait until all started copies have ended, and end the copier's thread."""


class CopierThread:
    """Runs the work of a copier in order, in the background. After an error, it continues with the next item. On a node
    with few cores per rank (`is_crowded`), the kernel may start the thread on the core of another rank, which would
    wait until the next scheduler tick. The thread therefore wakes up on its caller's core, and then may move.
    """

    def __init__(self, *, is_crowded: bool = False) -> None:
        self._is_crowded = is_crowded
        self._waiting: int | None = None
        """Kernel id of the thread while it waits for work."""
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="everstep-copier", daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], object]) -> None:
        """Queue work. Safe from any thread."""
        if self._is_crowded and (waiting := self._waiting) is not None:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(waiting, {_this_core()})
        self._work.put(work)

    def close(self, limit_seconds: float | None = None) -> bool:
        """End the thread after all queued work, and return whether it has ended within the limit. Idempotent."""
        self._work.put(None)
        self._thread.join(limit_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        cores = os.sched_getaffinity(0)  # In calls to the kernel, 0 means the calling thread.
        if self._is_crowded and os.sched_getscheduler(0) == os.SCHED_OTHER:
            with contextlib.suppress(OSError):
                # In the scheduling class SCHED_BATCH, a thread that wakes up preempts no other thread.
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        while (work := self._next()) is not None:
            if self._is_crowded:
                with contextlib.suppress(OSError):
                    os.sched_setaffinity(0, cores)
            try:
                work()
            except Exception:
                log.exception("a part of the copy failed")

    def _next(self) -> Callable[[], object] | None:
        self._waiting = threading.get_native_id()
        try:
            return self._work.get()
        finally:
            self._waiting = None


# A second copier thread would hardly be faster, and would use a core that training needs.
class CpuCopier:
    """Copies host memory in one background thread."""

    is_prompt = True

    def __init__(
        self, *, is_crowded: bool = False, piece_bytes: int = PIECE_BYTES, tensors_at_once: int = TENSORS_AT_ONCE
    ) -> None:
        self._piece_bytes = piece_bytes
        self._tensors_at_once = tensors_at_once
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
        """Do nothing, because `prepare` allocates no resources."""

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
                for part, complete_count, piece_bytes in parts(copies, self._piece_bytes, self._tensors_at_once):
                    self.copy(part)
                    progress(complete_count, piece_bytes)
        except Exception as caught:
            # A copy or the progress callback failed. Pass the error to the ticket, because training waits until the
            # ticket ends.
            error = caught
        try:
            done(error)
        finally:
            ticket.finish(error)


def copy_now(copies: Copies) -> None:
    """Copy tensors of equal shapes in the calling thread. Other threads can run meanwhile."""
    with torch.no_grad():
        for start in range(0, len(copies.sources), TENSORS_AT_ONCE):
            end = start + TENSORS_AT_ONCE
            torch._foreach_copy_(list(copies.targets[start:end]), list(copies.sources[start:end]))


def parts(
    copies: Copies, max_bytes: int = PIECE_BYTES, max_tensors: int = TENSORS_AT_ONCE
) -> Iterator[tuple[Copies, int, int]]:
    """Divide copies into pieces of about `max_bytes`: many small tensors, or a range of a large contiguous tensor.
    Yields the piece, the number of targets that are complete after it, and the copied bytes of the next target.
    """
    begun = size = 0
    for number, (source, target) in enumerate(zip(copies.sources, copies.targets, strict=True)):
        size += target.nbytes
        if size < max_bytes and number - begun < max_tensors:
            continue
        if begun < number:
            yield Copies(copies.sources[begun:number], copies.targets[begun:number]), number, 0
        begun, size = number, target.nbytes
        if size >= max_bytes:
            yield from _pieces(source, target, number, max_bytes)
            begun, size = number + 1, 0
    if begun < len(copies.sources):
        yield Copies(copies.sources[begun:], copies.targets[begun:]), len(copies.sources), 0


def _pieces(
    source: torch.Tensor, target: torch.Tensor, number: int, max_bytes: int
) -> Iterator[tuple[Copies, int, int]]:
    pairs = [(source, target)]
    if source.is_contiguous():
        count = max_bytes // target.element_size()
        pairs = list(zip(torch.split(source.view(-1), count), torch.split(target.view(-1), count), strict=True))
    copied = 0
    for of, to in pairs:
        copied += to.nbytes
        is_complete = copied == target.nbytes
        yield Copies([of], [to]), number + is_complete, 0 if is_complete else copied
