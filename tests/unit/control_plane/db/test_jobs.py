from __future__ import annotations

from datetime import timedelta

import pytest

from control_plane.db import jobs
from control_plane.db.errors import AlreadyExists, Conflict, NotFound, StaleLease
from control_plane.db.jobs import TRANSITIONS_LIMIT
from everstep.protocol.ids import Generation, JobName, NodeId, Rank, RunId, Step
from everstep.protocol.plan import (
    CheckpointPlan,
    GenerationPlan,
    ObjectReference,
    PlanNode,
    RankPlan,
    ScriptPlan,
    SourceArchive,
    Timeouts,
)
from tests.unit.control_plane.db.conftest import NOW, new_job, spec


def plan(number: int, base: int = 0) -> GenerationPlan:
    where = ObjectReference(bucket="b", key="k")
    return GenerationPlan(
        job=JobName("gpt"),
        run=RunId("r" * 32),
        generation=Generation(number),
        parent=Generation(number - 1),
        base_step=Step(base),
        nodes=(PlanNode(node_id=NodeId("i-1"), address="127.0.0.2", peer_port=1, ranks=(Rank(0),)),),
        ranks=(RankPlan(rank=Rank(0), holders=(NodeId("i-1"),)),),
        coordinator=NodeId("i-1"),
        master_address="127.0.0.2",
        master_port=2,
        script=ScriptPlan(
            source=SourceArchive(object=where, sha256="0" * 64, bytes=1),
            entry_point="train.py",
            hyperparameters={},
            environment={},
            output=where,
            logs=where,
        ),
        checkpoint=CheckpointPlan(every_steps=10, prefix=where),
        timeouts=Timeouts(
            detection_seconds=3,
            lease_seconds=3,
            holder_deadline_seconds=3,
            prepare_deadline_seconds=6,
            gone_seconds=15,
            coordinator_deadline_seconds=15,
            final_round_seconds=30,
            welcome_seconds=30,
            exclude_seconds=60,
            blind_wait_seconds=120,
            stall_seconds=30,
            hang_seconds=90,
            new_phase_seconds=600,
        ),
    )


def get(database, name="gpt"):
    with database.read() as session:
        return jobs.get(session, name)


def test_a_job_comes_back_as_it_went_in(database):
    wanted = new_job(
        spec=spec(hyperparameters={"steps": "200"}, max_runtime_seconds=60, third_slot=True),
        tags={"a": "b"},
        priority=-3,
    )
    with database.write() as session:
        created = jobs.create(session, wanted, NOW)
    assert get(database) == created
    assert (created.spec, created.tags, created.priority) == (wanted.spec, {"a": "b"}, -3)
    assert (created.generation, created.committed_step, created.boundary, created.max_boundary) == (0, -1, -1, -1)
    assert [(entry.state, entry.at) for entry in created.transitions] == [("queued", NOW)]


def test_a_name_is_never_used_twice(database, job, lease):
    with database.write() as session:
        jobs.transition(session, lease, before="queued", after="stopped", now=NOW, reason="Stopped.", ended_at=NOW)
    with pytest.raises(AlreadyExists, match="gpt"), database.write() as session:
        jobs.create(session, new_job(run_id="f" * 32), NOW)


def test_a_transition_moves_the_state_and_tells_the_story(database, job, lease):
    later = NOW + timedelta(seconds=5)
    with database.write() as session:
        jobs.transition(
            session,
            lease,
            before="queued",
            after="allocating",
            now=later,
            reason="Its turn.",
            issued_generation=1,
            memo={"x": [1]},
        )
    after = get(database)
    assert (after.state, after.reason, after.issued_generation, after.memo) == (
        "allocating",
        "Its turn.",
        1,
        {"x": [1]},
    )
    assert [(entry.state, entry.reason, entry.at) for entry in after.transitions] == [
        ("queued", "Waiting.", NOW),
        ("allocating", "Its turn.", later),
    ]


def test_a_transition_from_another_state_is_stale(database, job, lease):
    with pytest.raises(StaleLease, match="no longer in state running"), database.write() as session:
        jobs.transition(session, lease, before="running", after="completed", now=NOW, reason="Done.")
    assert get(database).state == "queued"


def test_a_long_story_keeps_its_beginning_and_its_end(database, job, lease):
    with database.write() as session:
        for number in range(TRANSITIONS_LIMIT + 5):
            jobs.transition(session, lease, before="queued", after="queued", now=NOW, reason=str(number))
    story = get(database).transitions
    assert len(story) == TRANSITIONS_LIMIT
    assert (story[0].reason, story[-1].reason) == ("Waiting.", str(TRANSITIONS_LIMIT + 4))


def test_a_stop_is_asked_for_once_and_only_of_what_runs(database, job, lease):
    with database.write() as session:
        assert jobs.request_stop(session, job.run_id, NOW).stop_requested_at == NOW
    with database.write() as session:
        assert jobs.request_stop(session, job.run_id, NOW + timedelta(hours=1)).stop_requested_at == NOW
        jobs.transition(
            session, lease, before="queued", after="stopped", now=NOW, reason="It was stopped.", ended_at=NOW
        )
    with pytest.raises(Conflict, match="'gpt' has ended: It was stopped"), database.write() as session:
        jobs.request_stop(session, job.run_id, NOW)
    with pytest.raises(NotFound), database.write() as session:
        jobs.request_stop(session, "0" * 32, NOW)


def test_generations_are_written_once(database, job, lease):
    with database.write() as session:
        jobs.add_generation(session, lease, plan(1), NOW)
    with pytest.raises(AlreadyExists), database.write() as session:
        jobs.add_generation(session, lease, plan(1, base=7), NOW)
    with database.write() as session:
        jobs.mark_generation_started(session, lease, 1, NOW)
        jobs.mark_generation_started(session, lease, 1, NOW + timedelta(hours=1))
        jobs.add_generation(session, lease, plan(2, base=7), NOW)
    with database.read() as session:
        first = jobs.generation(session, job.run_id, 1)
        lineage = jobs.lineage(session, job.run_id)
    assert (first.plan, first.started_at) == (plan(1), NOW)
    assert [(entry.number, entry.parent, entry.base_step, entry.started_at) for entry in lineage] == [
        (1, 0, 0, NOW),
        (2, 1, 7, None),
    ]
    assert {entry.world_size for entry in lineage} == {plan(1).world_size}
    assert (get(database).generation, get(database).base_step) == (2, 7)


def test_the_queue_is_by_priority_then_age(database):
    with database.write() as session:
        jobs.create(session, new_job("old"), NOW)
        jobs.create(session, new_job("new"), NOW + timedelta(seconds=1))
        jobs.create(session, new_job("urgent", priority=5), NOW + timedelta(seconds=2))
    with database.read() as session:
        assert [job.name for job in jobs.unfinished(session, "main")] == ["urgent", "old", "new"]
