"""A flat range of a tensor is cut into boxes: ranges in every dimension.

Together, the boxes contain exactly the elements of the flat range, in the same order.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.protocol.errors import CorruptSlot
from everstep.protocol.parts import TensorPart, parts_of_range, whole
from everstep.protocol.slot import SlotIndex, TensorEntry, pack_index, unpack_index


@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_the_boxes_of_a_range_hold_its_elements_in_their_order(lengths: list[int], data: st.DataObject) -> None:
    shape = tuple(lengths)
    count = math.prod(shape)
    begin = data.draw(st.integers(0, count))
    end = data.draw(st.integers(begin, count))
    parts = parts_of_range("w", shape, begin, end, 7)
    numbers = np.arange(count).reshape(shape)
    found = [
        numbers[tuple(slice(o, o + s) for o, s in zip(part.offsets, part.sizes, strict=True))].ravel() for part in parts
    ]
    assert np.concatenate([*found, np.arange(0)]).tolist() == list(range(begin, end))
    assert [part.start for part in parts] == [7 + sum(map(len, found[:number])) for number in range(len(parts))]
    assert all(part.elements and part.fits(7 + end - begin) for part in parts)
    assert len(parts) <= max(1, 2 * len(shape) - 1)


def test_an_entry_without_parts_is_the_whole_tensor_of_its_name() -> None:
    entry = TensorEntry("model/w", "float32", (2, 3), 0, 24)
    assert entry.logical_parts == (whole("model/w", (2, 3)),) == (TensorPart("model/w", (2, 3), (0, 0), (2, 3), 0),)


def test_an_entry_that_holds_padding_alone_has_no_part() -> None:
    assert TensorEntry("model/master0", "float32", (2,), 0, 8, ()).logical_parts == ()


@pytest.mark.parametrize(
    "part",
    [
        TensorPart("w", (4, 4), (3, 0), (2, 4), 0),
        TensorPart("w", (4, 4), (-1, 0), (1, 4), 0),
        TensorPart("w", (4, 4), (0, 0), (1, -4), 0),
        TensorPart("w", (4, 4), (0,), (1,), 0),
        TensorPart("w", (4, 4), (0, 0), (2, 4), 1),
        TensorPart("w", (4, 4), (0, 0), (1, 4), -1),
        TensorPart("v", (4,), (0,), (4,), 6),
        TensorPart("v", (2**63,), (0,), (1,), 0),
        TensorPart("v", (1,) * 65, (0,) * 65, (1,) * 65, 0),
    ],
    ids=[
        "beyond the tensor",
        "before it",
        "negative",
        "of other dimensions",
        "beyond the entry",
        "before the entry",
        "over another part",
        "too large",
        "too many dimensions",
    ],
)
def test_a_part_that_cannot_be_is_refused(part: TensorPart) -> None:
    good = TensorPart("w", (4, 4), (1, 0), (2, 4), 0)
    entries = [TensorEntry("master", "float32", (8,), 0, 32, (good, *more)) for more in ((), (part,))]
    packed = [pack_index(SlotIndex((entry,), b"")) for entry in entries]
    assert unpack_index(packed[0], 64).tensors[0].parts == (good,)
    with pytest.raises(CorruptSlot, match="'master' cannot contain its 2 boxes"):
        unpack_index(packed[1], 64)
