"""Tests the rebuild of a lost shard from the shards and shares of its stripe's other members.

The stripe has the ranks 0 to 2 on the nodes a to c. In most tests, the node c is lost.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from control_plane.core import recovery
from control_plane.core.observed.steps import GenerationRecord, RefusedSource
from control_plane.core.rebuilding import rebuilds
from everstep.protocol.ids import Generation, NodeId, Rank, Step
from everstep.protocol.parity import Contribution, Rebuild, share_owner
from everstep.protocol.plan import SlotRecord

A, B, C, D = (NodeId(name) for name in "abcd")
NODES = (A, B, C)
STRIPE = (Rank(0), Rank(1), Rank(2))
LINEAGE = (
    GenerationRecord(generation=Generation(1), parent=Generation(0), base_step=Step(0), world_size=3, was_started=True),
)
WORLDS = recovery.worlds_of(LINEAGE)
Inventories = dict[NodeId, tuple[SlotRecord, ...]]


def digest(rank: int, step: int) -> bytes:
    return bytes([rank % 256, step]) + bytes(14)


def contribution(rank: int, step: int, **changes: object) -> Contribution:
    found = Contribution(
        rank=Rank(rank),
        payload_bytes=100 + rank,
        digest=digest(rank, step),
        layout_hash=b"layout",
        index_offset=90,
        index_bytes=10,
    )
    return msgspec.structs.replace(found, **changes)


def shard(rank: int, step: int) -> SlotRecord:
    return SlotRecord(
        owner_rank=Rank(rank),
        origin_generation=Generation(1),
        step=Step(step),
        payload_bytes=100 + rank,
        digest=digest(rank, step),
        layout_hash=b"layout",
    )


def share(holder: int, step: int, *contributions: Contribution) -> SlotRecord:
    named = contributions or tuple(contribution(rank, step) for rank in STRIPE if rank != holder)
    return SlotRecord(
        owner_rank=share_owner(Rank(holder)),
        origin_generation=Generation(1),
        step=Step(step),
        payload_bytes=60,
        digest=bytes([99, holder, step]),
        layout_hash=bytes(16),
        contributions=named,
    )


def held(*steps: int, nodes: tuple[NodeId, ...] = (A, B)) -> Inventories:
    """Return the inventories of nodes, each of which holds its own shard and its share at each of the steps."""
    return {
        node: tuple(slot for step in steps for slot in (shard(rank, step), share(rank, step)))
        for rank, node in enumerate(NODES)
        if node in nodes
    }


def survey(inventories: Inventories, **changes: object) -> recovery.Survey:
    values: dict[str, object] = {
        "owners": [A, B, D],
        "inventories": inventories,
        "path": recovery.path_of(LINEAGE, Generation(1)),
        "worlds": WORLDS,
    }
    return recovery.Survey(**{**values, **changes})  # type: ignore[arg-type]


def found(inventories: Inventories) -> list[Rebuild]:
    return [
        rebuild for _, rebuild in rebuilds([(n, slot) for n, slots in inventories.items() for slot in slots], WORLDS)
    ]


def test_a_plan_names_the_lost_shard_and_the_survivors() -> None:
    restore = recovery.choose(survey(held(7, 8)))
    assert (restore.base_step, restore.farthest, restore.forgotten) == (8, "parity", ())
    assert [source.kind for sources in restore.sources for source in sources] == ["local", "local", "parity"]
    (source,) = restore.sources[2]
    assert (source.digest, source.payload_bytes, source.node_id) == (digest(2, 8), 102, None)
    assert source.rebuild is not None
    assert (source.rebuild.lost, source.rebuild.stripe) == (contribution(2, 8), STRIPE)
    first = source.rebuild.survivors[0]
    assert (first.rank, first.node_id, first.shard_bytes, first.share_bytes) == (0, A, 100, 60)
    assert (first.shard_digest, first.share_digest) == (digest(0, 8), bytes([99, 0, 8]))
    assert [survivor.node_id for survivor in source.rebuild.survivors] == [A, B]


def test_the_nodes_keep_the_shares_of_the_base() -> None:
    restore = recovery.choose(survey(held(7, 8), committed=Step(8)))
    for rank, node in enumerate((A, B)):
        assert [(each.owner_rank, each.step) for each in restore.keep[node]] == [
            *((rank, step) for step in (7, 8)),
            *((share_owner(Rank(rank)), step) for step in (7, 8)),
        ]


def test_a_node_without_a_share_of_the_base_has_a_free_slot_for_it() -> None:
    inventories = held(7, 8, nodes=NODES)
    inventories[A] = (shard(0, 8), shard(0, 7), share(0, 7), share(0, 6))
    restore = recovery.choose(survey(inventories, owners=NODES, committed=Step(7)))
    assert restore.base_step == 8
    assert [(each.owner_rank, each.step) for each in restore.keep[A]] == [(0, 7), (0, 8), (share_owner(Rank(0)), 7)]


@pytest.mark.parametrize(
    ("shared", "unshared", "base"),
    [
        pytest.param((8, 9), (), 9, id="every share of the newest step is in memory"),
        pytest.param((8,), (9,), 8, id="shares of the newest step are missing, and memory holds C"),
        pytest.param((7,), (8, 9), 8, id="only a step older than C has shares, and memory holds C"),
        pytest.param((7,), (9,), 9, id="only a step older than C has shares, and C is lost"),
    ],
)
def test_a_relayout_never_goes_back_behind_the_committed_step(
    shared: tuple[int, ...], unshared: tuple[int, ...], base: int
) -> None:
    """Step 8 is committed (C). After a relayout, the job restores C or a newer step, whether or not it has shares."""
    inventories = {
        node: (*slots, *(shard(rank, step) for step in unshared))
        for rank, (node, slots) in enumerate(held(*shared, nodes=NODES).items())
    }
    restore = recovery.choose(survey(inventories, owners=[A, B], committed=Step(8)))
    assert restore.relayout is not None
    assert restore.base_step == base


def test_a_shard_in_memory_is_preferred_to_its_rebuild() -> None:
    inventories = {**held(8), D: (shard(2, 8),)}
    assert [source.kind for source in recovery.choose(survey(inventories)).sources[2]] == ["local", "parity"]
    assert found(inventories) == []


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({B: (shard(1, 8),)}, id="a share is missing"),
        pytest.param({B: (share(1, 8),)}, id="a second shard is missing"),
        pytest.param({B: ()}, id="a second node is lost"),
        pytest.param({B: (shard(1, 8), share(1, 7))}, id="a share has an older step"),
        pytest.param(
            {B: (shard(1, 8), share(1, 8, contribution(0, 8), contribution(2, 8, digest=b"other")))},
            id="the shares name different lost shards",
        ),
        pytest.param(
            {B: (shard(1, 8), share(1, 8, contribution(0, 8), contribution(2, 8, index_bytes=11)))},
            id="the shares name different indices of the lost shard",
        ),
        pytest.param(
            {B: (shard(1, 8), share(1, 8, contribution(0, 8, digest=b"other"), contribution(2, 8)))},
            id="a share names another shard of a survivor",
        ),
        pytest.param(
            {B: (shard(1, 8), share(1, 8, contribution(0, 8, payload_bytes=1), contribution(2, 8)))},
            id="a share names another size of a survivor's shard",
        ),
        pytest.param({B: (shard(1, 8), share(1, 8, contribution(0, 8)))}, id="a share names another stripe"),
        pytest.param({B: (shard(1, 8), msgspec.structs.replace(share(1, 8), contributions=()))}, id="a damaged index"),
        pytest.param(
            {B: (shard(1, 8), share(1, 8, contribution(0, 8), contribution(2, 8), contribution(2, 8)))},
            id="a rank is named twice",
        ),
        pytest.param(
            {B: (shard(1, 8), share(1, 8, contribution(0, 8), contribution(1, 8), contribution(2, 8)))},
            id="a share names its own holder",
        ),
        pytest.param({B: (share(1, 8),), D: (shard(1, 8),)}, id="shard and share are on different nodes"),
    ],
)
def test_nothing_is_rebuilt(changed: Inventories) -> None:
    inventories = {**held(7, 8), **changed}
    assert [rebuild.lost for rebuild in found(inventories) if rebuild.lost.digest == digest(2, 8)] == []
    assert recovery.choose(survey(inventories)).base_step < 8


@pytest.mark.parametrize("rank", [3, -1])
def test_ranks_that_the_generation_does_not_have_are_ignored(rank: int) -> None:
    inventories = {
        node: (shard(holder, 8), share(holder, 8, *(contribution(each, 8) for each in (0, 1, rank) if each != holder)))
        for holder, node in enumerate((A, B))
    }
    assert found(inventories) == []


def test_an_older_step_is_rebuilt_if_the_newest_cannot() -> None:
    inventories = held(7, 8)
    inventories[B] = (shard(1, 8), shard(1, 7), share(1, 7))
    assert recovery.choose(survey(inventories)).base_step == 7


def refused(rank: int, step: int = 8) -> RefusedSource:
    return RefusedSource(rank=Rank(rank), origin_generation=Generation(1), step=Step(step))


@pytest.mark.parametrize("rank", [0, 2])
def test_a_refused_shard_is_neither_rebuilt_nor_used(rank: int) -> None:
    assert recovery.choose(survey(held(7, 8), refused=[refused(rank)])).base_step == 7


def test_a_share_beyond_the_branch_rebuilds_nothing() -> None:
    branch = GenerationRecord(
        generation=Generation(2), parent=Generation(1), base_step=Step(7), world_size=3, was_started=True
    )
    lineage = (*LINEAGE, branch)
    path, worlds = recovery.path_of(lineage, Generation(2)), recovery.worlds_of(lineage)
    assert recovery.choose(survey(held(7, 8), path=path, worlds=worlds)).base_step == 7


def test_a_restore_with_another_number_of_ranks_rebuilds_the_lost_shard() -> None:
    restore = recovery.choose(survey(held(8), owners=[A, B]))
    assert (restore.base_step, restore.sources) == (8, ((), ()))
    assert restore.relayout is not None
    assert [[source.kind for source in sources] for sources in restore.relayout.shards] == [
        ["peer"],
        ["peer"],
        ["parity"],
    ]


def test_each_shard_of_a_whole_stripe_has_its_rebuild_as_second_source() -> None:
    restore = recovery.choose(survey(held(7, 8, nodes=NODES), owners=NODES))
    for rank, sources in enumerate(restore.sources):
        assert [source.kind for source in sources] == ["local", "parity"]
        rebuild = sources[1].rebuild
        assert rebuild is not None
        assert (rebuild.lost, sources[1].step) == (contribution(rank, 8), 8)
        assert [survivor.rank for survivor in rebuild.survivors] == [other for other in STRIPE if other != rank]


def test_shares_that_name_another_shard_are_no_second_source() -> None:
    inventories = held(8, nodes=NODES)
    inventories[C] = (msgspec.structs.replace(shard(2, 8), digest=bytes(16)), share(2, 8))
    restore = recovery.choose(survey(inventories, owners=NODES))
    assert [source.kind for source in restore.sources[2]] == ["local"]


def test_a_lost_rank_that_can_be_rebuilt_is_not_forgotten() -> None:
    assert recovery.choose(survey(held(8))).forgotten == ()
    assert recovery.choose(survey({**held(8), B: (shard(1, 8),)})).forgotten == (2,)


@pytest.mark.parametrize("change", [lambda share: share, lambda share: msgspec.structs.replace(share, digest=b"x")])
def test_a_second_share_on_another_node_changes_nothing(change: Callable[[SlotRecord], SlotRecord]) -> None:
    inventories = {**held(8), D: (change(share(0, 8)),)}
    (rebuild,) = found(inventories)
    assert [survivor.node_id for survivor in rebuild.survivors] == [A, B]
