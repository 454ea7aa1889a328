from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.core import recovery
from control_plane.core.database_restore import (
    NUMBERS_END,
    BackedUpRun,
    Place,
    StoredRun,
    first_event_id,
    first_number,
    is_in_place,
    issued_number,
    reconcile,
)
from control_plane.core.observed.steps import GenerationRecord
from control_plane.errors import ImplausibleClock
from everstep.protocol.ids import Generation, JobName, Rank, RunId, Step
from everstep.protocol.manifest import MANIFEST_VERSION, CheckpointManifest, ManifestShard, SharedObject

RUN = RunId("a" * 32)
FOLDER = f"k/run={RUN}/"


def manifest(generation: int, step: int, chain: list[tuple[int, int]], ranks: int = 2) -> CheckpointManifest:
    place = f"{FOLDER}gen={generation}/step={step}/"
    shards = [
        ManifestShard(
            rank=Rank(rank),
            key=f"{place}u/rank={rank}.safetensors",
            object_bytes=1,
            etag="",
            payload_bytes=1,
            payload_digest="00",
            layout_hash="00",
            origin_generation=Generation(generation),
        )
        for rank in range(ranks)
    ]
    return CheckpointManifest(
        version=MANIFEST_VERSION,
        job=JobName("gpt"),
        run=RUN,
        generation=Generation(generation),
        parent_chain=tuple((Generation(number), Step(base)) for number, base in chain),
        step=Step(step),
        shards=tuple(shards),
    )


def place(generation: int, step: int) -> Place:
    return Generation(generation), Step(step)


def stored(*manifests: CheckpointManifest) -> StoredRun:
    return StoredRun(manifests=manifests, present={place(each.generation, each.step) for each in manifests})


@given(
    issued=st.integers(0, 1_000),
    lives=st.lists(st.tuples(st.integers(1, 10_000), st.integers(1, 50)), min_size=1, max_size=8),
    start=st.integers(1_700_000_000, 2_000_000_000),
)
def test_no_restore_of_one_backup_issues_a_number_of_another(
    issued: int, lives: list[tuple[int, int]], start: int
) -> None:
    """If one backup is restored several times, the generations after each restore have numbers of their own.

    Each entry of `lives` has the seconds and the launches until the next restore. A job launches at most once a second.
    """
    now, used = float(start), set(range(1, issued + 1))
    for seconds, launches in lives:
        highest = issued_number(Generation(issued), first_number(now, newest_time=start))
        numbers = set(range(highest + 1, highest + 1 + min(launches, seconds)))
        assert not numbers & used
        used |= numbers
        now += seconds + 1


@given(st.integers(0, NUMBERS_END - 1), st.integers(0, NUMBERS_END - 1))
def test_a_number_that_was_issued_is_never_lowered(issued: int, now: int) -> None:
    assert issued_number(Generation(issued), first_number(float(now), newest_time=0.0)) >= max(issued, now)


def test_a_clock_before_the_backup_or_after_the_last_number_is_refused() -> None:
    assert first_number(1_000.0, newest_time=1_060.0) == 1_000
    with pytest.raises(ImplausibleClock, match=r"3600 s behind the newest time in the backup.*Synchronise the clock"):
        first_number(1_000.0, newest_time=4_600.0)
    assert first_number(NUMBERS_END - 1.0, newest_time=0.0) == NUMBERS_END - 1
    with pytest.raises(ImplausibleClock, match="after 2106"):
        first_number(float(NUMBERS_END), newest_time=0.0)


def test_event_ids_continue_above_the_ids_of_every_earlier_life() -> None:
    assert first_event_id(newest=7, now=1_000.5) == 1_000_500
    assert first_event_id(newest=2_000_000, now=1_000.5) == 2_000_001


def test_the_manifests_show_the_generations_and_checkpoints_that_the_backup_lacks() -> None:
    """The manifests in S3 give back the generations and checkpoints that were made after the backup.

    The backup has generations 1 and 2. Generation 3 made no checkpoint, and generation 4 made two, of which one is
    deleted.
    """
    chain = [(4, 30), (3, 20), (2, 10), (1, 0)]
    found = reconcile(
        stored(manifest(2, 20, chain[2:]), manifest(4, 40, chain), manifest(4, 50, chain)),
        BackedUpRun(
            generations={Generation(1), Generation(2)},
            complete={place(1, 10), place(2, 20)},
            deleted={place(4, 40)},
        ),
    )
    assert [(each.generation, each.parent, each.base_step, each.world_size) for each in found.generations] == [
        (3, 2, 20, 0),
        (4, 3, 30, 2),
    ]
    assert all(each.was_started for each in found.generations)
    assert [(each.generation, each.step) for each in found.checkpoints] == [(4, 50)]
    assert found.missing == ((1, 10),)


def test_marks_decide_about_the_trash_and_a_pin_wins_over_a_deletion() -> None:
    backup = BackedUpRun(
        generations={Generation(1)},
        complete={place(1, step) for step in range(10, 90, 10)},
        pinned={place(1, 10), place(1, 20)},
        trashed={place(1, 30), place(1, 40), place(1, 50)},
    )
    in_s3 = StoredRun(
        manifests=(),
        present={place(1, step) for step in (10, 20, 30, 40, 50, 60, 70)},
        pinned={place(1, 20), place(1, 50), place(1, 60), place(1, 80)},
        trashed={place(1, step) for step in (10, 20, 40, 50, 60, 70, 80)},
    )
    found = reconcile(in_s3, backup)
    assert found.pinned == (place(1, 50), place(1, 60)), "20 is pinned already, and S3 has no manifest of 80"
    assert found.trashed == (place(1, 70),), "10 is pinned by a version that wrote no marks"
    assert found.undeleted == (place(1, 30), place(1, 50))
    assert found.missing == (place(1, 80),)


def test_an_unreadable_manifest_is_not_a_missing_one() -> None:
    backup = BackedUpRun(generations={Generation(1)}, complete={place(1, 10)})
    found = reconcile(StoredRun(manifests=(), present={place(1, 10), place(1, 20)}), backup)
    assert (found.missing, found.checkpoints, found.unreadable) == ((), (), (place(1, 20),))


def test_the_backups_own_generations_stay_as_they_are() -> None:
    backup = BackedUpRun(generations={Generation(1), Generation(2)}, complete=frozenset())
    found = reconcile(stored(manifest(2, 20, [(2, 15), (1, 0)])), backup)
    assert found.generations == ()


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=8), st.integers(0, 8))
def test_with_the_manifests_the_history_is_the_one_that_the_backup_misses(
    launches: list[tuple[int, bool]], backup_at: int
) -> None:
    """If the newest generation made a checkpoint, the restored history has the same generations as the real history."""
    step, lineage, manifests = 0, [], []
    for number, (steps, has_checkpoint) in enumerate(launches, 1):
        lineage.append(
            GenerationRecord(
                generation=Generation(number),
                parent=Generation(number - 1),
                base_step=Step(step),
                world_size=2,
                was_started=True,
            )
        )
        step += steps
        if has_checkpoint or number == len(launches):
            chain = [(each.generation, each.base_step) for each in reversed(lineage)]
            manifests.append(manifest(number, step, chain))
    known = lineage[:backup_at]
    backup = BackedUpRun(generations={each.generation for each in known}, complete=frozenset())
    found = reconcile(stored(*manifests), backup)
    restored = [*known, *found.generations]
    newest = recovery.newest_started(restored)
    assert recovery.path_of(restored, newest) == recovery.path_of(lineage, lineage[-1].generation)
    made = {each.generation for each in manifests}
    assert [replace(each, world_size=2) for each in restored] == lineage
    assert all(each.world_size == 2 for each in restored if each in known or each.generation in made)


def test_a_manifest_that_names_objects_of_another_run_is_out_of_place() -> None:
    good = manifest(4, 50, [(4, 0)])
    key = f"{FOLDER}gen=4/step=50/manifest.json"
    assert is_in_place(good, FOLDER, key)
    assert not is_in_place(good, FOLDER, f"{FOLDER}gen=4/step=51/manifest.json")
    assert not is_in_place(good, f"k/run={'b' * 32}/", key.replace("a" * 32, "b" * 32))
    other = msgspec.structs.replace(good.shards[0], key="k/run=other/gen=4/step=50/u/rank=0.safetensors")
    assert not is_in_place(msgspec.structs.replace(good, shards=(other, good.shards[1])), FOLDER, key)
    shared = (SharedObject(key="k/run=other/frozen/0.safetensors", object_bytes=1, sha256=""),)
    assert not is_in_place(msgspec.structs.replace(good, frozen=shared), FOLDER, key)
    assert not is_in_place(msgspec.structs.replace(good, replicated=shared), FOLDER, key)
    huge = manifest(NUMBERS_END, 50, [(NUMBERS_END, 0)])
    assert not is_in_place(huge, FOLDER, f"{FOLDER}gen={NUMBERS_END}/step=50/manifest.json")
