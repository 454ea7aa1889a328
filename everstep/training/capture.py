"""Where a rank's state lies in a slot.

    payload of a slot:  tensor 0 │ zeros to 64 │ tensor 1 │ … │ index (names, dtypes, shapes, offsets; the step's plain values)

Invariant: the payload is a function of the state alone: the same state gives the same bytes, gaps and all. It knows
tensors and memory, never the protocol.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from everstep.protocol.pages import populate
from everstep.protocol.slot import ALIGNMENT, HEADER_BYTES, IndexWriter, TensorEntry, align
from everstep.training.state_tree import dtype_name

MIN_INDEX_ROOM_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One live tensor of the state."""

    name: str
    tensor: torch.Tensor
    """The tensor itself, not a view: its version and address tell whether it changed.

    On the meta device: it does not exist yet.
    """
    is_deferred: bool
    """Only an optimizer step changes it, so it may be copied while forward and backward run."""
    wrapper: torch.Tensor | None = None
    """The tensor that the script sees (a DTensor) where `tensor` is the memory behind it: torch counts changes in the wrapper's version alone."""


@dataclass(frozen=True, slots=True, eq=False)
class CapturePlan:
    """Where the tensors of one layout lie in a slot.

    Made once, and again when a tensor appears, goes, or changes its shape.
    """

    entries: tuple[TensorEntry, ...]
    gaps: tuple[tuple[int, int], ...]
    """Payload ranges between tensors: stale bytes there would change the digest."""
    index_offset: int
    index: IndexWriter
    """Writes the index of these entries, with the values of each boundary."""

    @classmethod
    def make(cls, tensors: Iterable[StateTensor]) -> CapturePlan:
        """Return the plan for these tensors.

        Args:
            tensors: every tensor of the state, in canonical order.

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
        return cls(tuple(entries), tuple(gaps), offset, IndexWriter(tuple(entries)))

    def fits(self, tensors: Sequence[StateTensor]) -> bool:
        """Say whether these tensors are the planned ones by name, dtype and shape."""
        return len(tensors) == len(self.entries) and self.fits_at(0, tensors)

    def fits_at(self, first: int, tensors: Sequence[StateTensor]) -> bool:
        """Say whether these tensors are the ones planned from the entry `first` on."""
        entries = self.entries[first : first + len(tensors)]
        return len(entries) == len(tensors) and all(
            entry.name == state.name
            and entry.shape == state.tensor.shape
            and entry.dtype == dtype_name(state.tensor.dtype)
            for entry, state in zip(entries, tensors, strict=True)
        )

    def capacity_bytes(self, values: bytes) -> int:
        """Return the size of a payload that such a state needs, with generous room for values like these: later ones may be longer."""
        return align(self.index_offset + max(MIN_INDEX_ROOM_BYTES, 4 * self.index.size(values)))

    def fits_into(self, capacity_bytes: int, values: bytes) -> bool:
        """Say whether a payload with these values has room in a slot of that size."""
        return self.index_offset + self.index.size(values) <= capacity_bytes


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
        self.capacity_bytes = capacity_bytes
        self._views: list[torch.Tensor] = []
        self._plan: CapturePlan | None = None

    @property
    def span(self) -> tuple[int, int]:
        """Where the mapping lies, header and all: (address, bytes)."""
        return self.payload.data_ptr() - HEADER_BYTES, len(self._map)

    def views(self, plan: CapturePlan) -> list[torch.Tensor]:
        """Return the place of each planned tensor, shaped and typed like it; what the plan keeps constant is written when it is new here."""
        if self._plan is not plan:
            self._views = [view_of(self.payload, entry) for entry in plan.entries]
            for begin, end in plan.gaps:
                self.payload[begin:end].zero_()
            self._write(plan.index_offset, plan.index.prefix)
            self._plan = plan
        return self._views

    def write_values(self, plan: CapturePlan, values: bytes) -> int:
        """Complete the index with a boundary's values, behind `views` of the same plan; return the index's size in bytes."""
        assert self._plan is plan
        suffix = plan.index.suffix(values)
        self._write(plan.index_offset + len(plan.index.prefix), suffix)
        return len(plan.index.prefix) + len(suffix)

    def bytes_at(self, start: int, stop: int) -> memoryview:
        """Return the bytes `start` to `stop` of the payload as they lie in the slot."""
        return memoryview(self._map)[HEADER_BYTES + start : HEADER_BYTES + stop]

    def prefault(self) -> None:
        """Give the whole mapping its pages, content unchanged. In a thread."""
        address, size = self.span
        populate(address, size, is_written=True)

    def _write(self, offset: int, data: bytes) -> None:
        # It holds the interpreter's lock: for a few kilobytes that is cheaper than to make tensors of both.
        self._map[HEADER_BYTES + offset : HEADER_BYTES + offset + len(data)] = data


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
