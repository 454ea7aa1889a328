from __future__ import annotations

import ctypes
import mmap

import pytest

from everstep.protocol.pages import populate, prefer_huge


def address(mapping: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


@pytest.mark.parametrize("is_written", [True, False])
@pytest.mark.parametrize("begin", [0, 100])
def test_a_populated_range_is_resident_and_unchanged(is_written: bool, begin: int) -> None:
    size = 5 * mmap.PAGESIZE
    mapping = mmap.mmap(-1, size)
    mapping[:3] = b"abc"
    assert populate(address(mapping) + begin, size - begin, is_written=is_written, piece_bytes=2 * mmap.PAGESIZE)
    resident = (ctypes.c_ubyte * 5)()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address(mapping)), ctypes.c_size_t(size), resident) == 0
    assert [page & 1 for page in resident] == [1] * 5
    assert mapping[:4] == b"abc\0"


def test_a_range_that_is_no_mapping_is_not_given_pages() -> None:
    assert not populate(0, mmap.PAGESIZE, is_written=True)
    assert not prefer_huge(0, mmap.PAGESIZE)
