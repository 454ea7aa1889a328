"""Plans how the tensors of one device reach a slot: which ranges of the slot one transfer fills, and from where.

    tensors in the slot's order:   large │ small small small │ large, not contiguous │ in host memory
    runs:                          view  │ gather buffer     │ gather buffer, parts  │ none: the host copies it

The gather buffer on the device has the layout of the slot's range. Adam's step counts in host memory would each end a
run, so such scalars first pass to the device, all at once (`Staging`). Making a plan for thousands of tensors is slow.
Usually, the next snapshot copies the same memory to the same offsets of another slot, and uses the plan again
(`TransferPlan.fits`).

Invariant: a plan refers to sources and to offsets within a slot, never to a slot.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from everstep.protocol.slot import ALIGNMENT, align
from everstep.training.copier import Copies
from everstep.training.state_tree import tensor_bytes


# Torch fuses only tensors of one dtype into one kernel, so contiguous tensors are copied as bytes.
@dataclass(slots=True)
class Gathering:
    """Copies of tensors into a buffer on their device, with zeros between them."""

    memory: torch.Tensor
    """uint8[n]. Every byte is written."""
    places: list[torch.Tensor] = field(default_factory=list)
    sources: list[torch.Tensor] = field(default_factory=list)
    """Contiguous tensors, uint8[nbytes] each, as are their `places`."""
    strided_places: list[torch.Tensor] = field(default_factory=list)
    """Range of each non-contiguous tensor, with its shape and dtype."""
    strided_sources: list[torch.Tensor] = field(default_factory=list)

    def add(self, place: torch.Tensor, source: torch.Tensor) -> None:
        """Add the copy of `source` to `place`, which is uint8[source.nbytes]."""
        if source.is_contiguous():
            self.places.append(place)
            self.sources.append(tensor_bytes(source))
        else:
            self.strided_places.append(place.view(source.dtype).view(source.shape))
            self.strided_sources.append(source)

    def __len__(self) -> int:
        return len(self.sources) + len(self.strided_sources)

    def run(self) -> None:
        """Enqueue the copies on the current stream of the device."""
        with torch.no_grad():
            self.memory.zero_()
            if self.sources:
                torch._foreach_copy_(self.places, self.sources)
            for place, source in zip(self.strided_places, self.strided_sources, strict=True):
                place.copy_(source)


@dataclass(frozen=True, slots=True)
class Run:
    """A contiguous range of a slot for a tensor, a part of one, or several small ones."""

    first: int
    last: int
    before_bytes: int
    """Bytes of the first tensor before the range; 0 unless the tensor is divided."""
    complete_count: int
    """Number of tensors, from the start of the list of copies, that are complete after this range."""
    tensors_bytes: int
    """Size without the zeros between its tensors."""
    source: torch.Tensor
    """View of the source or of the gather buffer, zeros included."""

    def place(self, copies: Copies) -> torch.Tensor:
        """Return the bytes of this range in the slot of `copies`, uint8[source.numel()]."""
        begin = tensor_bytes(copies.targets[self.first])
        return begin.as_strided(self.source.shape, (1,), begin.storage_offset() + self.before_bytes)


@dataclass(frozen=True, slots=True)
class TransferBatch:
    """Consecutive runs whose gathered tensors fill the gather buffer at most once."""

    gathering: Gathering
    """Empty if no run passes through the gather buffer."""
    runs: Sequence[Run]


@dataclass(frozen=True, slots=True)
class Staging:
    """Memory through which scalars pass from the host to the device: pinned, and on the device, uint8[n] each."""

    host: torch.Tensor
    device: torch.Tensor


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """The batches of runs that copy a list of tensors into a slot, in the order of the list."""

    sources: Sequence[torch.Tensor]
    addresses: Sequence[int]
    """Address of each source; 0 for an empty tensor."""
    offsets: Sequence[int]
    """Address of each target relative to the first that is not empty; 0 for an empty target."""
    on_host: Sequence[int]
    """Indexes of the sources that the host copies into the slot."""
    staged: Copies
    """Copies of scalars to the pinned memory, which the host makes before the first batch."""
    staged_bytes: int
    """Bytes of the staging that then pass to the device."""
    batches: Sequence[TransferBatch]

    @classmethod
    def make(
        cls,
        copies: Copies,
        holds: Callable[[torch.Tensor], bool],
        buffer: torch.Tensor,
        small_bytes: int,
        staging: Staging | None = None,
    ) -> TransferPlan:
        """Plan the copies, in the order of the targets' addresses. The plan keeps the sources' memory allocated.
        `buffer` is uint8[n] on the device, n a multiple of `ALIGNMENT`. Tensors of at most `small_bytes` share
        transfers. Without `staging`, the host copies scalars.
        """
        here: list[torch.Tensor | None] = []
        on_host: list[int] = []
        scalars: list[torch.Tensor] = []
        places: list[torch.Tensor] = []
        used = 0
        for number, source in enumerate(copies.sources):
            if holds(source):
                here.append(source)
            elif staging and 0 < source.nbytes <= ALIGNMENT <= staging.host.numel() - used and source.is_contiguous():
                part = slice(used, used + source.nbytes)
                scalars.append(source)
                places.append(staging.host[part].view(source.dtype).view(source.shape))
                here.append(staging.device[part])
                used += ALIGNMENT
            else:
                here.append(None)
                on_host.append(number)
        return cls(
            list(copies.sources),
            _addresses(copies.sources),
            _offsets(copies.targets),
            on_host,
            Copies(scalars, places),
            used,
            list(_batches(_ranges(copies.targets, here, buffer.numel(), small_bytes), buffer)),
        )

    def fits(self, copies: Copies) -> bool:
        """Return whether this plan also describes `copies`: the same sources, and the same offsets in any slot."""
        return (
            len(copies.sources) == len(self.sources)
            and _addresses(copies.sources) == self.addresses
            and _offsets(copies.targets) == self.offsets
            and (
                all(map(operator.is_, copies.sources, self.sources))
                or all(map(_is_alike, copies.sources, self.sources))
            )
        )


def _is_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.stride() == other.stride()


def _addresses(tensors: Sequence[torch.Tensor]) -> list[int]:
    return list(map(torch.Tensor.data_ptr, tensors))


def _offsets(targets: Sequence[torch.Tensor]) -> list[int]:
    addresses = _addresses(targets)
    first = next(filter(None, addresses), 0)
    return [address - first if address else 0 for address in addresses]


@dataclass(slots=True)
class _Range:
    first: int
    last: int
    before_bytes: int
    complete_count: int
    size: int
    """Bytes, including the zeros between its tensors."""
    sources: list[torch.Tensor]
    offsets: list[int] = field(default_factory=lambda: [0])
    """Offset of each source within the range."""

    @property
    def is_gathered(self) -> bool:
        return len(self.sources) > 1 or not self.sources[0].is_contiguous()

    def is_small(self, small_bytes: int) -> bool:
        """Return whether every tensor is whole, and small enough to share a transfer."""
        return self.complete_count > self.last and not self.before_bytes and self.sources[-1].nbytes <= small_bytes

    def take(self, other: _Range, offset: int) -> None:
        """Append the tensor of the range `other`, which begins `offset` bytes after the start of this range."""
        self.sources += other.sources
        self.offsets.append(offset)
        self.last, self.complete_count, self.size = other.last, other.complete_count, offset + other.size

    def run(self, source: torch.Tensor) -> Run:
        """Return the run of this range from its contiguous bytes on the device."""
        tensors_bytes = sum(each.nbytes for each in self.sources)
        return Run(self.first, self.last, self.before_bytes, self.complete_count, tensors_bytes, source)


def _ranges(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor | None], limit: int, small_bytes: int
) -> Iterator[_Range]:
    """Yield the device's tensors in order. A range of several small tensors has at most `limit` bytes."""
    last: _Range | None = None
    for part in _parts(sources, limit):
        if last is None:
            last = part
        elif (offset := _joint(last, part, targets, limit, small_bytes)) is not None:
            last.take(part, offset)
        else:
            yield last
            last = part
    if last is not None:
        yield last


def _joint(one: _Range, other: _Range, targets: Sequence[torch.Tensor], limit: int, small_bytes: int) -> int | None:
    """Return the offset of `other` from `one` if small tensors follow each other within `limit` bytes, else None."""
    begin, target = targets[one.first], targets[other.first]
    offset = target.data_ptr() - begin.data_ptr()
    can_share = (
        one.is_small(small_bytes)
        and other.is_small(small_bytes)
        and target.data_ptr() == align(begin.data_ptr() + one.size)
        and offset + other.size <= limit
        # Do not join ranges of two slots that are mapped next to each other. The gap between them is no part of a slot,
        # so it must not be filled with zeros.
        and begin.untyped_storage().data_ptr() == target.untyped_storage().data_ptr()
    )
    return offset if can_share else None


def _parts(sources: Sequence[torch.Tensor | None], limit: int) -> Iterator[_Range]:
    for number, source in enumerate(sources):
        if source is None or not source.nbytes:
            continue
        before = 0
        for part in [source] if source.is_contiguous() else _rows(source, limit):
            is_last = before + part.nbytes == source.nbytes
            yield _Range(number, number, before, number + is_last, part.nbytes, [part])
            before += part.nbytes


def _rows(source: torch.Tensor, limit: int) -> Iterator[torch.Tensor]:
    if source.nbytes <= limit:
        yield source
    elif (row := source.nbytes // len(source)) > limit:
        for part in source:
            yield from _rows(part, limit)
    else:
        yield from torch.split(source, limit // row)


def _batches(ranges: Iterator[_Range], buffer: torch.Tensor) -> Iterator[TransferBatch]:
    batch: list[_Range] = []
    used = 0
    for each in ranges:
        size = align(each.size) if each.is_gathered else 0
        if used + size > buffer.numel():
            yield _batch(batch, buffer[:used])
            batch, used = [], 0
        batch.append(each)
        used += size
    yield _batch(batch, buffer[:used])


def _batch(ranges: Sequence[_Range], memory: torch.Tensor) -> TransferBatch:
    gathering, runs, begin = Gathering(memory), [], 0
    for each in ranges:
        if each.is_gathered:
            for offset, source in zip(each.offsets, each.sources, strict=True):
                gathering.add(memory[begin + offset : begin + offset + source.nbytes], source)
            runs.append(each.run(memory[begin : begin + each.size]))
            begin += align(each.size)
        else:
            runs.append(each.run(tensor_bytes(each.sources[0])))
    return TransferBatch(gathering, runs)
