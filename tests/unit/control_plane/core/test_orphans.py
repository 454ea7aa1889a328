"""Tests which stored objects are orphans.

An orphan is an uploaded shard of an ended generation that no checkpoint names.
"""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from control_plane.core.orphans import KEPT_SECONDS, ListedObject, orphans
from everstep.protocol.ids import Generation

FOLDER = "jobs/gpt/checkpoints/run=1/"
NOW = 10 * KEPT_SECONDS


def key(generation: int, step: int, name: str = "u/rank=0.safetensors") -> str:
    return f"{FOLDER}gen={generation}/step={step}/{name}"


def orphan_keys(
    objects: list[ListedObject],
    named: Mapping[tuple[int, int], frozenset[str] | None],
    *,
    ended_before: int,
    frozen: frozenset[str] | None = None,
    generations: frozenset[int] = frozenset(range(1, 9)),
) -> list[str]:
    found = orphans(
        objects,
        FOLDER,
        named,
        generations=generations,
        frozen=frozen,
        ended_before=Generation(ended_before),
        now=NOW,
    )
    return [each.key for each in found]


def test_only_old_unnamed_shards_of_ended_generations_are_orphans() -> None:
    named = {(1, 5): frozenset({key(1, 5), key(1, 5, "manifest.json")}), (1, 6): None}
    young = NOW - KEPT_SECONDS + 1
    stored = [
        ListedObject(key(1, 4), 0.0),
        ListedObject(key(1, 5), 0.0),
        ListedObject(key(1, 5, "manifest.json"), 0.0),
        ListedObject(key(1, 5, "again/rank=0.safetensors"), 0.0),
        ListedObject(key(1, 6), 0.0),  # another process is already deleting this checkpoint
        ListedObject(key(1, 7), young),
        ListedObject(key(1, 9), NOW - KEPT_SECONDS),
        ListedObject(key(2, 8), 0.0),  # the newest generation may still complete this upload
        ListedObject(f"{FOLDER}notes.txt", 0.0),
        ListedObject("jobs/gpt/checkpoints/run=10/gen=1/step=4/u/rank=0.safetensors", 0.0),
    ]
    found = orphan_keys(stored, named, ended_before=2)
    assert found == [key(1, 4), key(1, 5, "again/rank=0.safetensors"), key(1, 9)]


def test_a_frozen_object_is_an_orphan_only_after_the_end_of_its_run() -> None:
    needed, unneeded, young = (f"{FOLDER}frozen/{digit * 64}.safetensors" for digit in "abc")
    stored = [
        ListedObject(needed, 0.0),
        ListedObject(unneeded, 0.0),
        ListedObject(young, NOW - KEPT_SECONDS + 1),
        ListedObject(f"{FOLDER}frozen/notes.txt", 0.0),
    ]
    assert orphan_keys(stored, {}, ended_before=9) == []
    assert orphan_keys(stored, {}, ended_before=9, frozen=frozenset({needed})) == [unneeded]


def test_what_a_restored_database_lacks_is_never_an_orphan() -> None:
    """The database has generation 1 with no checkpoint. Generations 1 and 2 made checkpoints after its backup."""
    unneeded = f"{FOLDER}frozen/{'a' * 64}.safetensors"
    lost_checkpoint = [ListedObject(key(1, 7), 0.0), ListedObject(key(1, 7, "manifest.json"), 0.0)]
    lost_generation = [ListedObject(key(2, 8), 0.0)]
    for lost in (lost_checkpoint, lost_generation):
        stored = [ListedObject(unneeded, 0.0), ListedObject(key(1, 4), 0.0), *lost]
        found = orphan_keys(stored, {}, ended_before=9, frozen=frozenset(), generations=frozenset({1}))
        assert found == [key(1, 4)]


PLACES = st.tuples(st.integers(1, 4), st.integers(1, 5))


@given(
    st.lists(st.tuples(PLACES, st.sampled_from(["u/0", "u/1", "v/0"]), st.floats(0.0, NOW)), max_size=30),
    st.dictionaries(PLACES, st.one_of(st.none(), st.sets(st.sampled_from(["u/0", "u/1"])))),
    st.integers(1, 5),
)
def test_no_object_of_a_checkpoint_or_of_a_running_generation_is_an_orphan(
    stored: list[tuple[tuple[int, int], str, float]], kept: dict[tuple[int, int], set[str] | None], newest: int
) -> None:
    named = {
        place: None if names is None else frozenset(key(*place, name) for name in names)
        for place, names in kept.items()
    }
    objects = [ListedObject(key(*place, name), at) for place, name, at in stored]
    found = {*orphan_keys(objects, named, ended_before=newest)}
    for place, name, _ in stored:
        is_used = place in named and (named[place] is None or key(*place, name) in (named[place] or ()))
        if is_used or place[0] >= newest:
            assert key(*place, name) not in found
