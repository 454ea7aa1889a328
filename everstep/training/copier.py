"""Copiers: they bring live tensors into slots while the script trains on.

Invariant: a copy has stopped for good when its ticket is joined, whether it went well or not; until `wait` has returned its sources must not change.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from everstep.training.capture import SlotMemory

TENSORS_AT_ONCE = 256
"""Reading the arguments of a call takes a microsecond a tensor, with the lock held."""


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies to make: each source into the target at its place."""

    sources: Sequence[torch.Tensor]
    targets: Sequence[torch.Tensor]


Done = Callable[[BaseException | None], None]


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


class Copier(Protocol):
    """Brings tensors into slots. The CPU's form is `CpuCopier`; `CudaCopier` copies on a stream of its own."""

    def copy(self, copies: Copies) -> None:
        """Copy now; returns when the calling thread may change the sources. The bytes are there when the next ticket is joined."""

    def start(self, copies: Copies, done: Done) -> CopyTicket:
        """Begin to copy; the sources must not change until the ticket's `wait` has returned. `done` is called once, from any thread."""

    def prepare(self, memory: SlotMemory) -> None:
        """Get a slot ready in the background: the copies after it will be faster."""

    def release(self, memory: SlotMemory) -> None:
        """The slot is not written any more."""

    def close(self) -> None:
        """End what was begun."""


class CpuCopier:
    """Copies host memory in one background thread; torch copies without the interpreter's lock, so that training goes on meanwhile.

    One thread, not two: a second gained a tenth where it was measured, and took a core from training.
    """

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="everstep-copier", daemon=True)
        self._thread.start()

    def copy(self, copies: Copies) -> None:
        copy_now(copies)

    def start(self, copies: Copies, done: Done) -> CopyTicket:
        ticket = CopyTicket()
        self._work.put(lambda: self._copy(copies, done, ticket))
        return ticket

    def prepare(self, memory: SlotMemory) -> None:
        self._work.put(memory.prefault)

    def release(self, memory: SlotMemory) -> None:
        """Nothing was taken."""

    def close(self) -> None:
        self._work.put(None)
        self._thread.join()

    def _copy(self, copies: Copies, done: Done, ticket: CopyTicket) -> None:
        error: BaseException | None = None
        try:
            self.copy(copies)
        except RuntimeError as caught:  # torch's word for any failed copy
            error = caught
        try:
            done(error)
        finally:
            ticket.finish(error)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()


def copy_now(copies: Copies) -> None:
    """Copy host memory, many tensors to a call: within a call the interpreter's lock is free, between two of them others can take it.

    Args:
        copies: between host tensors of equal shapes; large ones first, if others wait for the lock.
    """
    with torch.no_grad():
        for start in range(0, len(copies.sources), TENSORS_AT_ONCE):
            end = start + TENSORS_AT_ONCE
            torch._foreach_copy_(list(copies.targets[start:end]), list(copies.sources[start:end]))
