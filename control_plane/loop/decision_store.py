"""Stores the decisions about jobs and fleets in the database.

Invariant: one transaction, under the lease of the job or fleet, stores the whole decision or nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import datetime

import msgspec
from sqlalchemy.orm import Session

from control_plane.accounts import jobs as accounts
from control_plane.accounts import reasons
from control_plane.accounts.facts import drill_outcome, sentence
from control_plane.core import drills, idle_nodes, ledger_hours
from control_plane.core.actions import Decision, EventDraft, FleetDecision
from control_plane.core.job.progress import unstored_outputs
from control_plane.core.observed.drills import DrillObserved
from control_plane.core.observed.jobs import JobObserved
from control_plane.core.observed.steps import NO_GENERATION, DoubtedCheckpoint
from control_plane.core.states import FleetStatus, JobState, NodeState
from control_plane.core.verification import CheckpointVerdict, Damage, DamageKind
from control_plane.db import (
    automation,
    checkpoints,
    events,
    fleets,
    implications,
    incidents,
    jobs,
    nodes,
    notices,
    protection,
    rolls,
    tokens,
)
from control_plane.db import drills as db_drills
from control_plane.db import ledger_hours as db_ledger_hours
from control_plane.db.errors import NotFound
from control_plane.db.leases import Lease
from control_plane.db.session import Database
from control_plane.loop import memos, records
from control_plane.loop.cloud_watch import CloudView
from control_plane.loop.fleet_rows import schedule_of
from control_plane.loop.held_leases import HeldLeases
from control_plane.loop.observer import StoredFleet, StoredJob
from everstep.protocol.agent_messages import MemberReport
from everstep.protocol.ids import FleetName, Generation, NodeId, RunId

log = logging.getLogger(__name__)


class DecisionStore:
    """Writes the decisions of the job loop and the fleet loop. All methods block."""

    def __init__(self, database: Database, fleet_leases: HeldLeases) -> None:
        self._database = database
        self._fleet_leases = fleet_leases

    def apply_job(
        self,
        lease: Lease,
        stored: StoredJob,
        observed: JobObserved,
        decision: Decision,
        shards: tuple[protection.ShardRecord, ...],
        now: float,
    ) -> bool:
        """Store everything that a decision about a job changes, in one transaction.

        Return False if nothing was stored, because the queue, the job's new fleet or the pause has changed since
        `stored` was read. The caller then decides again. `shards` is empty if nothing changed; `now` is Unix seconds.

        Raises StaleLease if another server holds the lease of the job or of its fleet. Nothing was stored.
        """
        moment = records.at(now)
        before, after = stored.job, decision.record
        price = stored.fleet.price_usd_per_hour if stored.fleet is not None else None
        changes = records.job_update(after, price)
        if decision.fleet is not None:
            changes["fleet_name"] = decision.fleet
        with self._database.write() as session:
            # Check the fleet's lease in addition to the job's. A server that takes the fleet over claims the leases of
            # the fleet's jobs later, so the job's lease alone does not show the takeover.
            self._fleet_leases.check(session, before.fleet_name)
            if automation.words(session) != stored.around.pause:
                return False
            if decision.fleet is not None and not fleets.takes_jobs(session, decision.fleet):
                return False  # The job's new fleet was deleted, or its deletion began, after `stored` was read.
            if before.state != after.state.value and not _keeps_its_turn(session, before, after.state, observed, now):
                return False
            if decision.plan is not None:
                jobs.add_generation(session, lease, decision.plan, moment, revision=before.revision)
            if before.state != after.state.value or decision.plan is not None:
                jobs.transition(session, lease, before=before.state, after=after.state.value, now=moment, **changes)
            elif after != records.job_record(before):
                jobs.change(session, lease, **changes)
            hours = ledger_hours.full_hours(records.job_ledger(records.job_record(before)), records.job_ledger(after))
            if hours:
                db_ledger_hours.record_job(session, lease, hours)
            if decision.settled_spans:
                db_ledger_hours.record_spans(session, lease, decision.settled_spans)
            if after.stepped_at is not None and after.stepped_at != records.job_record(before).stepped_at:
                jobs.note_first_step(session, lease, records.at(after.stepped_at))
            if after.state is JobState.STARTING and before.state != JobState.STARTING:
                jobs.mark_generation_started(session, lease, after.generation, moment)
            for incident in decision.incidents:
                incidents.open_incident(session, lease, incident.id, records.new_incident(incident, before, now))
                incidents.change(session, lease, incident.id, **records.incident_update(incident, now, price))
            if decision.implications:
                lines = [records.new_implication(line, before.fleet_name) for line in decision.implications]
                implications.record(session, lease, lines)
            for each in decision.doubted:
                _doubt(session, lease, before, each, moment)
            if shards:
                protection.record(session, lease, shards, moment)
            for draft in decision.events:
                events.append_for_job(
                    session, before, draft.type, _message(draft), moment, node_id=draft.node_id, detail=draft.detail
                )
        if before.state != after.state.value or memos.reason_of(before) != after.reason:
            log.info("job %s: %s: %s", before.name, after.state.value, accounts.headline(after.reason))
        return True

    def apply_drill(self, lease: Lease, stored: StoredJob, drill: DrillObserved, now: float) -> None:
        """Store the new state of a job's drill, with its event. Raises StaleLease if the lease is lost."""
        job = stored.job
        with self._database.write() as session:
            self._fleet_leases.check(session, job.fleet_name)
            db_drills.change(session, lease, drill.id, **records.drill_update(drill))
            message = f"{sentence(drills.ordered(drill))}: {drill.state}"
            outcome = drill_outcome(drill.outcome, drill.incident_id)
            message += f", {outcome}" if outcome else ""
            events.append_for_job(session, job, "DrillStateChanged", message, records.at(now), node_id=drill.node_id)

    def record_outputs(self, fleet: FleetName, node_id: NodeId, member: MemberReport, now: float) -> None:
        """Add the unstored outputs of a node that leaves an ended job to the job, with an event. Raises StaleLease."""
        with self._database.write() as session:
            self._fleet_leases.check(session, fleet)
            try:
                job = jobs.get_run(session, member.run)
            except NotFound:
                return  # A person has deleted the job.
            moment = records.at(now)
            # The node may have promised to join a generation that never got a plan.
            generation = min(member.generation, job.generation)
            places = jobs.reporters(session, member.run, generation, moment, late=jobs.LATE_OUTPUTS)
            if job.ended_at is None or node_id not in places:
                return
            unstored, event = unstored_outputs(memos.unstored_outputs_of(job), Generation(job.generation), [member])
            if event is not None:
                jobs.set_memo(session, job.run_id, {**job.memo, "unstored": msgspec.to_builtins(unstored)})
                events.append_for_job(session, job, event.type, _message(event), moment)

    def apply_fleet(
        self,
        lease: Lease,
        stored: StoredFleet,
        decision: FleetDecision,
        view: CloudView,
        facts: Mapping[NodeId, nodes.InstanceFacts],
        now: float,
    ) -> bool:
        """Store everything that a decision about a fleet changes, in one transaction.

        Return False if nothing was stored, because the pause of automation has changed since `stored` was read. The
        caller then executes no action and decides again. `facts` fills only empty columns of a node's row. `now` is
        Unix seconds.

        Raises StaleLease if another server holds the lease. Nothing was stored.
        """
        moment, fleet = records.at(now), stored.fleet
        state = FleetStatus.FROZEN if decision.is_frozen else FleetStatus.ACTIVE
        if fleet.delete_requested_at is not None:
            state = FleetStatus.DELETING
        changes: dict[str, object] = {
            "state": state.value,
            "max_node_count": view.group.max_size,
            "instance_type": view.instance_type,
            "encrypting_types": view.encrypting_types,
            "availability_zone": view.availability_zone,
            "desired_node_count": decision.desired_count,
            "vacancies": decision.vacancies,
            "drift": view.group.drift,
            "reasons": decision.reasons,
        }
        if fleet.blindness_lifted_at is not None and not decision.is_blind:
            # Most agents report again, so remove the user's confirmation that the silent nodes are lost. A confirmation
            # that a user gave after the fleet loop has read the fleet's row remains.
            changes["blindness_lifted_at"] = None
        if decision.roll_progress is not None:
            changes["roll_progress"] = rolls.stored(decision.roll_progress)
        states = {NodeId(row.id): NodeState(row.state) for row in stored.nodes}
        states |= {row.node_id: row.state for row in decision.records}
        idle_before = records.idle_nodes(fleet)
        idle_after = idle_nodes.charge(idle_before, states.values(), now)
        if idle_after != idle_before:
            changes |= records.idle_update(idle_after)
        is_same = all(getattr(fleet, column) == value for column, value in changes.items())
        missing = {row.id: nodes.missing_facts(row, facts.get(NodeId(row.id))) for row in stored.nodes}
        has_news = decision.records or decision.events or decision.implications or decision.is_empty
        has_news = has_news or any(missing.values())
        if is_same and not has_news:
            return True
        known = {NodeId(node.id): node for node in stored.nodes}
        with self._database.write() as session:
            if automation.words(session) != stored.pause:
                return False
            if decision.is_empty:
                fleets.remove(session, lease, moment)
                return True
            if not is_same:
                fleets.change(session, lease, **changes)
            ledger_before, ledger_after = idle_nodes.ledger(idle_before), idle_nodes.ledger(idle_after)
            if ledger_before is not None and ledger_after is not None:
                db_ledger_hours.record_fleet(session, lease, ledger_hours.full_hours(ledger_before, ledger_after))
            for row in decision.records:
                before = known.get(row.node_id)
                columns = records.node_update(
                    row,
                    before=None if before is None else before.state,
                    had_request=before is not None and before.request is not None,
                )
                of_row = before.instance_type if before is not None else ""
                columns["instance_type"] = view.instance_types.get(row.node_id) or of_row or view.instance_type
                columns["availability_zone"] = view.availability_zone
                columns["ended_at"] = moment if row.state is NodeState.GONE else None
                nodes.change(session, lease, row.node_id, initial_state=NodeState.JOINING, now=moment, **columns)
                if row.request is not None and (before is None or before.request is None):
                    # A roll (the replacement or reboot of all nodes of the fleet) has reached this node. A person's
                    # request for the node has precedence if it has arrived since the caller read the row.
                    nodes.ask(session, row.node_id, row.request)
                if row.state is NodeState.GONE:
                    tokens.revoke_sessions(session, row.node_id, moment)
            for node_id, columns in missing.items():
                nodes.change(session, lease, node_id, initial_state=NodeState.JOINING, now=moment, **columns)
            notices.forget(session, decision.forgotten)
            if decision.implications:
                implications.record(
                    session, lease, [records.new_implication(line, fleet.name) for line in decision.implications]
                )
            owners = jobs.owners(session, {draft.run for draft in decision.events if draft.run is not None})
            for draft in decision.events:
                owner = None if draft.run is None else owners.get(draft.run)
                project = "" if owner is None else owner.project
                event = events.NewEvent(
                    at=moment,
                    type=draft.type,
                    message=_message(draft),
                    project=project,
                    fleet_name=fleet.name,
                    node_id=draft.node_id,
                )
                events.append(session, event)
            if fleet.state != state.value:
                message = f"{fleet.state} → {state.value}: {reasons.sentences(decision.reasons)}"
                events.append_for_fleet(session, fleet, "FleetStateChanged", message, moment)
        return True


def _doubt(session: Session, lease: Lease, job: jobs.SavedJob, doubted: DoubtedCheckpoint, now: datetime) -> None:
    """Request a verification of a checkpoint. If two nodes agree, also mark it as damaged until the result."""
    run_id, generation = lease.key, int(doubted.generation)
    if job.spec.initial is not None and generation == NO_GENERATION:
        run_id, generation = job.spec.initial.run_id, job.spec.initial.generation
    try:
        found = checkpoints.find(session, run_id, step=doubted.step, generation=generation)
    except NotFound:
        return
    if len(doubted.readers) > 1:
        damage = Damage(kind=DamageKind.LOADED, detail=accounts.misread(doubted.readers))
        checkpoints.mark_damaged(session, run_id, found, CheckpointVerdict.of(damage), now)
    checkpoints.ask_to_verify(session, run_id, found, now)


def _message(draft: EventDraft) -> str:
    message = accounts.message(draft.message)
    return message if draft.reason is None else f"{message}: {reasons.sentence(draft.reason)}"


def _keeps_its_turn(
    session: Session, job: jobs.SavedJob, next_state: JobState, observed: JobObserved, now: float
) -> bool:
    """Return whether the fleet's queue still permits a decision to start, pause or requeue a job."""
    gives_way = bool(observed.gives_way_to) and next_state in (JobState.PAUSING, JobState.QUEUED)
    if job.state != JobState.QUEUED and not gives_way:
        return True  # The queue decides only about queued jobs, and jobs that must give way to another job.
    # Since the input was read, decisions about other jobs may have been stored, so two jobs could get the same free
    # nodes. No other transaction writes until this one ends, so the result stays valid.
    name, run = FleetName(job.fleet_name), RunId(job.run_id)
    turns = schedule_of(fleets.find(session, name), jobs.unfinished(session, name), nodes.of_fleet(session, name), now)
    return (run in turns.admitted, run in turns.giving_way) == (observed.is_admitted, bool(observed.gives_way_to))
