from __future__ import annotations

from datetime import timedelta

import pytest
from alembic.config import Config
from sqlalchemy import select

from alembic import command
from control_plane.core.observed.facts import Recorded
from control_plane.core.observed.incidents import RestartsRanks
from control_plane.core.observed.nodes import Cause
from control_plane.core.verification import CheckpointVerdict, VerdictKind
from control_plane.db import checkpoints, events, fleets, incidents, intents, jobs, nodes, protection, schema, tokens
from control_plane.db import reports as db_reports
from control_plane.db.checkpoints import SavedCheckpoint
from control_plane.db.errors import AlreadyExists, Conflict, NotFound, StaleLease
from control_plane.db.fleets import NewFleet
from control_plane.db.incidents import NewIncident
from control_plane.db.intents import IntentState
from control_plane.db.leases import Lease, Leaser
from control_plane.db.models import NodeRow, TokenRow
from control_plane.db.nodes import AgentFacts
from control_plane.db.protection import HolderRecord, ShardRecord
from control_plane.db.tokens import NewToken, Role, TokenKind
from tests.unit.control_plane.db.conftest import NOW, new_job


def stale(lease: Lease) -> Lease:
    return Lease(lease.kind, lease.key, lease.owner, lease.counter - 1)


def fleet(**changes):
    values = {
        "name": "main",
        "auto_scaling_group_name": "group",
        "project": "default",
        "state": "active",
        "min_node_count": 2,
        "spare_count": 1,
        "max_node_count": 8,
        "instance_type": "p5.48xlarge",
        "availability_zone": "us-east-1a",
        "tags": {},
    }
    return NewFleet(**{**values, **changes})


# Tests of stored protection


def shard(*holders: tuple[str, bool], step: int = 5) -> ShardRecord:
    return ShardRecord(
        rank=0,
        generation=1,
        owner_node_id=holders[0][0],
        committed_step=step,
        payload_bytes=100,
        reason="",
        holders=tuple(HolderRecord(node_id=node_id, is_in_view=in_view) for node_id, in_view in holders),
    )


def test_replica_rows_change_with_the_view_and_not_with_the_step(database, job, lease):
    def record(what: ShardRecord, minutes: int) -> int:
        with database.write() as session:
            return protection.record(session, lease, [what], NOW + timedelta(minutes=minutes))

    assert record(shard(("i-1", True), ("i-2", True)), 0) == 2
    assert record(shard(("i-1", True), ("i-2", True), step=6), 1) == 0
    assert record(shard(("i-1", True), ("i-2", False), step=6), 2) == 1
    assert record(shard(("i-1", True), ("i-3", True), step=7), 3) == 2
    with database.read() as session:
        (stored,) = protection.of_run(session, job.run_id)
    assert stored.committed_step == 7
    assert [(holder.node_id, holder.is_in_view, holder.changed_at) for holder in stored.holders] == [
        ("i-1", True, NOW),
        ("i-3", True, NOW + timedelta(minutes=3)),
    ]


def test_a_holder_whose_instance_has_ended_is_in_nobodys_view(database, job, lease):
    """A holder whose instance has ended no longer counts as a holder of any shard.

    The control plane removes the holder itself. The shard's owner cannot report the loss if its own instance has also
    ended, or if its ranks have not started again.
    """
    with database.write() as session:
        protection.record(session, lease, [shard(("i-1", True), ("i-2", True))], NOW)
        for node_id, ended_at in (("i-1", NOW), ("i-2", None)):
            session.add(NodeRow(id=node_id, fleet_name="main", state="gone", created_at=NOW, ended_at=ended_at))
    with database.read() as session:
        (stored,) = protection.of_run(session, job.run_id)
        totals = protection.totals(session, {job.run_id: 1})
    assert {holder.node_id: holder.is_in_view for holder in stored.holders} == {"i-1": False, "i-2": True}
    assert (totals[job.run_id].fewest_in_view, totals[job.run_id].most_out_of_view) == (1, 1)


def test_an_owner_that_moves_is_a_change(database, job, lease):
    with database.write() as session:
        protection.record(session, lease, [shard(("i-1", True), ("i-2", True))], NOW)
        assert protection.record(session, lease, [shard(("i-2", True), ("i-1", True))], NOW) == 2


# Tests of stored checkpoints


def checkpoint(step: int, manifest: bytes | None = None) -> SavedCheckpoint:
    return SavedCheckpoint(
        generation=1,
        step=step,
        state="uploading" if manifest is None else "complete",
        bucket="b",
        manifest_key=f"step={step}/manifest.json",
        manifest=manifest,
        object_bytes=10,
        created_at=NOW,
        completed_at=None if manifest is None else NOW,
    )


def test_the_newest_usable_checkpoints_lie_on_the_path_behind_any_number_of_others(database, job, lease):
    """The newest checkpoints are off the path, damaged or in the trash."""
    with database.write() as session:
        for step in range(1, 300):
            checkpoints.record(session, lease, checkpoint(step, b"m"))
        for step in range(100, 300, 2):
            found = checkpoints.find(session, job.run_id, step=step, generation=1)
            checkpoints.set_state(session, job.run_id, found, checkpoints.TRASHED)
        damaged = checkpoints.find(session, job.run_id, step=97, generation=1)
        wrong = CheckpointVerdict(kind=VerdictKind.WRONG)
        checkpoints.store_verdict(session, job.run_id, damaged, verdict=wrong, now=NOW)
    with database.read() as session:
        usable = checkpoints.newest_usable(session, job.run_id, lambda generation, step: (generation, step) <= (1, 102))
        assert [(each.step, each.is_wrong) for each in usable] == [
            (step, step == 97) for step in (101, *range(99, 99 - checkpoints.USABLE_LIMIT, -1))
        ]
        assert {each.manifest for each in usable} == {None}
        newest = checkpoints.newest_steps(session, job.run_id, 1)
    assert newest == set(range(300 - checkpoints.USABLE_LIMIT, 300))


def test_a_complete_checkpoint_stays_as_it_is(database, job, lease):
    with database.write() as session:
        checkpoints.record(session, lease, checkpoint(10))
        checkpoints.record(session, lease, checkpoint(10, b"first"))
        checkpoints.record(session, lease, checkpoint(10, b"second"))
        checkpoints.record(session, lease, checkpoint(20))
    with database.read() as session:
        newest = checkpoints.newest_complete(session, job.run_id)
        assert [record.step for record in checkpoints.of_run(session, job.run_id)] == [20, 10]
    assert newest is not None
    assert (newest.step, newest.manifest) == (10, b"first")


# Tests of stored incidents


def incident(**changes) -> NewIncident:
    values = {
        "job_name": "gpt",
        "project": "default",
        "phase": "detect",
        "cause": "rank_exit",
        "evidence": (Recorded(text="rank 1 exited with code 1"),),
        "decision": RestartsRanks(),
        "reached_step": 12,
        "generation_before": 1,
        "instance_ids": (),
        "faulted_instance_ids": (),
        "lost_node_count": 0,
        "failed_at": NOW,
        "opened_at": NOW,
        "detect_seconds": 0.1,
        "detail": {},
    }
    return NewIncident(**{**values, **changes})


def test_an_incident_from_its_opening_to_its_close(database, job, lease):
    with database.write() as session:
        incidents.open_incident(session, lease, "inc-1", incident())
        again = incidents.open_incident(session, lease, "inc-1", incident(cause="other"))
        assert again.cause == "rank_exit"
        incidents.change(
            session,
            lease,
            "inc-1",
            phase="closed",
            closed_at=NOW,
            lost_steps=2,
            restore_source="local",
            instance_ids=("i-1", "i-2"),
            faulted_instance_ids=("i-1", "i-2", "i-3"),
            lost_node_count=1,
        )
    with database.read() as session:
        stored = incidents.get(session, "inc-1")
        totals = incidents.totals(session, run_id=job.run_id)
        assert (totals.count, totals.closed_count, totals.lost_steps, totals.lost_node_count) == (1, 1, 2, 1)
        assert incidents.totals(session, run_id="other").mean_recovery_seconds is None
    assert (stored.lost_steps, stored.restore_source, stored.instance_ids, stored.evidence) == (
        2,
        "local",
        ("i-1", "i-2"),
        incident().evidence,
    )
    assert stored.faulted_instance_ids == ("i-1", "i-2", "i-3")


def test_means_are_of_failures_alone(database, job, lease):
    spent = {"detect_seconds": 1.0, "replace_seconds": 2.0, "restore_seconds": 3.0}
    with database.write() as session:
        for number, cause in enumerate(Cause):
            incidents.open_incident(session, lease, f"inc-{number}", incident(cause=cause.value, lost_node_count=1))
            # Planned interruptions have a rework time of 1000 s, which would be visible in totals that wrongly include
            # them.
            incidents.change(
                session,
                lease,
                f"inc-{number}",
                closed_at=NOW,
                rework_seconds=4.0 if cause.is_failure else 1000.0,
                **spent,
            )
        incidents.open_incident(session, lease, "inc-open", incident(cause="hang"))
    with database.read() as session:
        totals = incidents.totals(session, run_id=job.run_id)
    none = {"notice", "requested", "grown", "returned", "pause_failed", "drill"}
    assert {cause.value for cause in Cause if not cause.is_failure} == none
    assert (totals.count, totals.closed_count) == (len(Cause) + 1, len(Cause))
    assert (totals.failure_count, totals.recovered_count) == (len(Cause) - len(none) + 1, len(Cause) - len(none))
    assert totals.mean_recovery_seconds == 10.0
    assert totals.lost_node_count == len(Cause)


def test_a_failure_that_its_job_gave_up_is_not_recovered(database, job, lease):
    phases = {"replace_seconds": 0.0, "restore_seconds": 0.0, "rework_seconds": 0.0}
    with database.write() as session:
        for number, is_given_up in enumerate((False, True)):
            incidents.open_incident(session, lease, f"inc-{number}", incident(cause="hang"))
            times = {"closed_at": NOW, "detect_seconds": 6.0 * (number + 1), **phases}
            incidents.change(session, lease, f"inc-{number}", is_given_up=is_given_up, **times)
    with database.read() as session:
        totals = incidents.totals(session, run_id=job.run_id)
        rows = db_reports.read(session, db_reports.ReportFilter(), [0, 4_000_000_000_000_000])
        (recoveries,) = incidents.recoveries(session, [job.run_id])
    assert (totals.failure_count, totals.recovered_count, totals.mean_recovery_seconds) == (2, 1, 6.0)
    assert [each.is_given_up for each in rows.incidents] == [False, True]
    assert recoveries.count == 1


def test_the_migration_finds_the_incidents_that_ended_with_their_job(database, job, lease):
    with database.write() as session:
        jobs.transition(session, lease, before="queued", after="failed", now=NOW, ended_at=NOW, reason="x")
        for number, closed_at in enumerate((NOW, NOW - timedelta(minutes=1), None)):
            incidents.open_incident(session, lease, f"inc-{number}", incident())
            incidents.change(session, lease, f"inc-{number}", closed_at=closed_at)
    config = Config()
    config.set_main_option("script_location", str(schema.migrations()))
    with database.migrating() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, "0006")
        command.upgrade(config, "head")
    with database.read() as session:
        found = [incidents.get(session, f"inc-{number}").is_given_up for number in range(3)]
    assert found == [True, False, False]


def test_an_incident_belongs_to_its_job(database, job, lease):
    with database.write() as session:
        other = jobs.create(session, new_job("other"), NOW)
        theirs = Leaser("owner", 3.0, lambda: 0.0).claim(session, "job", other.run_id)
        incidents.open_incident(session, lease, "inc-1", incident())
        with pytest.raises(NotFound):
            incidents.change(session, theirs, "inc-1", phase="closed")


def test_incidents_are_paged_in_the_order_they_were_opened(database, job, lease):
    with database.write() as session:
        for number in (3, 1, 2):
            incidents.open_incident(
                session, lease, f"inc-{number}", incident(opened_at=NOW + timedelta(seconds=number // 2))
            )
        first = incidents.page(session, incidents.IncidentFilter(run_ids=[job.run_id]), after=None, limit=2)
        rest = incidents.page(
            session, incidents.IncidentFilter(run_ids=[job.run_id]), after=(first[-1].opened_at, first[-1].id), limit=2
        )
        assert [entry.id for entry in first + rest] == ["inc-1", "inc-2", "inc-3"]
        assert incidents.page(session, incidents.IncidentFilter(project="another"), after=None, limit=2) == ()


# Tests of intents: calls to AWS that are stored before they are sent


def test_an_intent_is_written_before_and_finished_after(database, lease):
    def begin():
        with database.write() as session:
            return intents.begin(session, lease, key="terminate/i-1", action="terminate", detail={"id": "i-1"}, now=NOW)

    first, again = begin(), begin()
    assert first.state is again.state is IntentState.OPEN, "one that was left open is tried again"
    assert again.attempt_count == 2
    with database.write() as session:
        assert [entry.key for entry in intents.unfinished(session, lease)] == ["terminate/i-1"]
        intents.finish(session, lease, key="terminate/i-1", state=IntentState.DONE, outcome="gone", now=NOW)
        assert intents.unfinished(session, lease) == ()
    spent = begin()
    assert spent.state is IntentState.DONE
    assert (spent.attempt_count, spent.outcome) == (2, "gone")


# Tests of writes that need a lease


@pytest.mark.parametrize(
    "write",
    [
        lambda session, lease: protection.record(session, lease, [shard(("i-1", True))], NOW),
        lambda session, lease: checkpoints.record(session, lease, checkpoint(1)),
        lambda session, lease: incidents.open_incident(session, lease, "inc-1", incident()),
        lambda session, lease: incidents.change(session, lease, "inc-1", phase="x"),
        lambda session, lease: intents.begin(session, lease, key="k", action="a", detail={}, now=NOW),
        lambda session, lease: intents.finish(session, lease, key="k", state=IntentState.DONE, outcome="", now=NOW),
        lambda session, lease: jobs.change(session, lease, reason="x"),
        lambda session, lease: jobs.transition(session, lease, before="queued", after="x", now=NOW, reason="x"),
        lambda session, lease: jobs.mark_generation_started(session, lease, 1, NOW),
    ],
)
def test_nothing_is_written_under_a_stale_lease(database, lease, write):
    with pytest.raises(StaleLease), database.write() as session:
        write(session, stale(lease))


# Tests of stored fleets and nodes


def test_a_group_belongs_to_one_fleet(database):
    with database.write() as session:
        fleets.create(session, fleet(), NOW)
    with pytest.raises(AlreadyExists, match="group"), database.write() as session:
        fleets.create(session, fleet(name="other"), NOW)
    with pytest.raises(AlreadyExists, match="main"), database.write() as session:
        fleets.create(session, fleet(), NOW)


def test_a_fleet_with_unfinished_jobs_is_not_deleted(database, job, lease):
    with database.write() as session:
        fleets.create(session, fleet(), NOW)
    with pytest.raises(Conflict, match="not ended: 1"), database.write() as session:
        fleets.request_delete(session, "main", NOW)
    with database.write() as session:
        jobs.transition(session, lease, before="queued", after="stopped", now=NOW, reason="x", ended_at=NOW)
        assert fleets.request_delete(session, "main", NOW).delete_requested_at == NOW
        assert fleets.request_delete(session, "main", NOW + timedelta(1)).delete_requested_at == NOW
        mine = Leaser("owner", 3.0, lambda: 0.0).claim(session, "fleet", "main")
        nodes.change(session, mine, "i-1", initial_state="joining", now=NOW)
        fleets.remove(session, mine, NOW)
        assert nodes.of_fleet(session, with_ended=True) == ()
    with pytest.raises(NotFound), database.read() as session:
        fleets.get(session, "main")


def test_wanted_figures_change_one_by_one(database):
    with database.write() as session:
        fleets.create(session, fleet(), NOW)
        assert fleets.set_wanted(session, "main", spare_count=3).min_node_count == 2
        assert fleets.set_wanted(session, "main", min_node_count=0).spare_count == 3
        with pytest.raises(NotFound):
            fleets.set_wanted(session, "other", min_node_count=1, spare_count=1)


def test_a_hello_does_not_change_what_a_node_is_used_for(database):
    facts = AgentFacts(
        node_id="i-1", fleet_name="main", address="10.0.0.1", peer_port=1, memory_bytes=5, agent_id="a", version="1"
    )
    with database.write() as session:
        fleets.create(session, fleet(), NOW)
        lease = Leaser("owner", 3.0, lambda: 0.0).claim(session, "fleet", "main")
        assert nodes.note_hello(session, facts, initial_state="joining", now=NOW).state == "joining"
        nodes.change(session, lease, "i-1", initial_state="joining", now=NOW, state="assigned", run_id="r")
        again = nodes.note_hello(session, facts, initial_state="joining", now=NOW + timedelta(1))
        assert (again.state, again.run_id, again.created_at, again.connected_at) == (
            "assigned",
            "r",
            NOW,
            NOW + timedelta(1),
        )
        assert [node.id for node in nodes.of_run(session, "r")] == ["i-1"]
        nodes.change(session, lease, "i-1", initial_state="joining", now=NOW, state="gone", ended_at=NOW)
        assert nodes.of_fleet(session, "main") == ()
        assert [node.id for node in nodes.of_fleet(session, "main", with_ended=True)] == ["i-1"]


def test_instances_that_never_joined_count_from_the_newest_one_that_did(database):
    def come(lease: Lease, node_id: str, minute: int, *, joins: bool) -> None:
        at = NOW + timedelta(minutes=minute)
        nodes.change(session, lease, node_id, initial_state="joining", now=at)
        if joins:
            facts = AgentFacts(
                node_id=node_id, fleet_name="main", address="", peer_port=1, memory_bytes=5, agent_id="a", version="1"
            )
            nodes.note_hello(session, facts, initial_state="joining", now=at)
        else:
            nodes.change(
                session, lease, node_id, initial_state="joining", now=at, replaced_at=at, ended_at=at, state="gone"
            )

    with database.write() as session:
        fleets.create(session, fleet(), NOW)
        lease = Leaser("owner", 3.0, lambda: 0.0).claim(session, "fleet", "main")
        counts = []
        for minute, joins in enumerate([False, False, True, False]):
            come(lease, f"i-{minute}", minute, joins=joins)
            counts.append(nodes.failed_join_count(session, "main"))
        assert counts == [1, 2, 0, 1]
        nodes.change(session, lease, "i-4", initial_state="joining", now=NOW + timedelta(hours=1))
        assert nodes.failed_join_count(session, "main") == 1, "it may still join"
        assert nodes.failed_join_count(session, "other") == 0


# Tests of stored tokens


def test_a_token_is_stored_as_its_digest_alone(database):
    with database.write() as session:
        secret, record = tokens.mint(session, NewToken(kind=TokenKind.USER, role=Role.VIEWER), NOW)
        row = session.get(TokenRow, record.id)
        stored = "|".join(str(value) for value in vars(row).values())
    assert secret.startswith("est_")
    assert len(secret) >= 40
    assert secret not in stored
    assert secret[4:20] not in stored


def test_a_token_is_good_until_it_expires_or_is_revoked(database):
    with database.write() as session:
        secret, _ = tokens.mint(
            session, NewToken(kind=TokenKind.USER, role=Role.SUBMITTER, expires_at=NOW + timedelta(seconds=10)), NOW
        )
        other, record = tokens.mint(session, NewToken(kind=TokenKind.USER, role=Role.SUBMITTER), NOW)
        assert tokens.find(session, secret, NOW + timedelta(seconds=9)) is not None
        assert tokens.find(session, secret, NOW + timedelta(seconds=10)) is None
        assert tokens.find(session, secret + "x", NOW) is None
        assert tokens.revoke(session, record.id, NOW)
        assert not tokens.revoke(session, record.id, NOW)
        assert tokens.find(session, other, NOW) is None


def test_a_node_joins_once_until_it_is_reset(database):
    facts = AgentFacts(
        node_id="i-1", fleet_name="main", address="10.0.0.1", peer_port=1, memory_bytes=1, agent_id="a", version="0"
    )
    with database.write() as session:
        assert not nodes.has_joined(session, "i-1")
        nodes.note_hello(session, facts, initial_state="joining", now=NOW)
        assert not nodes.has_joined(session, "i-1"), "the welcome may be lost"
        assert nodes.mark_joined(session, "i-1", NOW)
        assert not nodes.mark_joined(session, "i-1", NOW)
        assert nodes.has_joined(session, "i-1")
        nodes.reset_joined(session, "i-1")
        assert not nodes.has_joined(session, "i-1")


def test_the_sessions_of_a_deleted_fleet_are_revoked(database):
    with database.write() as session:
        for fleet_name in ("main", "other"):
            tokens.mint(
                session,
                NewToken(
                    kind=TokenKind.SESSION,
                    role=Role.AGENT,
                    node_id="i-1",
                    fleet_name=fleet_name,
                    description=fleet_name,
                ),
                NOW,
            )
        fleets.create(session, fleet(), NOW)
        fleets.remove(session, Leaser("owner", 3.0, lambda: 0.0).claim(session, "fleet", "main"), NOW)
        assert {row.description: row.revoked_at is not None for row in session.scalars(select(TokenRow))} == {
            "main": True,
            "other": False,
        }


def test_a_node_keeps_one_session(database):
    with database.write() as session:
        minted = [
            tokens.mint(session, NewToken(kind=TokenKind.SESSION, role=Role.AGENT, node_id="i-1"), NOW)
            for _ in range(3)
        ]
        tokens.revoke_sessions(session, "i-1", NOW, but=minted[1][1].id)
        assert [tokens.find(session, secret, NOW) is not None for secret, _ in minted] == [False, True, False]


def test_a_drill_is_no_incident_of_its_fleet(database, job, lease):
    with database.write() as session:
        for cause in ("drill", "hang"):
            incidents.open_incident(session, lease, f"inc-{cause}", incident(cause=cause))
    with database.read() as session:
        assert incidents.totals(session, fleet_name=job.fleet_name).count == 1
        assert incidents.totals(session, run_id=job.run_id).count == 2


def test_events_of_a_job_and_of_a_fleet_carry_its_names(database):
    with database.write() as session:
        job = jobs.create(session, new_job(project="speech"), NOW)
        made = fleets.create(session, fleet(project="speech"), NOW)
        events.append_for_job(session, job, "DrillRequested", "It begins.", NOW, node_id="i-1", detail={"a": 1})
        events.append_for_fleet(session, made, "FleetUpdated", "It changes.", NOW)
    with database.read() as session:
        of_job, of_fleet = events.page(session, events.EventFilter(), limit=10)
    assert (of_job.type, of_job.message, of_job.at, of_job.node_id, of_job.detail) == (
        "DrillRequested",
        "It begins.",
        NOW,
        "i-1",
        {"a": 1},
    )
    assert (of_job.project, of_job.fleet_name, of_job.job_name) == ("speech", job.fleet_name, job.name)
    assert (of_fleet.type, of_fleet.message, of_fleet.at) == ("FleetUpdated", "It changes.", NOW)
    assert (of_fleet.project, of_fleet.fleet_name, of_fleet.job_name) == ("speech", made.name, None)
