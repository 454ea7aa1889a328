"""A rank's state into a slot: where each tensor lies, and the copier that brings it there.

    payload of a slot:  tensor 0 │ zeros to 64 │ tensor 1 │ … │ index (names, dtypes, shapes, offsets; the step's plain values)

Invariant: the payload is a function of the state alone: the same state gives the same bytes, gaps and all. It knows tensors and memory,
never the protocol.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from everstep.protocol.slot import ALIGNMENT, HEADER_BYTES, SlotIndex, TensorEntry, align, pack_index
from everstep.training.state_tree import dtype_name

MIN_INDEX_ROOM_BYTES = 64 * 1024
PREFAULT_BYTES = 64 * 1024 * 1024
_MADV_POPULATE_WRITE = 23
"""Linux 5.14: give a range its pages now. The first touch of a page costs twelve times its copy."""


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One live tensor of the state."""

    name: str
    tensor: torch.Tensor
    """The tensor itself, not a view: its version and address tell whether it changed."""
    is_deferred: bool
    """Only an optimizer step changes it, so it may be copied while forward and backward run."""


@dataclass(frozen=True, slots=True)
class CapturePlan:
    """Where the tensors of one layout lie in a slot. Made once, and again when a tensor appears, goes, or changes its shape."""

    entries: tuple[TensorEntry, ...]
    gaps: tuple[tuple[int, int], ...]
    """Payload ranges between tensors: stale bytes there would change the digest."""
    index_offset: int
    capacity_bytes: int

    @classmethod
    def make(cls, tensors: Sequence[StateTensor], values: bytes) -> CapturePlan:
        """Return the plan for these tensors, with generous room for values like these.

        Args:
            tensors: every tensor of the state, in canonical order.
            values: this boundary's encoded values; later ones may be longer.

        Returns:
            The plan.
        """
        entries, gaps, offset = [], [], 0
        for state in tensors:
            tensor = state.tensor
            size = tensor.numel() * tensor.element_size()
            entries.append(TensorEntry(state.name, dtype_name(tensor.dtype), tuple(tensor.shape), offset, size))
            end = align(offset + size)
            if end != offset + size:
                gaps.append((offset + size, end))
            offset = end
        index = len(pack_index(SlotIndex(tuple(entries), values)))
        return cls(tuple(entries), tuple(gaps), offset, align(offset + max(MIN_INDEX_ROOM_BYTES, 4 * index)))

    def fits(self, tensors: Sequence[StateTensor]) -> bool:
        """Say whether these tensors are the planned ones by name, dtype and shape."""
        return len(tensors) == len(self.entries) and all(
            entry.name == state.name and entry.shape == state.tensor.shape and entry.dtype == dtype_name(state.tensor.dtype)
            for entry, state in zip(self.entries, tensors, strict=True)
        )

    def index(self, values: bytes) -> bytes | None:
        """Return the index as it goes into the slot, or None when it no longer fits: the values have grown past their room."""
        data = pack_index(SlotIndex(self.entries, values))
        return data if self.index_offset + len(data) <= self.capacity_bytes else None


class SlotMemory:
    """One slot's payload, mapped, as a tensor for each planned one.

    Args:
        path: the slot file.
        capacity_bytes: of its payload.
    """

    def __init__(self, path: Path, capacity_bytes: int) -> None:
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), HEADER_BYTES + capacity_bytes)
        self.payload = torch.frombuffer(self._map, dtype=torch.uint8, offset=HEADER_BYTES, count=capacity_bytes)
        self._views: list[torch.Tensor] = []
        self._plan: CapturePlan | None = None

    def views(self, plan: CapturePlan) -> list[torch.Tensor]:
        """Return the place of each planned tensor, shaped and typed like it."""
        if self._plan is not plan:
            self._views = [view_of(self.payload, entry) for entry in plan.entries]
            self._plan = plan
        return self._views

    def write(self, offset: int, data: bytes) -> None:
        """Put `data` at a payload offset."""
        if data:
            self.payload[offset : offset + len(data)].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def clear(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Zero these payload ranges."""
        for begin, end in ranges:
            self.payload[begin:end].zero_()

    def prefault(self) -> None:
        """Give the whole payload its pages, content unchanged; a kernel that cannot leaves it to the first copy."""
        with contextlib.suppress(OSError, AttributeError):
            advise = ctypes.CDLL(None).madvise  # unlike mmap.madvise, a foreign call lets other threads run
            begin = self.payload.data_ptr() - HEADER_BYTES
            for offset in range(0, len(self._map), PREFAULT_BYTES):
                size = min(PREFAULT_BYTES, len(self._map) - offset)
                if advise(ctypes.c_void_p(begin + offset), ctypes.c_size_t(size), _MADV_POPULATE_WRITE):
                    return


def view_of(payload: torch.Tensor, entry: TensorEntry) -> torch.Tensor:
    """Return the tensor that lies at `entry` of a payload, as a view.

    Args:
        payload: uint8[capacity_bytes].
        entry: from an index that was checked against that capacity.

    Returns:
        The view: writing it writes the payload.
    """
    dtype: torch.dtype = getattr(torch, entry.dtype)
    assert entry.offset % ALIGNMENT == 0
    return payload[entry.offset : entry.offset + entry.bytes].view(dtype).view(entry.shape)


@dataclass(frozen=True, slots=True)
class CopyPiece:
    """One copy to make."""

    source: torch.Tensor
    target: torch.Tensor


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
        """Return when the copy has stopped."""
        self._done.wait()


class Copier(Protocol):
    """Brings tensors into slots. The CPU's form is `CpuCopier`; a device's copies on its own stream."""

    def copy(self, pieces: Sequence[CopyPiece]) -> None:
        """Copy now; returns when the sources may change."""

    def start(self, pieces: Sequence[CopyPiece], done: Callable[[BaseException | None], None]) -> CopyTicket:
        """Begin to copy; the sources must not change until the ticket's `wait` has returned. `done` is called just before, from any thread."""

    def prepare(self, memory: SlotMemory) -> None:
        """Get a slot ready in the background: the copies after it will be faster."""

    def close(self) -> None:
        """End what was begun."""


class CpuCopier:
    """Copies host memory in one background thread; torch's copy lets the training thread run meanwhile."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="everstep-copier", daemon=True)
        self._thread.start()

    def copy(self, pieces: Sequence[CopyPiece]) -> None:
        with torch.no_grad():
            for piece in pieces:
                piece.target.copy_(piece.source)

    def start(self, pieces: Sequence[CopyPiece], done: Callable[[BaseException | None], None]) -> CopyTicket:
        ticket = CopyTicket()

        def work() -> None:
            error: BaseException | None = None
            try:
                self.copy(pieces)
            except RuntimeError as caught:  # torch's word for any failed copy
                error = caught
            try:
                done(error)
            finally:
                ticket.finish(error)

        self._work.put(work)
        return ticket

    def prepare(self, memory: SlotMemory) -> None:
        self._work.put(memory.prefault)

    def close(self) -> None:
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
