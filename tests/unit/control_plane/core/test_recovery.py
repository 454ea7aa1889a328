"""Tests from which step a recovery resumes, and where it loads each shard.

In these tests, generation 1 ran to step 15. Generation 2 resumed from step 10 and ran to step 12.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from control_plane.core import recovery
from control_plane.core.observed.steps import CheckpointRecord, GenerationRecord, RefusedSource
from everstep.protocol.ids import Generation, NodeId, Rank, Step
from everstep.protocol.manifest import ManifestShard
from everstep.protocol.plan import SlotRecord

A, B, C, D = (NodeId(name) for name in "abcd")


def link(generation: int, parent: int, base: int, *, world: int = 2, started: bool = True) -> GenerationRecord:
    return GenerationRecord(
        generation=Generation(generation),
        parent=Generation(parent),
        base_step=Step(base),
        world_size=world,
        was_started=started,
    )


LINEAGE = (link(1, 0, 0), link(2, 1, 10))


def slot(rank: int, origin: int, step: int) -> SlotRecord:
    content = bytes([rank, origin, step]) + bytes(13)
    return SlotRecord(
        owner_rank=Rank(rank),
        origin_generation=Generation(origin),
        step=Step(step),
        payload_bytes=1,
        digest=content,
        layout_hash=bytes(16),
    )


def checkpoint(step: int, origin: int, ranks: int = 2) -> CheckpointRecord:
    shards = tuple(
        ManifestShard(
            rank=Rank(rank),
            key=f"k/{step}/{rank}",
            object_bytes=1,
            etag="",
            payload_bytes=1,
            payload_digest=(bytes([rank, origin, step]) + bytes(13)).hex(),
            layout_hash="",
            origin_generation=Generation(origin),
        )
        for rank in range(ranks)
    )
    return CheckpointRecord(generation=Generation(origin), step=Step(step), bucket="b", shards=shards)


def survey(inventories: dict[NodeId, list[SlotRecord]], **changes: object) -> recovery.Survey:
    values: dict[str, object] = {
        "owners": [A, B],
        "inventories": {node: tuple(slots) for node, slots in inventories.items()},
        "path": recovery.path_of(LINEAGE, Generation(2)),
        "worlds": recovery.worlds_of(LINEAGE),
    }
    return recovery.Survey(**{**values, **changes})  # type: ignore[arg-type]


def test_a_path_goes_through_its_ancestors_up_to_where_it_branched_off() -> None:
    path = recovery.path_of((*LINEAGE, link(3, 2, 4), link(4, 3, 8)), Generation(4))
    assert path == {4: recovery.UNBOUNDED, 3: 8, 2: 4, 1: 4}
    assert recovery.path_of(LINEAGE, Generation(0)) == {}


def test_the_parent_is_the_newest_generation_that_may_have_run() -> None:
    assert recovery.newest_started((*LINEAGE, link(3, 2, 12, started=False))) == 2
    assert recovery.newest_started(()) == 0


@pytest.mark.parametrize(("origin", "step", "expected"), [(1, 10, True), (1, 11, False), (2, 11, True), (3, 5, False)])
def test_a_slot_is_on_the_path_up_to_the_branch(origin: int, step: int, expected: bool) -> None:
    assert recovery.is_on_path(recovery.path_of(LINEAGE, Generation(2)), Generation(origin), Step(step)) is expected


def test_the_newest_step_that_every_rank_has_on_some_node() -> None:
    restore = recovery.choose(
        survey({A: [slot(0, 2, 12), slot(0, 2, 11), slot(1, 2, 11)], B: [slot(1, 2, 11), slot(1, 1, 10)]})
    )
    assert restore.base_step == 11
    assert [[source.kind for source in sources] for sources in restore.sources] == [["local"], ["local", "peer"]]
    assert restore.farthest == "local"


def test_abandoned_branches_do_not_count() -> None:
    restore = recovery.choose(survey({A: [slot(0, 1, 13), slot(0, 1, 10)], B: [slot(1, 1, 13), slot(1, 1, 10)]}))
    assert restore.base_step == 10


def test_a_replacement_reads_from_a_peer() -> None:
    restore = recovery.choose(survey({A: [slot(0, 2, 12), slot(1, 2, 12)], B: []}))
    assert restore.base_step == 12
    source = restore.sources[1][0]
    assert (source.kind, source.node_id, source.origin_generation, source.digest) == (
        "peer",
        A,
        2,
        slot(1, 2, 12).digest,
    )
    assert restore.farthest == "peer"


def test_memory_and_s3_may_complete_each_other() -> None:
    restore = recovery.choose(survey({A: [slot(0, 1, 10)], B: []}, checkpoints=(checkpoint(10, 1),)))
    assert restore.base_step == 10
    assert [source.kind for source in restore.sources[0]] == ["local", "s3"]
    assert [source.kind for source in restore.sources[1]] == ["s3"]
    assert restore.farthest == "s3"


def test_a_checkpoint_of_an_abandoned_branch_is_not_used() -> None:
    assert recovery.choose(survey({A: [], B: []}, checkpoints=(checkpoint(13, 1), checkpoint(5, 1)))).base_step == 5


def test_a_checkpoint_of_another_number_of_ranks_is_restored_with_a_relayout() -> None:
    restore = recovery.choose(survey({A: [], B: []}, checkpoints=(checkpoint(5, 1, ranks=3),)))
    assert restore.base_step == 5
    assert restore.sources == ((), ())
    assert restore.relayout is not None
    assert restore.relayout.world_size == 3
    assert [[source.kind for source in sources] for sources in restore.relayout.shards] == [["s3"]] * 3
    assert restore.farthest == "s3"


def test_fewer_nodes_restore_the_memory_of_more_ranks() -> None:
    inventories = {A: [slot(0, 2, 12), slot(2, 2, 12)], B: [slot(1, 2, 12), slot(0, 2, 12)]}
    restore = recovery.choose(survey(inventories, worlds={1: 3, 2: 3}))
    assert restore.base_step == 12
    assert restore.relayout is not None
    found = [[(source.kind, source.node_id) for source in sources] for sources in restore.relayout.shards]
    assert found == [[("peer", A), ("peer", B)], [("peer", B)], [("peer", A)]]


def test_shards_of_two_worlds_do_not_complete_each_other() -> None:
    inventories = {A: [slot(0, 2, 12), slot(0, 1, 10), slot(2, 1, 10)], B: [slot(1, 1, 10)]}
    restore = recovery.choose(survey(inventories, worlds={1: 3, 2: 2}))
    assert restore.base_step == 10
    assert restore.relayout is not None
    assert restore.relayout.world_size == 3


def test_an_equal_number_of_ranks_needs_no_relayout_after_one() -> None:
    restore = recovery.choose(survey({A: [slot(0, 2, 12)], B: [slot(1, 2, 12)]}, worlds={1: 3, 2: 2}))
    assert restore.relayout is None
    assert [sources[0].kind for sources in restore.sources] == ["local", "local"]


def test_of_the_same_step_the_state_of_the_same_number_of_ranks_is_restored() -> None:
    for path, worlds in (
        ({1: Step(10), 2: recovery.UNBOUNDED}, {1: 3, 2: 2}),
        ({1: Step(10), 2: Step(10)}, {1: 1, 2: 2}),
    ):
        stored = (checkpoint(10, 1, ranks=worlds[1]), checkpoint(10, 2, ranks=worlds[2]))
        restore = recovery.choose(survey({A: [], B: []}, path=path, worlds=worlds, checkpoints=stored))
        assert (restore.base_step, restore.relayout) == (10, None)


def test_with_a_relayout_each_shard_has_a_slot_for_the_first_step_of_the_new_generation() -> None:
    inventories = {A: [slot(0, 2, 12), slot(0, 2, 11), slot(2, 2, 12)], B: [slot(1, 2, 12), slot(2, 2, 11)]}
    changes = {"worlds": {1: 3, 2: 3}, "committed": Step(11)}
    assert kept(recovery.choose(survey(inventories, **changes)), A) == [(0, 12), (2, 12)]
    assert kept(recovery.choose(survey(inventories, **changes)), B) == [(1, 12), (2, 11)]
    assert kept(recovery.choose(survey(inventories, slot_count=3, **changes)), A) == [(0, 11), (0, 12), (2, 12)]


def test_earlier_shards_stay_when_a_step_of_the_new_layout_is_not_committed_yet() -> None:
    inventories = {A: [slot(0, 1, 10), slot(2, 1, 10), slot(0, 2, 12)], B: [slot(1, 1, 10), slot(1, 2, 12)]}
    restore = recovery.choose(survey(inventories, worlds={1: 3, 2: 2}))
    assert (restore.base_step, restore.relayout) == (12, None)
    assert kept(restore, A) == [(0, 10), (0, 12), (2, 10)]


def test_what_is_stored_is_the_newest_checkpoint_that_leads_to_the_base() -> None:
    found = survey(
        {A: [], B: []}, checkpoints=(checkpoint(5, 1), checkpoint(13, 1), checkpoint(11, 2), checkpoint(12, 2))
    )
    # Generation 2 resumed from step 10, so it discarded step 13 of generation 1. No launch may start from that step.
    stored = [recovery.stored(found, Step(base)) for base in (4, 5, 10, 11, 12, 20)]
    assert [each.step if each is not None else None for each in stored] == [None, 5, 5, 11, 12, 12]


def test_nothing_left_means_the_scripts_own_state() -> None:
    restore = recovery.choose(survey({A: [slot(0, 2, 12)], B: []}))
    assert restore.base_step == 0
    assert restore.sources == ((), ())
    assert restore.farthest is None


def test_refused_slots_lead_to_s3_or_an_older_step() -> None:
    inventories = {A: [slot(0, 2, 12), slot(0, 2, 11)], B: [slot(1, 2, 12), slot(1, 2, 11)]}
    refused = (RefusedSource(rank=Rank(1), origin_generation=Generation(2), step=Step(12)),)
    assert recovery.choose(survey(inventories, refused=refused)).base_step == 11
    with_object = recovery.choose(survey(inventories, refused=refused, checkpoints=(checkpoint(12, 2),)))
    assert with_object.base_step == 12
    assert [source.kind for source in with_object.sources[1]] == ["s3"]


def kept(restore: recovery.Restore, node: NodeId) -> list[tuple[int, int]]:
    return [(reference.owner_rank, reference.step) for reference in restore.keep[node]]


def test_everything_up_to_the_base_is_kept_until_it_is_committed() -> None:
    restore = recovery.choose(survey({A: [slot(0, 2, 12), slot(0, 2, 11)], B: [slot(1, 2, 11), slot(1, 1, 10)]}))
    assert restore.base_step == 11
    assert kept(restore, A) == [(0, 11)]
    assert kept(restore, B) == [(1, 10), (1, 11)]


def test_a_holder_that_lacks_the_base_frees_the_slot_that_is_not_the_newest_commit() -> None:
    inventories = {A: [slot(0, 2, 12), slot(1, 2, 12)], B: [slot(1, 2, 11), slot(1, 1, 10)]}
    assert kept(recovery.choose(survey(inventories, committed=Step(10))), B) == [(1, 10)]
    assert kept(recovery.choose(survey(inventories, committed=Step(11))), B) == [(1, 11)]
    assert kept(recovery.choose(survey(inventories, committed=Step(11), slot_count=3)), B) == [(1, 10), (1, 11)]


def test_slots_of_abandoned_branches_are_free() -> None:
    restore = recovery.choose(survey({A: [slot(0, 1, 13), slot(0, 1, 10)], B: [slot(1, 1, 10)]}))
    assert kept(restore, A) == [(0, 10)]


def test_a_commit_of_an_abandoned_branch_is_not_the_newest_committed_step() -> None:
    path = recovery.path_of([link(1, 0, 0), link(2, 1, 3)], Generation(2))
    reports = [(Generation(1), Step(3)), (Generation(1), Step(4)), (Generation(7), Step(9))]
    assert recovery.newest_committed(path, Step(2), reports) == 3
    assert recovery.newest_committed(path, Step(2), []) == 2


def test_a_slot_of_an_abandoned_branch_is_not_kept_below_the_base_either() -> None:
    path = recovery.path_of([link(1, 0, 0), link(2, 1, 3)], Generation(2))
    node = NodeId("a")
    inventory = [slot(0, 1, 4), slot(0, 2, 5)]
    restore = recovery.choose(survey({node: inventory}, owners=[node], path=path, worlds={1: 1, 2: 1}))
    assert restore.base_step == 5
    assert kept(restore, node) == [(0, 5)]


def test_the_farthest_of_two_incidents_parts() -> None:
    assert recovery.farther("peer", "local") == "peer"
    assert recovery.farther(None, "local") == "local"
    assert recovery.farther("s3", None) == "s3"
    assert recovery.farther(None, None) is None


def test_a_slot_of_a_rank_that_does_not_exist_is_ignored() -> None:
    found = recovery.choose(survey({A: [slot(0, 1, 10), slot(1, 1, 10), slot(5, 1, 10)]}))
    assert (found.base_step, found.forgotten) == (10, ())


@pytest.mark.parametrize("step", [0, 1])
def test_only_a_step_after_0_needs_sources(step: int) -> None:
    found = recovery.choose(survey({A: [slot(0, 1, step), slot(1, 1, step)]}))
    assert (found.base_step, [len(sources) for sources in found.sources]) == (step, [step, step])


def test_a_shard_in_memory_and_in_s3_is_not_forgotten() -> None:
    found = recovery.choose(survey({A: [slot(0, 1, 10)]}, checkpoints=(checkpoint(10, 1),)))
    assert (found.base_step, found.forgotten) == (10, (1,))


def test_a_checkpoint_with_a_shard_of_an_abandoned_branch_leads_nowhere() -> None:
    mixed = checkpoint(12, 2)
    other = structs.replace(mixed.shards[1], origin_generation=Generation(1))
    found = survey({}, checkpoints=(replace(mixed, shards=(mixed.shards[0], other)),))
    assert recovery.stored(found, Step(12)) is None
    assert recovery.stored(survey({}, checkpoints=(mixed,)), Step(12)) == mixed


def forged(rank: int, origin: int, step: int) -> SlotRecord:
    return structs.replace(slot(rank, origin, step), digest=b"x" * 16)


OWNERS = {Rank(0): A, Rank(1): B}
OF_B = [slot(1, 2, 12), slot(1, 2, 11)]


def sources_of_rank_0(inventories: dict[NodeId, list[SlotRecord]], **changes: object) -> list[tuple[NodeId, bytes]]:
    """Return node and digest of the sources of rank 0."""
    restore = recovery.choose(survey(inventories, **{"former_owners": OWNERS, **changes}))
    assert restore.base_step == 12
    return [(source.node_id or NodeId(""), source.digest) for source in restore.sources[0]]


def test_a_copy_that_differs_from_the_owners_slot_is_no_source() -> None:
    mine = slot(0, 2, 12)
    assert sources_of_rank_0({A: [mine], B: [forged(0, 2, 12), *OF_B]}) == [(A, mine.digest)]


def test_without_the_owner_the_content_that_most_nodes_have_is_restored() -> None:
    copy = slot(0, 2, 12)
    found = sources_of_rank_0({B: [forged(0, 2, 12), *OF_B], C: [copy], D: [copy]}, owners=[C, B])
    assert {digest for _, digest in found} == {copy.digest}


def test_after_one_content_is_refused_another_one_is_restored() -> None:
    copy, wrong = slot(0, 2, 12), forged(0, 2, 12)
    refused = RefusedSource(rank=Rank(0), origin_generation=Generation(2), step=Step(12), digest=wrong.digest)
    inventories = {B: [wrong, *OF_B], C: [copy]}
    assert sources_of_rank_0(inventories, owners=[D, B], refused=(refused,)) == [(C, copy.digest)]


def test_a_step_that_only_one_node_names_needs_the_consent_of_each_owner() -> None:
    invented = {A: [slot(0, 2, 12)], B: [slot(0, 2, 13), slot(1, 2, 13), *OF_B]}
    assert recovery.choose(survey(invented, former_owners=OWNERS, supported=Step(12))).base_step == 12
    without_owner = {C: [], B: invented[B]}
    assert recovery.choose(survey(without_owner, former_owners=OWNERS, supported=Step(12))).base_step == 13


def test_an_owner_that_lost_its_slot_does_not_hide_a_step_that_two_nodes_name() -> None:
    inventories = {A: [slot(0, 2, 11)], B: [slot(0, 2, 12), *OF_B]}
    assert recovery.choose(survey(inventories, former_owners=OWNERS, supported=Step(12))).base_step == 12


def test_no_step_above_the_limit_is_restored() -> None:
    inventories = {A: [slot(0, 2, 12), slot(0, 2, 11)], B: [slot(1, 2, 12), slot(1, 2, 11)]}
    assert recovery.choose(survey(inventories, limit=Step(11))).base_step == 11


def test_a_checkpoint_above_the_limit_is_restored() -> None:
    stored = checkpoint(12, 2)
    assert recovery.choose(survey({A: [], B: []}, limit=Step(11), checkpoints=(stored,))).base_step == 12
