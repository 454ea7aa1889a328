"""DescribeTrainingJob returns the same facts as separate queries.

The separate queries read the job's incidents, checkpoints and other objects.
"""

from __future__ import annotations

from datetime import timedelta

import pytest
from sqlalchemy import event

from control_plane.db import descriptions, drills, incidents, jobs, nodes
from control_plane.db.drills import NewDrill
from control_plane.db.errors import NotFound
from control_plane.db.models import NodeRow
from control_plane.db.nodes import AgentFacts
from tests.unit.control_plane.db.conftest import NOW, new_job
from tests.unit.control_plane.db.test_jobs import plan
from tests.unit.control_plane.db.test_nouns import incident


def described(database, name: str = "gpt"):
    with database.read() as session:
        return descriptions.find(session, name)


def test_a_job_that_only_waits(database, job):
    found = described(database)
    assert found.job == job
    assert (found.plan, found.observed_revision, found.open_drill_id, found.node_ids) == (None, None, None, ())
    assert found.incidents == incidents.totals_of((0, 0, 0, 0, 0.0, 0, 0, None))


def test_everything_that_hangs_on_a_job_and_nothing_of_others(database, job, lease):
    drill = NewDrill(
        run_id=job.run_id,
        job_name="gpt",
        fleet_name="main",
        project="default",
        kind="kill_rank",
        node_id="i-1",
        rank=0,
        requested_by="a",
        requested_at=NOW,
        state="requested",
    )
    with database.write() as session:
        jobs.create(session, new_job("other"), NOW)
        for number in (1, 2):
            jobs.add_generation(session, lease, plan(number), NOW)
        incidents.open_incident(session, lease, "inc-1", incident())
        incidents.change(
            session, lease, "inc-1", phase="closed", closed_at=NOW, lost_steps=2, detect_seconds=1.0, cost_usd=3.5
        )
        incidents.open_incident(session, lease, "inc-2", incident(opened_at=NOW + timedelta(seconds=1)))
        ended = drills.create(session, drill)
        drills.change(session, lease, ended.id, ended_at=NOW)
        going_on = drills.create(session, drill)
        for node_id in ("i-2", "i-1", "i-3"):
            facts = AgentFacts(
                node_id=node_id, fleet_name="main", address="a", peer_port=1, memory_bytes=1, agent_id="a", version="1"
            )
            nodes.note_hello(session, facts, initial_state="idle", now=NOW)
        session.flush()
        for node_id in ("i-1", "i-2"):
            row = session.get(NodeRow, node_id)
            assert row is not None
            row.run_id = job.run_id
    found = described(database)
    with database.read() as session:
        assert found.job == jobs.get(session, "gpt")
        assert found.incidents == incidents.totals(session, run_id=job.run_id)
    assert (
        found.incidents.count,
        found.incidents.closed_count,
        found.incidents.lost_steps,
        found.incidents.cost_usd,
    ) == (2, 1, 2, 3.5)
    assert (found.plan, found.observed_revision, found.open_drill_id) == (plan(2), 1, going_on.id)
    assert found.node_ids == ("i-1", "i-2")
    other = described(database, "other")
    assert (other.plan, other.incidents.count, other.open_drill_id, other.node_ids) == (None, 0, None, ())


def test_two_questions_are_enough(database, job):
    asked: list[str] = []
    event.listen(database.engine, "before_cursor_execute", lambda *given: asked.append(given[2]))
    described(database)
    assert len([each for each in asked if each.startswith("SELECT")]) == 2


def test_there_is_no_such_job(database):
    with pytest.raises(NotFound, match="nobody"):
        described(database, "nobody")
