"""Tests the local paths of a channel's objects, and which inputs the agent removes when the disk is full."""

from __future__ import annotations

from pathlib import PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.core.inputs import HeldFile, Misplaced, check_places, make_room, place_of


@pytest.mark.parametrize(
    ("key", "prefix", "place"),
    [
        ("data/train/a.bin", "data/train/", "a.bin"),
        ("data/train/deep/er/a", "data/train/", "deep/er/a"),
        ("a", "", "a"),
        ("data/..name", "data/", "..name"),
    ],
)
def test_a_key_is_a_path_below_its_prefix(key: str, prefix: str, place: str) -> None:
    assert place_of(key, prefix) == PurePosixPath(place)


@pytest.mark.parametrize("key", ["data/", "data/folder/"])
def test_what_stands_for_a_folder_is_no_file(key: str) -> None:
    assert place_of(key, "data/") is None


@pytest.mark.parametrize("below", ["../x", "a/../../x", "/x", "a//b", "./a", "a\x00b", "a/.", "ü" * 128])
def test_a_key_that_is_no_path_is_refused(below: str) -> None:
    with pytest.raises(Misplaced):
        place_of("data/" + below, "data/")


def test_a_file_is_no_folder() -> None:
    check_places([PurePosixPath("a/b"), PurePosixPath("a/c"), PurePosixPath("ab")])
    with pytest.raises(Misplaced, match="'a' would be a file, and the folder of 'a/b/c'"):
        check_places([PurePosixPath("a/b/c"), PurePosixPath("a")])


def held(name: str, size: int, used_at: float = 0.0, *, is_linked: bool = False) -> HeldFile:
    return HeldFile(name, size, used_at, is_linked)


def test_what_was_not_used_for_longest_goes_first_and_no_more_than_is_needed() -> None:
    there = [held("new", 30, 3.0), held("old", 10, 1.0), held("older", 10, 0.5), held("mine", 10, 0.1, is_linked=True)]
    room = make_room(there, {"wanted": 50}, 95)
    assert (room.dropped, room.lacking_bytes) == (("older", "old"), 0)


def test_what_is_wanted_and_held_counts_once() -> None:
    assert make_room([held("a", 60)], {"a": 60}, 60).dropped == ()


def test_a_cache_that_is_exactly_full_drops_nothing() -> None:
    assert make_room([held("a", 60)], {"b": 40}, 100).dropped == ()


def test_what_does_not_fit_is_told_in_bytes() -> None:
    room = make_room([held("a", 60), held("b", 10, is_linked=True)], {"c": 50}, 40)
    assert (room.dropped, room.lacking_bytes) == (("a",), 20)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 50), st.booleans()), unique_by=lambda each: each[0]),
    st.dictionaries(st.integers(0, 9), st.integers(0, 50)),
    st.integers(0, 200),
)
def test_nothing_that_is_used_goes_and_the_limit_holds(
    there: list[tuple[int, int, bool]], wanted: dict[int, int], limit: int
) -> None:
    files = [held(str(name), size, float(size), is_linked=linked) for name, size, linked in there]
    sizes = {str(name): size for name, size in wanted.items()}
    room = make_room(files, sizes, limit)
    kept = {file.name: file.bytes for file in files if file.name not in room.dropped}
    assert all(file.name in kept for file in files if file.is_linked or file.name in sizes)
    total = sum(kept.values()) + sum(size for name, size in sizes.items() if name not in kept)
    assert max(0, total - limit) == room.lacking_bytes


def test_a_part_of_a_key_has_at_most_255_bytes() -> None:
    assert place_of("p/" + "é" * 127 + "x", "p/") == PurePosixPath("é" * 127 + "x")
    with pytest.raises(Misplaced, match="255 bytes"):
        place_of("p/" + "é" * 128, "p/")
