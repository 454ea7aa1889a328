"""Tests values by node or rank: which are stored, which remain when points are joined, and how old bytes decode."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.core.breakdowns import Breakdown, averaged, broken_down, decoded, encoded
from everstep.protocol.agent_messages import MAX_SERIES

POINTS = b"packed points"
(MAX_FLOAT32,) = struct.unpack("<f", bytes.fromhex("ffff7f7f"))
keys = st.integers(0, 99).map(str)
values = st.floats(-1e9, 1e9, width=32)
few_keys = st.integers(0, MAX_SERIES - 1).map(str)
"""At most `MAX_SERIES` different keys, because stored points keep no more."""
breakdowns = st.none() | st.dictionaries(few_keys, values, min_size=2, max_size=9).map(broken_down)


def rows(found: Sequence[Breakdown | None]) -> list[dict[str, float] | None]:
    return [each.values if each is not None else None for each in found]


@given(st.dictionaries(keys, st.floats(), max_size=80))
def test_two_to_64_finite_values_are_stored(found: dict[str, float]) -> None:
    finite = {key: value for key, value in found.items() if abs(value) <= MAX_FLOAT32}
    made = broken_down(found)
    if not 2 <= len(finite) <= MAX_SERIES:
        assert made is None
    else:
        assert made is not None
        assert made.values == pytest.approx(finite, rel=1e-6, abs=1e-30)


@given(st.lists(breakdowns, max_size=20))
def test_breakdowns_are_read_as_they_were_stored(found: list[Breakdown | None]) -> None:
    data = encoded(found, POINTS)
    assert rows(decoded(data, POINTS, len(found))) == rows(found)
    assert (data is None) == (not any(found))


@given(st.lists(st.tuples(st.dictionaries(st.sampled_from("abc"), values, min_size=2), st.integers(1, 9)), min_size=1))
def test_a_joined_breakdown_has_the_weighted_mean_of_each_key(found: list[tuple[dict[str, float], int]]) -> None:
    joined = averaged([(None, 3), *((broken_down(row), weight) for row, weight in found)])
    assert joined is not None
    for key, mean in joined.values.items():
        of_key = [(row[key], weight) for row, weight in found if key in row]
        expected = sum(value * weight for value, weight in of_key) / sum(weight for _, weight in of_key)
        assert mean == pytest.approx(expected, rel=1e-5, abs=1e3)
    assert joined.values.keys() == {key for row, _ in found for key in row}


def test_points_without_breakdowns_join_to_a_point_without_one() -> None:
    assert averaged([(None, 1), (None, 2)]) is None


def test_of_more_than_64_keys_the_newest_are_kept() -> None:
    older, newer = (broken_down({f"i-{n:03}": 1.0 for n in range(first, first + 40)}) for first in (0, 40))
    joined = averaged([(older, 1), (newer, 1)])
    assert joined is not None
    assert len(joined.values) == MAX_SERIES
    assert joined.values.keys() > {f"i-{n:03}" for n in range(40, 80)}
    first, second = decoded(encoded([older, newer], POINTS), POINTS, 2)
    assert first is not None
    assert second is not None
    assert (len(first.values), len(second.values)) == (MAX_SERIES - 40, 40)


def test_breakdowns_of_points_that_another_server_changed_are_dropped() -> None:
    """Breakdowns are dropped if their points have changed since the breakdowns were stored.

    A server of the previous version, for example, changes points and leaves the column of breakdowns as it is.
    """
    data = encoded([broken_down({"i-1": 1.0, "i-2": 2.0})], POINTS)
    assert decoded(data, b"other points", 1) == (None,)
    assert decoded(data, POINTS, 2) == (None, None)


@pytest.mark.parametrize("change", [b"\x02", b"\x00"])
def test_bytes_of_another_version_count_as_none(change: bytes) -> None:
    data = encoded([broken_down({"i-1": 1.0, "i-2": 2.0})], POINTS)
    assert data is not None
    assert decoded(change + data[1:], POINTS, 1) == (None,)


@given(st.binary(max_size=60), st.integers(0, 4))
def test_any_bytes_decode_to_one_entry_per_point(data: bytes, count: int) -> None:
    assert len(decoded(data, POINTS, count)) == count
    head = struct.pack("<BHII", 1, len(data) % 3, len(data) % 5, zlib.crc32(POINTS))
    assert len(decoded(head + data, POINTS, count)) == count


def test_the_layout_does_not_change() -> None:
    """A stored chunk has exactly these bytes, because every later version must be able to read it."""
    data = encoded([broken_down({"0": 1.5, "1": -2.0}), None], POINTS)
    stored = "010200030000006369d6fd300a310000c03f000000c00000c07f0000c07f"
    assert data == bytes.fromhex(stored)
    (first, second) = decoded(bytes.fromhex(stored), POINTS, 2)
    assert (first and first.values, second) == ({"0": 1.5, "1": -2.0}, None)
    assert math.isnan(struct.unpack("<f", data[-4:])[0])
