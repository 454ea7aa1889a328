"""Describes which elements of logical tensors a stored tensor contains (its parts). Pure.

A logical tensor is a whole parameter, master weight or optimizer state tensor, independent of the number of ranks that
hold pieces of it. A box is a rectangular piece of a logical tensor. Each tensor in a slot consists of boxes:

    FSDP2, tensor parallel    one box of one logical tensor
    ZeRO 1, 2, 3              flat ranges of many logical tensors; each range is a few boxes
    plain, DDP                the whole logical tensor

Invariant: the elements of a part (one box) are contiguous in the slot's tensor, in row-major order of the box.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import msgspec

LOGICAL_PREFIXES = ("model/", "optimizer/")
"""Prefixes of the names of logical tensors. All other tensors belong to one rank, such as its random generator's state.
"""
MAX_DIMENSIONS = 64
"""Upper limit of a tensor's number of dimensions. Source: torch's own limit."""


class TensorPart(msgspec.Struct, frozen=True, array_like=True):
    """A box: a rectangular piece of a logical tensor, and its place in a stored tensor of a slot.

    A scalar has an empty shape and one element.
    """

    name: str
    """Name of the logical tensor: the name that the tensor has in a slot of a single process with the same model."""
    shape: tuple[int, ...]
    """Shape of the whole logical tensor."""
    offsets: tuple[int, ...]
    """First index of this box in each dimension of the logical tensor."""
    sizes: tuple[int, ...]
    """Length of this box in each dimension of the logical tensor."""
    start: int
    """First element of the box within the slot's tensor, counted in row-major order."""

    @property
    def elements(self) -> int:
        """Number of elements of this rectangular piece."""
        return math.prod(self.sizes)

    def fits(self, elements: int) -> bool:
        """Return whether the box lies within its logical tensor, and within a stored tensor of `elements` elements.

        A box is a rectangular piece of a logical tensor (a whole parameter or optimizer state).
        """
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
    """Return whether boxes (rectangular pieces) fit into a stored tensor of `elements` elements without overlap.

    Exception: boxes of different logical tensors may occupy the same elements if the tensors are equal. Examples are
    tied parameters, and a scalar that all parameters of a group share.
    """
    if not all(part.fits(elements) for part in parts):
        return False
    places = sorted({(part.start, part.elements) for part in parts if part.elements})
    return all(first + count <= second for (first, count), (second, _) in itertools.pairwise(places))


def whole(name: str, shape: tuple[int, ...]) -> TensorPart:
    """Return the box (piece of a logical tensor) of a stored tensor that contains a whole logical tensor."""
    return TensorPart(name, shape, (0,) * len(shape), shape, 0)


def parts_of_range(name: str, shape: tuple[int, ...], begin: int, end: int, start: int) -> tuple[TensorPart, ...]:
    """Return the boxes (rectangular pieces) that together cover a flat range of a logical tensor.

    Args:
        name: name of the logical tensor.
        shape: shape of the logical tensor.
        begin: first element of the range, in row-major order.
        end: end of the range, exclusive.
        start: place of the range's first element within the slot's tensor.

    Returns:
        At most 2 · dimensions - 1 boxes, in row-major order. No box for an empty range.
    """
    parts: list[TensorPart] = []
    for offsets, sizes in _boxes(shape, begin, end):
        parts.append(TensorPart(name, shape, offsets, sizes, start))
        start += parts[-1].elements
    return tuple(parts)


_Box = tuple[tuple[int, ...], tuple[int, ...]]
"""A box (rectangular piece) of a logical tensor as (offsets, sizes), one number per dimension."""


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
