"""Describes which elements of logical tensors a stored tensor contains. Pure.

A logical tensor is a whole parameter, master weight or optimizer state tensor, independent of the number of ranks that
hold pieces of it. A box, or part, is a rectangular piece of a logical tensor. Each tensor in a slot consists of boxes:

    FSDP2, tensor parallel    one box of one logical tensor
    ZeRO 1, 2, 3              flat ranges of many logical tensors; each range is a few boxes
    plain, DDP                the whole logical tensor

Invariant: the elements of a box are contiguous in the slot's tensor, in row-major order of the box.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import msgspec

LOGICAL_PREFIXES = ("model/", "optimizer/")
"""Prefixes of the names of logical tensors. All other tensors belong to one rank."""
MAX_DIMENSIONS = 64
"""torch's own limit."""


class TensorPart(msgspec.Struct, frozen=True, array_like=True):
    """A box, and its place in a stored tensor of a slot. A scalar has an empty shape and one element."""

    name: str
    """The logical tensor's name in a slot of a single process with the same model."""
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    """First index of the box in each dimension of the logical tensor."""
    sizes: tuple[int, ...]
    """Length of the box in each dimension."""
    start: int
    """First element within the slot's tensor, in row-major order."""

    @property
    def elements(self) -> int:
        """Number of elements of the box."""
        return math.prod(self.sizes)

    def fits(self, elements: int) -> bool:
        """Return whether the box lies within its logical tensor, and within a stored tensor of `elements` elements."""
        return (
            len(self.shape) <= MAX_DIMENSIONS
            and all(length < 2**63 for length in self.shape)
            and len(self.shape) == len(self.offsets) == len(self.sizes)
            and all(
                begin >= 0 and size >= 0 and begin + size <= length
                for length, begin, size in zip(self.shape, self.offsets, self.sizes, strict=True)
            )
            and 0 <= self.start <= elements - self.elements
        )


def are_disjoint(parts: Sequence[TensorPart], elements: int) -> bool:
    """Return whether boxes fit into a stored tensor of `elements` elements without overlap. Boxes of different logical
    tensors may occupy the same elements if the tensors are equal, such as tied parameters.
    """
    if not all(part.fits(elements) for part in parts):
        return False
    places = sorted({(part.start, part.elements) for part in parts if part.elements})
    return all(first + count <= second for (first, count), (second, _) in itertools.pairwise(places))


def whole(name: str, shape: tuple[int, ...]) -> TensorPart:
    """Return the box of a stored tensor that contains a whole logical tensor."""
    return TensorPart(name, shape, (0,) * len(shape), shape, 0)


def parts_of_range(name: str, shape: tuple[int, ...], begin: int, end: int, start: int) -> tuple[TensorPart, ...]:
    """Return the boxes that together cover the range [begin, end) of a logical tensor's elements, in row-major order.
    `start` is the place of the first element within the slot's tensor. The result has at most 2 · dimensions - 1 boxes.
    """
    parts: list[TensorPart] = []
    for offsets, sizes in _boxes(shape, begin, end):
        parts.append(TensorPart(name, shape, offsets, sizes, start))
        start += parts[-1].elements
    return tuple(parts)


_Box = tuple[tuple[int, ...], tuple[int, ...]]


def _boxes(shape: tuple[int, ...], begin: int, end: int) -> Iterator[_Box]:
    if begin >= end:
        return
    if len(shape) <= 1:
        yield ((begin,), (end - begin,)) if shape else ((), ())
        return
    row = math.prod(shape[1:])
    (first, head), (last, tail) = divmod(begin, row), divmod(end, row)
    if first == last:
        yield from _in_row(shape, first, head, tail)
        return
    if head:
        yield from _in_row(shape, first, head, row)
        first += 1
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    yield from _in_row(shape, last, 0, tail)


def _in_row(shape: tuple[int, ...], row: int, begin: int, end: int) -> Iterator[_Box]:
    for offsets, sizes in _boxes(shape[1:], begin, end):
        yield (row, *offsets), (1, *sizes)
