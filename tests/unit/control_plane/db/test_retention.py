"""Old rows are deleted after their retention time. Rows that the control plane still reads are kept."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

import pytest
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from control_plane.core.ledger_hours import HOUR, Ledger
from control_plane.core.observed.facts import Recorded
from control_plane.db import events, implications, incidents, intents, jobs, ledger_hours, nodes, protection, tokens
from control_plane.db.errors import NotFound
from control_plane.db.leases import Lease, Leaser
from control_plane.db.models import (
    Base,
    EventRow,
    GenerationRow,
    ImplicationRow,
    IncidentRow,
    IntentRow,
    JobHourRow,
    JobRow,
    NodeRow,
    ReplicaRow,
    ShardRow,
    TokenRow,
)
from control_plane.db.retention import RowRetention, prune
from control_plane.db.session import Database
from control_plane.db.tokens import NewToken, Role, TokenKind
from tests.unit.control_plane.db.conftest import NOW, new_job

RETENTION = RowRetention(
    intents=7, events=90, nodes=7, tokens=7, generations=30, protection=1, plans_per_job=2, batch_rows=100
)
LATER = NOW + timedelta(days=400)
NOON_HOUR = NOW.timestamp() // 3600


def count(session: Session, table: type[Base]) -> int:
    return session.scalar(select(func.count()).select_from(table)) or 0


def lease_of(session: Session, run_id: str) -> Lease:
    lease = Leaser("owner", 3.0, lambda: 0.0).claim(session, "job", run_id)
    assert lease is not None
    return lease


def end(session: Session, lease: Lease, at: datetime) -> None:
    jobs.change(session, lease, ended_at=at)


def add_generations(session: Session, run_id: str, numbers: range) -> None:
    for number in numbers:
        session.add(
            GenerationRow(
                run_id=run_id,
                number=number,
                parent=number - 1,
                base_step=number,
                world_size=2,
                plan=b"plan",
                created_at=NOW,
                started_at=NOW,
            )
        )
    session.flush()
    session.execute(JobRow.__table__.update().where(JobRow.run_id == run_id).values(generation=numbers[-1]))


@pytest.mark.parametrize("days", [7, 8])
def test_intents_and_ended_nodes_go_after_their_days(database: Database, days: int) -> None:
    with database.write() as session:
        job = jobs.create(session, new_job(), NOW)
        lease = lease_of(session, job.run_id)
        intents.begin(session, lease, key="k", action="a", detail={}, now=NOW)
        for name, ended_at in (("i-1", NOW), ("i-2", None)):
            session.add(NodeRow(id=name, fleet_name="main", state="gone", created_at=NOW, ended_at=ended_at))
            line = ImplicationRow(
                node_id=name,
                incident_id="inc",
                fleet_name="main",
                at=NOW,
                what="w",
                evidence=Recorded(text="e"),
                is_own_word=False,
                remedy="none",
            )
            session.add(line)
    with database.write() as session:
        gone = prune(session, RETENTION, NOW + timedelta(days=days))
    assert (gone["intents"], gone["nodes"]) == ((1, 1) if days == 8 else (0, 0))
    with database.read() as session:
        assert [node.id for node in nodes.of_fleet(session, with_ended=True)] == (
            ["i-2"] if days == 8 else ["i-1", "i-2"]
        )
        assert count(session, IntentRow) == (0 if days == 8 else 1)
        assert sorted(implications.of_fleet(session, "main")) == (["i-2"] if days == 8 else ["i-1", "i-2"])


def test_jobs_and_incidents_are_kept_for_ever_and_events_are_not(database: Database) -> None:
    with database.write() as session:
        job = jobs.create(session, new_job(), NOW)
        lease = lease_of(session, job.run_id)
        new = incidents.NewIncident(
            job_name="gpt",
            project="",
            phase="closed",
            cause="rank_exit",
            evidence=(),
            decision=Recorded(text=""),
            reached_step=1,
            generation_before=1,
            instance_ids=(),
            faulted_instance_ids=(),
            lost_node_count=0,
            failed_at=NOW,
            opened_at=NOW,
            detect_seconds=0.0,
            detail={},
        )
        incidents.open_incident(session, lease, "inc-1", new)
        end(session, lease, NOW)
        for days in (0, 399):
            events.append(session, events.NewEvent(at=NOW + timedelta(days=days), type="t", message=str(days)))
    with database.write() as session:
        prune(session, RETENTION, LATER)
        assert (count(session, JobRow), count(session, IncidentRow)) == (1, 1)
        assert [row.message for row in session.scalars(select(EventRow))] == ["399"]


def test_a_job_that_goes_on_keeps_its_lineage_and_its_newest_plans(database: Database) -> None:
    with database.write() as session:
        job = jobs.create(session, new_job(), NOW)
        add_generations(session, job.run_id, range(1, 6))
        assert prune(session, RETENTION, LATER)["plans"] == 3
        assert prune(session, RETENTION, LATER)["plans"] == 0
        assert [entry.number for entry in jobs.lineage(session, job.run_id)] == [1, 2, 3, 4, 5]
        # `dict(…)` would be shorter, but mypy rejects it
        plans = {number: plan for number, plan in session.execute(select(GenerationRow.number, GenerationRow.plan))}  # noqa: C416
        assert plans == {1: b"", 2: b"", 3: b"", 4: b"plan", 5: b"plan"}
        with pytest.raises(NotFound, match="plan of the generation"):
            jobs.generation(session, job.run_id, 3)


def test_an_ended_job_keeps_its_newest_generation_and_its_protection_goes(database: Database) -> None:
    with database.write() as session:
        ended, live = jobs.create(session, new_job(), NOW), jobs.create(session, new_job("other"), NOW)
        for job in (ended, live):
            add_generations(session, job.run_id, range(1, 4))
            lease = lease_of(session, job.run_id)
            holders = (protection.HolderRecord(node_id="i-1", is_in_view=True),)
            shard = protection.ShardRecord(
                rank=0, generation=3, owner_node_id="i-1", committed_step=1, payload_bytes=1, reason="", holders=holders
            )
            protection.record(session, lease, [shard], NOW)
        end(session, lease_of(session, ended.run_id), NOW)
    with database.write() as session:
        soon = prune(session, RETENTION, NOW + timedelta(days=2))
        assert (soon["protection"], soon["generations"]) == (1, 0)
        prune(session, RETENTION, LATER)
        assert [entry.number for entry in jobs.lineage(session, ended.run_id)] == [3]
        assert [entry.number for entry in jobs.lineage(session, live.run_id)] == [1, 2, 3]
        assert (
            [row.run_id for row in session.scalars(select(ShardRow))]
            == [live.run_id]
            == [row.run_id for row in session.scalars(select(ReplicaRow))]
        )


def test_silent_tokens_go_and_those_in_use_stay(database: Database) -> None:
    with database.write() as session:
        for name, ended_at in (("i-1", NOW), ("i-2", None)):
            session.add(NodeRow(id=name, fleet_name="main", state="spare", created_at=NOW, ended_at=ended_at))
        session.flush()
        tokens.mint(session, NewToken(kind=TokenKind.JOIN, role=Role.AGENT, fleet_name="main"), NOW)
        for node_id in ("i-1", "i-2", "i-3"):
            tokens.mint(
                session, NewToken(kind=TokenKind.SESSION, role=Role.AGENT, node_id=node_id, description=node_id), NOW
            )
        admin = NewToken(kind=TokenKind.USER, role=Role.ADMIN, description="admin")
        tokens.mint(session, admin, NOW)
        tokens.mint(session, replace(admin, description="expired", expires_at=NOW), NOW)
        _, revoked = tokens.mint(session, replace(admin, description="revoked"), NOW)
        tokens.revoke(session, revoked.id, NOW)
        before = count(session, TokenRow)
        prune(session, RETENTION, NOW + timedelta(days=6))
        assert count(session, TokenRow) == before
        prune(session, RETENTION, LATER)
        assert {row.description for row in session.scalars(select(TokenRow))} == {"", "i-2", "admin"}


def test_a_pass_is_bounded(database: Database) -> None:
    with database.write() as session:
        for number in range(25):
            events.append(session, events.NewEvent(at=NOW + timedelta(seconds=number), type="t", message=str(number)))
    taken = []
    for _ in range(4):
        with database.write() as session:
            taken.append(prune(session, replace(RETENTION, batch_rows=10), LATER)["events"])
            if len(taken) == 1:
                assert session.scalar(select(func.min(EventRow.id))) == 11, "the oldest first"
    assert taken == [10, 10, 5, 0]


def test_ledgers_at_full_hours_go_after_their_days(database: Database) -> None:
    hours = [Ledger(at=int(NOON_HOUR + n) * HOUR, spent={"train": n}) for n in (0, 1)]
    with database.write() as session:
        job = jobs.create(session, new_job(), NOW)
        lease = lease_of(session, job.run_id)
        ledger_hours.record_job(session, lease, hours)
    with database.write() as session:
        gone = prune(session, RowRetention(hours=2), NOW + timedelta(days=2, minutes=1))
        assert (gone["job hours"], gone["fleet hours"]) == (0, 0)
        gone = prune(session, RowRetention(hours=2), NOW + timedelta(days=2, minutes=61))
        assert (gone["job hours"], count(session, JobHourRow)) == (1, 1)
    with database.write() as session:
        jobs.change(session, lease, ended_at=NOW)
        jobs.remove(session, job.run_id)
        assert count(session, JobHourRow) == 0
