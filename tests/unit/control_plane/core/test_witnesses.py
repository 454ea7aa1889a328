"""What failed loads prove: a wrong source needs two readers, and one reader alone is a suspect."""

from __future__ import annotations

from dataclasses import replace

import pytest

from control_plane.core import witnesses
from control_plane.core.observed.nodes import NodeObserved
from control_plane.core.observed.steps import CheckpointRecord, FailedRead, RefusedSource
from everstep.protocol.agent_messages import MemberPhase, MemberReport, NodeFault
from everstep.protocol.ids import Generation, NodeId, Rank, Step
from everstep.protocol.manifest import ManifestShard
from everstep.protocol.plan import GenerationPlan
from tests.unit.control_plane.core.cluster import fresh
from tests.unit.control_plane.core.test_faults import failed_load

A, B = NodeId("i-a"), NodeId("i-b")


def read(reader: NodeId, generation: int = 2, *, rank: int = 0, step: int = 30, **changes: object) -> FailedRead:
    """Return a report that a node read wrong content in its own memory or in that of another node."""
    found = FailedRead(
        reader=reader,
        generation=Generation(generation),
        at=100.0,
        source=RefusedSource(rank=Rank(rank), origin_generation=Generation(1), step=Step(step)),
        is_mismatch=True,
    )
    return replace(found, **changes)  # type: ignore[arg-type]


def object_read(reader: NodeId, generation: int = 2, *, rank: int = 0) -> FailedRead:
    """Return a report that a node read wrong content in an object of the checkpoint of step 30."""
    found = read(reader, generation, rank=rank, key=f"rank={rank}")
    return replace(found, source=replace(found.source, is_object=True))


def checkpoint(**changes: object) -> CheckpointRecord:
    """Return the record of the checkpoint of step 30, with two shards."""
    shards = tuple(
        ManifestShard(
            rank=Rank(rank),
            key=f"rank={rank}",
            object_bytes=1,
            etag="",
            payload_bytes=1,
            payload_digest="00",
            layout_hash="00",
            origin_generation=Generation(1),
        )
        for rank in range(2)
    )
    found = CheckpointRecord(generation=Generation(1), step=Step(30), bucket="b", shards=shards)
    return replace(found, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("reads", [(read(A),), (read(A), read(A, 3)), (read(A), read(A, step=20), read(B, step=20))])
def test_one_reader_refutes_no_source_of_a_step(reads: tuple[FailedRead, ...]) -> None:
    assert all(source.step == 20 for source in witnesses.refused(reads, ()))
    suspect = witnesses.suspects(reads, ())[0]
    assert (suspect.node_id, suspect.step) == (A, 30)


@pytest.mark.parametrize("rank", [0, 1])
def test_two_readers_of_one_state_agree_and_neither_is_a_suspect(rank: int) -> None:
    reads = (read(A), read(B, rank=rank))
    assert {source.rank for source in witnesses.refused(reads, ())} == {0, rank}
    assert witnesses.suspects(reads, ()) == ()


def test_an_unreachable_source_is_lost_after_two_readers_in_two_loads() -> None:
    first, same_load = read(A, is_mismatch=False), read(B, is_mismatch=False)
    assert witnesses.refused((first, same_load), ()) == ()
    assert witnesses.refused((first, read(A, 3, is_mismatch=False)), ()) == ()
    assert witnesses.refused((first, replace(same_load, generation=Generation(3))), ()) == (first.source,)


def test_a_suspect_is_described_by_its_failed_loads() -> None:
    (suspect,) = witnesses.suspects((read(A), read(A, 3), read(A, 3, rank=1)), ())
    assert (suspect.load_count, suspect.is_mismatch, suspect.is_refuted) == (2, True, False)
    assert {source.rank for source in suspect.sources} == {0, 1}
    (unreachable,) = witnesses.suspects((read(A, is_mismatch=False),), ())
    assert (unreachable.load_count, unreachable.is_mismatch) == (1, False)


def test_a_later_intact_verification_refutes_the_reports_and_proves_the_reader_at_fault() -> None:
    reads = (object_read(A),)
    later, earlier = checkpoint(verified_at=101.0), checkpoint(verified_at=99.0)
    assert [suspect.is_refuted for suspect in witnesses.suspects(reads, (later,))] == [True]
    assert [suspect.is_refuted for suspect in witnesses.suspects(reads, (earlier,))] == [False]
    both = (*reads, object_read(B, 3))
    assert witnesses.refused(both, (later,)) == ()
    assert len(witnesses.refused(both, (earlier,))) == 1
    assert witnesses.doubted(both, (later,)) == ()


def test_one_reader_doubts_a_checkpoint_and_two_readers_agree() -> None:
    kept, damaged = checkpoint(), checkpoint(is_wrong=True)
    (doubted,) = witnesses.doubted((object_read(A),), (kept,))
    assert (doubted.generation, doubted.step, doubted.readers) == (1, 30, (A,))
    (agreed,) = witnesses.doubted((object_read(A), object_read(B, rank=1)), (kept,))
    assert agreed.readers == (A, B)
    assert witnesses.doubted((object_read(A),), (damaged,)) == ()
    assert witnesses.doubted((read(A),), (kept,)) == (), "a slot in memory says nothing about a checkpoint"


def test_an_outage_of_s3_proves_nothing_about_a_checkpoint_and_a_mismatch_does() -> None:
    plan, reports, nodes = failed_load("source_unavailable")
    assert {source.kind for source in plan.ranks[1].sources} == {"local", "peer", "s3"}
    found = witnesses.failed_reads(plan, reports, nodes, 5.0)
    assert {(each.source.is_object, each.is_mismatch, each.at, each.key) for each in found} == {(False, False, 5.0, "")}
    found = witnesses.failed_reads(*failed_load("source_mismatch"), 5.0)
    assert {each.source.is_object for each in found} == {False, True}
    assert {each.source.rank for each in found} == {1}
    assert all(bool(each.key) == each.source.is_object and each.is_mismatch for each in found)


@pytest.mark.parametrize(
    "fault_code",
    [
        "memory_full",
        "agent_error",
        "archive_unavailable",
        "secret_unavailable",
        "requirements_failed",
        "source_refused",
    ],
)
def test_what_has_nothing_to_do_with_shards_proves_nothing(fault_code: str) -> None:
    assert witnesses.failed_reads(*failed_load(fault_code), 0.0) == ()


def test_slots_of_nodes_that_were_away_do_not_count() -> None:
    plan, reports, nodes = failed_load("source_unavailable")
    away = {node_id: replace(node, is_connected=False) for node_id, node in nodes.items()}
    assert witnesses.failed_reads(plan, reports, away, 0.0) == ()


def rebuilding() -> tuple[GenerationPlan, dict[NodeId, MemberReport], dict[NodeId, NodeObserved]]:
    """Return a plan whose second node rebuilds its shard by parity, with the report that its load failed."""
    simulation = fresh(parity=(4, 3))
    job = simulation.jobs[0]
    for _ in range(3):
        simulation.train(job, 1)
    simulation.terminate(simulation.running(job)[1].node_id)
    while job.record.state != "loading":
        simulation.step(0.1)
    assert job.plan is not None
    assert [source.kind for source in job.plan.ranks[1].sources] == ["parity"]
    owner = job.plan.nodes[1].node_id
    fault = NodeFault(code="source_mismatch", message="", is_permanent=False)
    report = MemberReport(
        job=job.spec.job,
        run=job.spec.run,
        generation=job.plan.generation,
        phase=MemberPhase.LOAD_FAILED,
        faults=(fault,),
    )
    return job.plan, {owner: report}, simulation.observe(job).nodes


def test_a_rebuild_that_does_not_verify_counts_while_all_its_survivors_are_connected() -> None:
    plan, reports, nodes = rebuilding()
    (read,) = witnesses.failed_reads(plan, reports, nodes, 0.0)
    assert (read.source.rank, read.source.step, read.source.is_object) == (1, plan.base_step, False)
    survivor = plan.nodes[3].node_id
    away = {**nodes, survivor: replace(nodes[survivor], is_connected=False)}
    assert witnesses.failed_reads(plan, reports, away, 0.0) == ()


@pytest.mark.parametrize(("reads", "is_mismatch"), [((True, False), True), ((False, False), False)])
def test_one_wrong_content_among_failed_loads_is_a_mismatch(reads: tuple[bool, ...], is_mismatch: bool) -> None:
    found = witnesses.suspects([read(A, place, is_mismatch=each) for place, each in enumerate(reads)], ())
    assert [suspect.is_mismatch for suspect in found] == [is_mismatch]


def test_a_suspect_is_refuted_by_one_of_its_reads() -> None:
    """The checkpoint was verified after the first read, and before the second."""
    reads = (object_read(A), replace(object_read(A, 3), at=102.0))
    (suspect,) = witnesses.suspects(reads, (checkpoint(verified_at=101.0),))
    assert suspect.is_refuted
