"""Tests the conversion between records of decisions and rows of the database."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from sqlalchemy import update

from control_plane.core.observed.facts import Recorded, ShardLoss, ShardsLost
from control_plane.core.observed.incidents import FailureRecord, IncidentRecord, RestartsRanks
from control_plane.core.observed.jobs import AgentSilence, AwaitedCommit, Exclusion
from control_plane.core.observed.nodes import Cause
from control_plane.core.observed.reasons import JobFact, JobNote
from control_plane.core.observed.steps import FailedRead, RefusedSource
from control_plane.core.states import IncidentState, JobState
from control_plane.db import jobs
from control_plane.db.models import JobRow
from control_plane.loop import records
from everstep.protocol.agent_messages import ExitClass
from everstep.protocol.ids import Generation, NodeId, Rank, Step
from everstep.protocol.limits import MAX_STEP
from everstep.protocol.plan import InputChannel, ObjectReference
from tests.sim.world import World


@pytest.mark.covers("CreateTrainingJob.Secrets", "CreateTrainingJob.RoleArn", "CreateTrainingJob.Requirements")
async def test_what_a_job_needs_is_in_its_plans(world: World) -> None:
    world.submit()
    job = world.job()
    inputs = (jobs.JobInput(name="a", uri="s3://b/set/one"), jobs.JobInput(name="b", directory="/here"))
    needs = {
        "inputs": inputs,
        "secrets": {"A": "ssm:/a"},
        "requirements": "r.txt",
        "role_arn": "arn:x",
        "arguments": ["-x"],
    }
    script = records.job_spec(replace(job, spec=replace(job.spec, **needs))).script
    assert script.role_arn == "arn:x"
    assert script.requirements == "r.txt"
    assert script.arguments == ("-x",)
    assert script.secrets == {"A": "ssm:/a"}
    assert script.inputs == (
        InputChannel(name="a", prefix=ObjectReference(bucket="b", key="set/one")),
        InputChannel(name="b", directory="/here"),
    )


async def test_a_job_record_survives_the_database(world: World) -> None:
    run = world.submit()
    record = records.job_record(world.job())
    full = replace(
        record,
        reason="why",
        state_since=1.5,
        started_at=2.0,
        generation=Generation(3),
        issued_generation=Generation(4),
        base_step=Step(5),
        committed=Step(6),
        proposed=Step(7),
        boundary=Step(8),
        max_boundary=Step(9),
        committed_at=10.0,
        progress_at=11.0,
        asked=((NodeId("i-1"), 12.0),),
        failures=(
            FailureRecord(
                generation=Generation(1),
                step=Step(2),
                exit_class=ExitClass.ERROR,
                code=1,
                at=3.0,
                max_boundary=Step(4),
                last_lines="x",
            ),
            FailureRecord(
                generation=Generation(1), step=Step(2), exit_class=None, code=1, at=3.0, max_boundary=Step(4)
            ),
        ),
        exclusions=(Exclusion(node_id=NodeId("i-1"), evidence=Recorded(text="e"), may_terminate=True),),
        silences=(AgentSilence(node_id=NodeId("i-1"), since=1.0, boundary=Step(2), committed=Step(3)),),
        refused=(RefusedSource(rank=Rank(1), origin_generation=Generation(2), step=Step(3), is_object=True),),
        failed_reads=(
            FailedRead(
                reader=NodeId("i-1"),
                generation=Generation(2),
                at=5.0,
                source=RefusedSource(rank=Rank(2), origin_generation=Generation(2), step=Step(3)),
                is_mismatch=True,
                key="k",
            ),
        ),
        stop_reason=JobNote(what=JobFact.MAX_COST_SPENT, limit=5.0),
        microseconds={"train": 1_250_000},
        node_microseconds=5_000_000,
        node_count=4,
        accounted_until=13.0,
        incident=IncidentRecord(
            id="inc",
            state=IncidentState.RESTORING,
            cause=Cause.GROUP_LOST,
            evidence=(Recorded(text="a"), ShardsLost(ranks=(Rank(1),), how=ShardLoss.MEMORY)),
            decision=RestartsRanks(replaced=(NodeId("i-1"),)),
            generation_before=Generation(1),
            failed_at=1.0,
            opened_at=2.0,
            reached_step=Step(3),
            instance_ids=(NodeId("i-1"),),
            kept_instance_ids=(NodeId("i-2"),),
            faulted_instance_ids=(NodeId("i-1"), NodeId("i-2")),
            replaced_at=4.0,
            rank_sources=(("local", 2), ("s3", 1)),
            node_microseconds_before=1_000_000,
        ),
    )
    lease = world.runner.job_leases.hold(run)
    assert lease is not None
    with world.database.write() as session:
        jobs.change(session, lease, **records.job_update(full, 7.2))
    assert records.job_record(world.job()) == full
    assert world.job().cost_usd == 0.01


def test_prefixes_end_with_a_slash() -> None:
    assert records.prefix_of("s3://bucket/a/b") == ObjectReference(bucket="bucket", key="a/b/")
    assert records.prefix_of("s3://bucket/a/b/") == ObjectReference(bucket="bucket", key="a/b/")
    assert records.prefix_of("s3://bucket") == ObjectReference(bucket="bucket", key="")


async def test_a_record_that_no_server_could_read_is_not_stored(world: World) -> None:
    world.submit()
    await world.running()
    record = records.job_record(world.job())
    awaited = AwaitedCommit(generation=Generation(1), kept=Step(0), step=Step(MAX_STEP + 1))
    with pytest.raises(msgspec.ValidationError):
        records.job_update(replace(record, awaited=awaited), None)


async def test_a_row_that_cannot_be_read_stops_no_other_job(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.submit()
    await world.running()
    before = world.job()
    memo = {**before.memo, "awaited": {"generation": 1, "kept": 0, "step": MAX_STEP + 1}, "unwatched": [None]}
    with world.database.write() as session:
        session.execute(update(JobRow).values(memo=memo))
    broken = world.job()
    with pytest.raises(msgspec.ValidationError):
        records.job_record(broken)
    expected = records.job_record(before)
    assert records.shown_record(broken) == replace(expected, awaited=None)
    assert records.fleet_job(broken) == records.fleet_job(before)
    assert "its record cannot be read" in caplog.text
    world.submit("other", nodes=2)
    await world.until(lambda: world.job("other").state == JobState.RUNNING)
