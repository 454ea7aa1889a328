"""Defines how a rank's state is laid out in a slot, and maps slots into the rank's memory.

    payload of a slot:  tensor 0 │ zeros to 64 │ tensor 1 │ … │ index

Invariant: equal states produce equal payloads, byte for byte, including the zeros between tensors.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from everstep.protocol.pages import populate
from everstep.protocol.parts import TensorPart, are_disjoint
from everstep.protocol.slot import ALIGNMENT, HEADER_BYTES, IndexWriter, TensorEntry, align
from everstep.training.state_tree import dtype_name

MIN_INDEX_ROOM_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of the training state, which snapshots copy."""

    name: str
    tensor: torch.Tensor
    """The tensor object itself, whose version and address show changes; on the meta device if it does not exist yet."""
    is_deferred: bool
    """Whether only optimizer steps change the tensor, so that the copier may copy it in the background."""
    wrapper: torch.Tensor | None = None
    """The script's DTensor if `tensor` is the memory inside it. Torch counts changes only in the wrapper's version."""
    is_frozen: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class CapturePlan:
    """The tensors to copy into a slot, and their offsets. A new shape or a missing tensor needs a new plan."""

    entries: tuple[TensorEntry, ...]
    gaps: tuple[tuple[int, int], ...]
    """Ranges between tensors. The rank fills them with zeros, because old bytes would change the digest."""
    index_offset: int
    index: IndexWriter

    @classmethod
    def make(
        cls,
        tensors: Iterable[StateTensor],
        parts: Mapping[str, tuple[TensorPart, ...]] | None = None,
    ) -> CapturePlan:
        """Make a plan of all tensors in slot order. `parts` has boxes of all but whole logical tensors."""
        entries, gaps, offset, named = [], [], 0, parts or {}
        for state in tensors:
            tensor = state.tensor
            size = tensor.numel() * tensor.element_size()
            held = named.get(state.name)
            if held is not None and not are_disjoint(held, tensor.numel()):
                # Leave out invalid boxes (pieces of whole tensors), because they would make the slot unreadable. A
                # tensor without boxes can still be restored, but not with a different number of ranks.
                held = ()
            shape = tuple(tensor.shape)
            entries.append(
                TensorEntry(state.name, dtype_name(tensor.dtype), shape, offset, size, held, state.is_frozen)
            )
            end = align(offset + size)
            if end != offset + size:
                gaps.append((offset + size, end))
            offset = end
        return cls(tuple(entries), tuple(gaps), offset, IndexWriter(tuple(entries)))

    def fits(self, tensors: Sequence[StateTensor]) -> bool:
        """Return whether names, dtypes, shapes and `is_deferred` are those of the plan, in the same order."""
        return len(tensors) == len(self.entries) and self.fits_at(0, tensors)

    def fits_at(self, first: int, tensors: Sequence[StateTensor]) -> bool:
        """Return whether these tensors match the plan's entries from `first` on."""
        entries = self.entries[first : first + len(tensors)]
        return len(entries) == len(tensors) and all(
            entry.name == state.name
            and entry.shape == state.tensor.shape
            and entry.dtype == dtype_name(state.tensor.dtype)
            and entry.is_frozen == state.is_frozen
            for entry, state in zip(entries, tensors, strict=True)
        )

    def capacity_bytes(self, values: bytes) -> int:
        """Return the payload size to request, with a reserve for longer plain values of later steps."""
        return align(self.index_offset + max(MIN_INDEX_ROOM_BYTES, 4 * self.index.size(values)))

    def fits_into(self, capacity_bytes: int, values: bytes) -> bool:
        """Return whether the plan's tensors and the encoded plain values fit into `capacity_bytes`."""
        return self.index_offset + self.index.size(values) <= capacity_bytes


class SlotMemory:
    """The payload of one slot, mapped into this process."""

    def __init__(self, path: Path, capacity_bytes: int) -> None:
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), HEADER_BYTES + capacity_bytes)
        self.payload = torch.frombuffer(self._map, dtype=torch.uint8, offset=HEADER_BYTES, count=capacity_bytes)
        self.capacity_bytes = capacity_bytes
        self._views: list[torch.Tensor] = []
        self._plan: CapturePlan | None = None

    @property
    def span(self) -> tuple[int, int]:
        """Address and size of the mapped slot file, header included."""
        return self.payload.data_ptr() - HEADER_BYTES, len(self._map)

    def views(self, plan: CapturePlan) -> list[torch.Tensor]:
        """Return a view of the slot per tensor. A plan's first call writes the zeros and the index's beginning."""
        if self._plan is not plan:
            self._views = [view_of(self.payload, entry) for entry in plan.entries]
            for begin, end in plan.gaps:
                self.payload[begin:end].zero_()
            self._write(plan.index_offset, plan.index.prefix)
            self._plan = plan
        return self._views

    def write_values(self, plan: CapturePlan, values: bytes) -> int:
        """Write a step's plain values to the end of the index, and return the index's size. Call `views` first."""
        assert self._plan is plan
        suffix = plan.index.suffix(values)
        self._write(plan.index_offset + len(plan.index.prefix), suffix)
        return len(plan.index.prefix) + len(suffix)

    def bytes_at(self, start: int, stop: int) -> memoryview:
        """Return a view of the payload's bytes."""
        return memoryview(self._map)[HEADER_BYTES + start : HEADER_BYTES + stop]

    def prefault(self) -> None:
        """Allocate all pages of the mapping in a background thread, without changing the content."""
        address, size = self.span
        populate(address, size, is_written=True)

    def _write(self, offset: int, data: bytes) -> None:
        # Use a slice assignment. It holds the interpreter's lock, but for a few kilobytes it is faster than a tensor
        # copy.
        self._map[HEADER_BYTES + offset : HEADER_BYTES + offset + len(data)] = data


def view_of(payload: torch.Tensor, entry: TensorEntry) -> torch.Tensor:
    """Return the tensor of an index entry, which was checked against the capacity, as a view of the payload."""
    dtype: torch.dtype = getattr(torch, entry.dtype)
    assert entry.offset % ALIGNMENT == 0
    return payload[entry.offset : entry.offset + entry.bytes].view(dtype).view(entry.shape)
