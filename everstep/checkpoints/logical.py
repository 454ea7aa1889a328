"""Joins the parts that ranks hold into logical tensors: whole parameters and optimizer states of a model. Pure.

A box is a rectangular piece of a logical tensor that one rank holds.

Invariant: the boxes of a logical tensor cover each of its elements exactly once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from everstep.protocol.dtypes import ITEM_BYTES
from everstep.protocol.parts import LOGICAL_PREFIXES
from everstep.protocol.slot import SlotIndex


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular piece of a whole parameter or optimizer state, and its place in the shard of one rank."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    rank: int
    """The rank whose shard holds this piece of the tensor."""
    begin: int
    """First byte of the box within the payload of the rank's shard. The bytes are in row-major order of the box."""


@dataclass(frozen=True, slots=True)
class LogicalTensor:
    """A whole tensor of the model or of its optimizer."""

    name: str
    """`model/<parameter or buffer>` or `optimizer/<parameter>/<entry of its state>`."""
    dtype: str
    """Name of the dtype in torch, for example `float32`."""
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    """The rectangular pieces that ranks hold, in the order of their offsets in the tensor."""

    @property
    def bytes(self) -> int:
        """Size of the whole tensor in bytes."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Joined:
    """The whole parameters and optimizer states of a checkpoint, joined from the shards of all ranks."""

    tensors: dict[str, LogicalTensor]
    """Complete tensors by name, in the order in which the shard of the lowest rank lists them."""
    incomplete: dict[str, str]
    """The reason why a tensor cannot be read, by the name of the tensor.

    Either its boxes (the pieces that ranks hold) are missing or overlap, or ranks disagree about its dtype or shape. An
    example is a buffer whose shape depends on the data of each rank.
    """


def join(indexes: Mapping[int, SlotIndex]) -> Joined:
    """Join the shards of all ranks into logical tensors.

    If several ranks hold the same box (piece of a tensor), the result uses the copy of the lowest rank. Ranks of a
    data-parallel group hold equal parameters, but their buffers may differ, for example batch normalization statistics.

    Args:
        indexes: the index of each rank's shard, which lists the tensors in the shard.

    Returns:
        The complete tensors, and the reason why each other tensor is incomplete.
    """
    incomplete: dict[str, str] = {}
    found: dict[str, tuple[str, tuple[int, ...], dict[tuple[tuple[int, ...], tuple[int, ...]], Box]]] = {}
    for rank, index in sorted(indexes.items()):
        for entry in index.tensors:
            for part in entry.logical_parts:
                if not part.name.startswith(LOGICAL_PREFIXES):
                    continue
                dtype, shape, boxes = found.setdefault(part.name, (entry.dtype, part.shape, {}))
                if (dtype, shape) != (entry.dtype, part.shape):
                    incomplete[part.name] = (
                        f"{part.name} is {dtype}{list(shape)} on one rank and {entry.dtype}{list(part.shape)} on rank "
                        f"{rank}"
                    )
                    continue
                begin = entry.offset + part.start * ITEM_BYTES[entry.dtype]
                boxes.setdefault((part.offsets, part.sizes), Box(part.offsets, part.sizes, rank, begin))
    tensors: dict[str, LogicalTensor] = {}
    for name, (dtype, shape, by_place) in found.items():
        ordered = sorted((box for box in by_place.values() if math.prod(box.sizes)), key=lambda box: box.offsets)
        held, whole = sum(math.prod(box.sizes) for box in ordered), math.prod(shape)
        if held != whole or _overlap(ordered):
            incomplete.setdefault(name, f"the shards hold {held} elements of the {whole} of {name}{list(shape)}")
        if name not in incomplete:
            tensors[name] = LogicalTensor(name, dtype, shape, tuple(ordered))
    return Joined(tensors, incomplete)


def _overlap(boxes: Sequence[Box]) -> bool:
    """Return whether two boxes (rectangular pieces of one tensor) share an element.

    Two boxes can share an element only if their ranges overlap in every dimension. The function therefore sorts the
    boxes by their offset in one dimension, and compares only boxes whose ranges overlap in it. It chooses the dimension
    in which the boxes have the most distinct offsets, because few ranges usually overlap there.
    """
    if len(boxes) < 2 or not boxes[0].offsets:
        return len(boxes) > 1
    axis = max(range(len(boxes[0].offsets)), key=lambda each: len({box.offsets[each] for box in boxes}))
    open_boxes: list[Box] = []
    for box in sorted(boxes, key=lambda each: each.offsets[axis]):
        open_boxes = [other for other in open_boxes if other.offsets[axis] + other.sizes[axis] > box.offsets[axis]]
        if any(_share(box, other) for other in open_boxes):
            return True
        open_boxes.append(box)
    return False


def _share(one: Box, other: Box) -> bool:
    return all(
        a < b + n and b < a + m for a, m, b, n in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    )
