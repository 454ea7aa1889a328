"""Runs all loops of a control-plane server (docs/design.md#control-loops).

A pass handles one job or one fleet: claim its lease, observe, decide, act, and apply the decision.

    job loop     woken by agents and requests, else about once a second       lease per job
    fleet loop   woken likewise, and by new answers of AWS                    lease per fleet
    cloud watch  polls AWS in the background
    retention    deletes rows that are older than their limit, once a minute
    verifier     verifies checkpoints at a user's request
    keeper       deletes checkpoints
    uploads      deletes uploads of sources that no client completed, once an hour
    notices      reads AWS events from the queue, if one is configured

Invariant: a pass stores all its results under its lease in one transaction, or none. Its messages follow from state
that was stored before. After a crash, the next pass therefore completes the work. A job or fleet whose pass fails does
not delay others.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial

from control_plane.cloud.notices import EventQueue
from control_plane.cloud.objects import ObjectStore
from control_plane.cloud.operator import CloudOperator
from control_plane.core import drills
from control_plane.core import fleets as core_fleets
from control_plane.core import incidents as core_incidents
from control_plane.core.actions import Decision, FleetDecision, GroupAction, PutManifest, SendKeepEvidence
from control_plane.core.evidence import unvouched
from control_plane.core.job import decide as decide_job
from control_plane.core.observed.drills import DrillObserved
from control_plane.core.observed.jobs import JobObserved, Policy
from control_plane.core.states import ENDED_JOBS, FleetStatus, IncidentState, JobState, NodeState
from control_plane.core.timeouts import grace_seconds
from control_plane.db import drills as db_drills
from control_plane.db import events, fleets, implications, incidents, jobs, nodes, notices, protection, tokens
from control_plane.db.errors import NotFound, StaleLease
from control_plane.db.leases import Lease, Leaser
from control_plane.db.retention import DEFAULT, Retention, prune
from control_plane.db.session import Database
from control_plane.loop import records
from control_plane.loop.agents import AgentRegistry
from control_plane.loop.checkpoint_keeper import CheckpointKeeper
from control_plane.loop.cloud_watch import CloudView, CloudWatch
from control_plane.loop.executor import Executor
from control_plane.loop.figures import Loop, LoopFigures
from control_plane.loop.notice_reader import NoticeReader
from control_plane.loop.observer import Hearing, Observer, StoredFleet, StoredJob, Surroundings
from control_plane.loop.repeating import pause, repeat
from control_plane.loop.upload_keeper import UploadKeeper
from control_plane.loop.verifier import Verifier
from control_plane.steady_clock import steady_now
from everstep.protocol.agent_messages import MemberReport
from everstep.protocol.ids import FleetName, NodeId, RunId
from everstep.protocol.log_records import about
from everstep.protocol.plan import Timeouts

log = logging.getLogger(__name__)

SWEEP_SECONDS = 1.0
"""Longest time between two sweeps over all entities."""
PRUNE_SECONDS = 60.0
PAUSE_SECONDS = 0.005
"""Shortest pause after a sweep. The pause is as long as the sweep, so a loop is busy for at most half of the time."""
BEATS_PER_LEASE = 6
"""Calls of `Hearing.beat` per lease. More than half a lease between two calls counts as a standstill of the process."""
AGAIN_LIMIT = 8
"""Limit of consecutive passes over one job, if each pass requests another one immediately."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopContext:
    """Dependencies of the loops. The composition root (`app`) creates it."""

    database: Database
    operator: CloudOperator
    objects: ObjectStore
    registry: AgentRegistry
    timeouts: Timeouts
    secret: bytes
    """The server secret, from which generation keys are derived."""
    owner: str
    """Owner of this process's leases, new at each start of the server."""
    bucket: str
    """The server's bucket. It receives the evidence of held nodes."""
    events: EventQueue | None = None
    """Queue of AWS events. None: the server polls AWS only."""
    now: Callable[[], datetime] = steady_now
    monotonic: Callable[[], float] = time.monotonic
    retention: Retention = DEFAULT
    figures: LoopFigures = field(default_factory=LoopFigures)
    """Prometheus metrics of the loops."""


class Runner:
    """All loops of one control-plane server.

    `context` contains the dependencies of the loops.
    """

    def __init__(self, context: LoopContext) -> None:
        self._context = context
        self.cloud = CloudWatch(
            context.database, context.operator, context.registry.hint, context.monotonic, context.now
        )
        self.hearing = Hearing(context.timeouts, context.monotonic)
        self.observer = Observer(
            context.database, context.registry, self.cloud, self.hearing, context.timeouts, context.monotonic
        )
        self.executor = Executor(
            context.database,
            context.registry,
            context.operator,
            context.objects,
            context.secret,
            context.bucket,
            context.now,
            self._renewed,
        )
        self.verifier = Verifier(context.database, context.objects, context.now)
        self.keeper = CheckpointKeeper(context.database, context.objects, context.now)
        self.uploads = UploadKeeper(context.objects, context.bucket, context.now)
        self.notices: NoticeReader | None = None
        if context.events is not None:
            self.notices = NoticeReader(
                context.events, context.database, context.operator, context.registry, self.cloud, context.now
            )
        self._job_leases = _Leases(context, "job")
        self._fleet_leases = _Leases(context, "fleet")
        self._policy = Policy(timeouts=context.timeouts)
        self._fleets: tuple[FleetName, ...] = ()
        """Names of all fleets at the last successful read."""
        self._around: dict[FleetName, Surroundings] = {}
        """Rows that the passes of one sweep over jobs share.

        Without sharing, each pass would read all jobs and nodes of its fleet, and a sweep's cost would be quadratic.
        """
        self._protection: dict[RunId, tuple[protection.ShardRecord, ...]] = {}
        self._protected_at: dict[RunId, float] = {}

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set, then release all leases.

        Args:
            stop: set by the server when it stops.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(self._beat(stop))
            group.create_task(self.cloud.run(stop))
            group.create_task(self._sweep(stop, self.sweep_fleets))
            group.create_task(self._sweep(stop, self.sweep_jobs))
            group.create_task(self._prune(stop))
            group.create_task(self.verifier.run(stop))
            group.create_task(self.keeper.run(stop))
            group.create_task(self.uploads.run(stop))
            if self.notices is not None:
                group.create_task(self.notices.run(stop))
            await stop.wait()
            self.cloud.look_now()
            self._context.registry.hint()
        await self.executor.close()
        await asyncio.to_thread(self._job_leases.release_all)
        await asyncio.to_thread(self._fleet_leases.release_all)

    async def sweep_jobs(self) -> None:
        """Make a pass over each unfinished job whose fleet's lease this server holds."""
        if any(True for _ in self._context.registry.take_lost()):
            self.cloud.look_now()
        self._around.clear()
        live = [job for job in await asyncio.to_thread(self._live_jobs) if self._fleet_leases.holds(job.fleet_name)]
        for job in live:
            try:
                with about(job=job.name, run=job.run_id, generation=job.generation or None):
                    await self.pass_over_job(RunId(job.run_id), self._around)
            except StaleLease as stale:
                log.info("job %s: %s", job.name, stale)
                self._job_leases.lose(job.run_id)
            except NotFound as gone:
                log.info("job %s: %s", job.name, gone)
                self._job_leases.drop(job.run_id)
            except Exception:
                log.exception("job %s (run %s): the pass failed; it is made again", job.name, job.run_id)
        closely = (
            job
            for job in live
            if job.state not in (JobState.QUEUED, JobState.RUNNING) or job.memo.get("incident") is not None
        )
        self._context.registry.watch_closely(frozenset(RunId(job.run_id) for job in closely))

    async def sweep_fleets(self) -> None:
        """Make a pass over each fleet. Disconnect the agents of fleets that another server manages.

        An agent of such a fleet must not stay connected to this server, because the other server would consider the
        agent silent. A disconnected agent connects to the next address. If only this server has lost the database, it
        cannot see which server manages the fleet. After a failed pass, this server therefore also disconnects agents if
        its lease of their fleet has expired.
        """
        failed = set(self._fleets)
        try:
            self._fleets = await asyncio.to_thread(self._fleet_names)
            failed.clear()
            for name in self._fleets:
                try:
                    await self.pass_over_fleet(name)
                except StaleLease as stale:
                    log.info("fleet %s: %s", name, stale)
                    self._fleet_leases.lose(name)
                except NotFound as gone:
                    log.info("fleet %s: %s", name, gone)
                    self._fleet_leases.drop(name)
                except Exception:
                    log.exception("fleet %s: the pass failed; it is made again", name)
                    failed.add(name)
                    if self._fleet_leases.has_lapsed(name):
                        self._leave(self._fleets)
        finally:
            self._leave(failed)

    def _leave(self, failed: Collection[FleetName]) -> None:
        """Disconnect the agents of fleets that another control-plane server manages.

        `failed` names the fleets whose last pass failed. For these, an expired lease suffices, because another server
        may have taken the fleet over unnoticed.
        """
        leases = self._fleet_leases
        elsewhere = frozenset(
            name for name in self._fleets if leases.sees_another(name) or (name in failed and leases.has_lapsed(name))
        )
        self._context.registry.leave(elsewhere)
        self.hearing.begin_anew(elsewhere)

    async def pass_over_job(self, run: RunId, around: dict[FleetName, Surroundings] | None = None) -> Decision | None:
        """Claim, observe, decide, act and apply.

        Repeat the pass while the decision requests another one immediately.

        Args:
            run: run id of the job.
            around: rows that passes over other jobs of this sweep have read. This pass adds the rows that it reads, and
                empties the mapping when it changes such rows. None: the pass shares no rows.

        Returns:
            The last decision, or None while another server holds the job's lease.

        Raises:
            StaleLease: another server took the job over during the pass. The last pass stored nothing.
            NotFound: the job was removed.
        """
        decision, around = None, around if around is not None else {}
        for _ in range(AGAIN_LIMIT):
            # The fleet's lease entitles this server to the job.
            lease = await asyncio.to_thread(partial(self._job_leases.hold, run, at_once=True))
            if lease is None:
                return None
            with self._reconciling("job"):
                stored = await asyncio.to_thread(self.observer.read_job, run, around)
                around[stored.around.name] = stored.around
                now = self._context.now().timestamp()
                spec, observed = self.observer.observe_job(stored, now)
                decision = decide_job(now, spec, observed, self._policy)
                for action in decision.actions:
                    if isinstance(action, PutManifest):
                        self.executor.put_manifest(lease, action)
                    else:
                        self.executor.tell(action)
                shards = self._shards(stored, observed, now)
                if (
                    decision.record != observed.record
                    or decision.events
                    or decision.incidents
                    or decision.implications
                    or shards
                ):
                    await asyncio.to_thread(self._apply_job, lease, stored, decision, shards, now)
                if (
                    decision.record.state is not observed.record.state
                    or decision.plan is not None
                    or decision.fleet is not None
                ):
                    around.clear()
                for incident in decision.incidents:
                    if (
                        incident.state is IncidentState.CLOSED
                        and incident.cause.is_failure
                        and incident.restored_at is not None
                    ):
                        self._context.figures.recovered(core_incidents.phase_seconds(incident, now))
                await self._follow_drill(lease, stored, observed, decision, now)
            if decision.requeue_after_seconds > 0 or decision.record.state in ENDED_JOBS or decision.fleet is not None:
                break  # the server that manages the new fleet makes the next pass
        if decision is not None and decision.record.state in ENDED_JOBS:
            self._forget(run)
        return decision

    async def pass_over_fleet(self, name: FleetName) -> FleetDecision | None:
        """Make one pass over a fleet, and return its decision.

        Return None while another server holds the fleet's lease, or before AWS has answered. Raises StaleLease if
        another server took the fleet over during the pass; nothing was stored. Raises NotFound if the fleet was
        removed.
        """
        served_before = self._fleet_leases.holds(name)
        lease = await asyncio.to_thread(self._fleet_leases.hold, name)
        if lease is None:
            return None
        if not served_before:
            # wake the job loop, which makes passes over a job only while this server holds the lease of the job's fleet
            self._context.registry.hint()
        view = self.cloud.group(name)
        if view is None:
            return None
        with self._reconciling("fleet"):
            return await self._reconcile_fleet(lease, name, view)

    async def _reconcile_fleet(self, lease: Lease, name: FleetName, view: CloudView) -> FleetDecision:
        history = await asyncio.to_thread(self.observer.read_history, name)
        now = self._context.now().timestamp()
        stored = await asyncio.to_thread(self.observer.read_fleet, name, records.at(now))
        spec, observed = self.observer.observe_fleet(stored, view, history)
        decision = core_fleets.decide(now, spec, observed, self._policy)
        await asyncio.to_thread(self._apply_fleet, lease, stored, decision, view, now)
        self._around.pop(name, None)
        for node_id in decision.forgotten:
            self._context.registry.forget(node_id)
        if decision.records:
            self._context.registry.hint()
        self.executor.change_group(
            lease,
            [action for action in decision.actions if isinstance(action, GroupAction)],
            partial(self.cloud.changed, name),
        )
        for action in decision.actions:
            if isinstance(action, SendKeepEvidence):
                self.executor.keep_evidence(lease, action)
            else:
                self.executor.tell(action)
        return decision

    @contextmanager
    def _reconciling(self, loop: Loop) -> Iterator[None]:
        """Record the duration of the block as a pass, and whether the pass lost its lease."""
        begun = self._context.monotonic()
        try:
            yield
        except StaleLease:
            self._context.figures.was_stale(loop)
            raise
        finally:
            self._context.figures.reconciled(loop, self._context.monotonic() - begun)

    async def _sweep(self, stop: asyncio.Event, sweep: Callable[[], Awaitable[None]]) -> None:
        seen = 0
        while not stop.is_set():
            begun = self._context.monotonic()
            try:
                await sweep()
            except Exception:
                log.exception("a sweep failed; it is made again")
            await pause(max(PAUSE_SECONDS, self._context.monotonic() - begun), until=stop)
            verdict_in = self.hearing.verdict_in(self._context.registry.views().values())
            seen = await self._context.registry.wait_for_change(seen, min(SWEEP_SECONDS, verdict_in + PAUSE_SECONDS))

    async def _beat(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            self.hearing.beat()
            await pause(self._context.timeouts.lease_seconds / BEATS_PER_LEASE, until=stop)

    async def _prune(self, stop: asyncio.Event) -> None:
        await repeat(
            self.prune,
            stop,
            seconds=PRUNE_SECONDS,
            trouble="what is old could not be let go",
            more_seconds=SWEEP_SECONDS,
        )

    def prune(self) -> bool:
        """Delete old rows. Return whether more may be left. Blocks: call it in a thread."""
        with self._context.database.write() as session:
            counts = prune(session, self._context.retention, self._context.now())
        if any(counts.values()):
            log.info("let go: %s", ", ".join(f"{count} {kind}" for kind, count in counts.items() if count))
        return max(counts.values()) >= self._context.retention.batch_rows

    async def _follow_drill(
        self, lease: Lease, stored: StoredJob, observed: JobObserved, decision: Decision, now: float
    ) -> None:
        """Advance a drill. The state STRUCK is stored before the fault is injected.

        If the server crashes between the two actions, no server injects the fault.
        """
        if observed.drill is None:
            return
        plan = decision.plan or observed.plan
        followed = drills.follow(observed.drill, decision.record, plan, now, self._context.timeouts)
        if followed.drill != observed.drill:
            await asyncio.to_thread(self._apply_drill, lease, stored, followed.drill, now)
        if followed.course is drills.Course.STRIKE and stored.fleet is not None:
            self.executor.strike(RunId(stored.job.run_id), stored.fleet.auto_scaling_group_name, followed.drill)

    def _apply_drill(self, lease: Lease, stored: StoredJob, drill: DrillObserved, now: float) -> None:
        job = stored.job
        with self._context.database.write() as session:
            db_drills.change(session, lease, drill.id, **records.drill_update(drill))
            message = f"{drills.in_words(drill)}: {drill.state}" + (f", {drill.outcome}" if drill.outcome else "")
            event = events.NewEvent(
                at=records.at(now),
                type="DrillStateChanged",
                message=message,
                project=job.project,
                fleet_name=job.fleet_name,
                job_name=job.name,
                node_id=drill.node_id,
            )
            events.append(session, event)

    def _live_jobs(self) -> tuple[jobs.JobRecord, ...]:
        with self._context.database.read() as session:
            return jobs.unfinished(session)

    def _fleet_names(self) -> tuple[FleetName, ...]:
        with self._context.database.read() as session:
            return tuple(FleetName(fleet.name) for fleet in fleets.every(session))

    def _apply_job(
        self,
        lease: Lease,
        stored: StoredJob,
        decision: Decision,
        shards: tuple[protection.ShardRecord, ...],
        now: float,
    ) -> None:
        """Store all results of a pass over a job in one transaction."""
        moment = records.at(now)
        before, after = stored.job, decision.record
        price = stored.fleet.price_usd_per_hour if stored.fleet is not None else None
        changes = records.job_update(after, price)
        if decision.fleet is not None:
            changes["fleet_name"] = decision.fleet
        with self._context.database.write() as session:
            if decision.fleet is not None and not fleets.takes_jobs(session, decision.fleet):
                return  # the fleet was deleted after the read; the next pass decides without it
            if decision.plan is not None:
                jobs.add_generation(session, lease, decision.plan, moment, revision=before.revision)
            if before.state != after.state.value or decision.plan is not None:
                jobs.transition(session, lease, before=before.state, after=after.state.value, now=moment, **changes)
            elif after != records.job_record(before):
                jobs.change(session, lease, **changes)
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
            if shards:
                protection.record(session, lease, shards, moment)
            for draft in decision.events:
                events.append(
                    session,
                    events.NewEvent(
                        at=moment,
                        type=draft.type,
                        message=draft.message,
                        project=before.project,
                        fleet_name=before.fleet_name,
                        job_name=before.name,
                        node_id=draft.node_id,
                        detail=draft.detail,
                    ),
                )
        if before.state != after.state.value or before.reason != after.reason:
            log.info("job %s: %s: %s", before.name, after.state.value, after.reason.partition("\n")[0])

    def _apply_fleet(
        self, lease: Lease, stored: StoredFleet, decision: FleetDecision, view: CloudView, now: float
    ) -> None:
        moment, fleet = records.at(now), stored.fleet
        state = FleetStatus.FROZEN if decision.is_frozen else FleetStatus.ACTIVE
        if fleet.delete_requested_at is not None:
            state = FleetStatus.DELETING
        changes = fleets.FleetUpdate(
            state=state.value,
            max_node_count=view.group.max_size,
            instance_type=view.instance_type,
            availability_zone=view.availability_zone,
            desired_node_count=decision.desired_count,
            vacancies=decision.vacancies,
            drift=view.group.drift,
            reason=decision.reason,
        )
        if fleet.blindness_lifted_at is not None and not decision.is_blind:
            # otherwise the column stays unchanged, because a user may have lifted the freeze after the read
            changes["blindness_lifted_at"] = None
        is_same = all(getattr(fleet, column) == value for column, value in changes.items())
        told = self.cloud.domains(FleetName(fleet.name))
        domains = {
            row.id: told[NodeId(row.id)]
            for row in stored.nodes
            if row.failure_domain is None and NodeId(row.id) in told
        }
        has_news = decision.records or decision.events or decision.implications or decision.is_empty or domains
        if is_same and not has_news:
            return
        known = {NodeId(node.id): node for node in stored.nodes}
        with self._context.database.write() as session:
            if decision.is_empty:
                fleets.remove(session, lease, moment)
                return
            if not is_same:
                fleets.change(session, lease, **changes)
            for row in decision.records:
                before = known.get(row.node_id)
                columns = records.node_update(
                    row,
                    before=None if before is None else before.state,
                    had_request=before is not None and before.request != "",
                )
                columns["instance_type"], columns["availability_zone"] = view.instance_type, view.availability_zone
                columns["ended_at"] = moment if row.state is NodeState.GONE else None
                nodes.change(session, lease, row.node_id, initial_state=NodeState.JOINING, now=moment, **columns)
                if row.state is NodeState.GONE:
                    tokens.revoke_sessions(session, row.node_id, moment)
            for node_id, domain in domains.items():
                nodes.change(
                    session, lease, node_id, initial_state=NodeState.JOINING, now=moment, failure_domain=domain
                )
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
                    message=draft.message,
                    project=project,
                    fleet_name=fleet.name,
                    node_id=draft.node_id,
                )
                events.append(session, event)
            if fleet.state != state.value:
                message = f"{fleet.state} → {state.value}: {decision.reason}"
                events.append(
                    session,
                    events.NewEvent(
                        at=moment,
                        type="FleetStateChanged",
                        message=message,
                        project=fleet.project,
                        fleet_name=fleet.name,
                    ),
                )

    def _shards(self, stored: StoredJob, observed: JobObserved, now: float) -> tuple[protection.ShardRecord, ...]:
        """Return the rows of shards to write.

        A change of holders is written immediately. Changes of steps alone are written at most once per `SWEEP_SECONDS`.
        """
        run = RunId(stored.job.run_id)
        if stored.plan is None or stored.job.state not in (JobState.RUNNING, JobState.PAUSING, JobState.STOPPING):
            return ()
        silent = unvouched(
            observed.nodes.values(), committed_at=observed.record.committed_at, now=now, timeouts=self._context.timeouts
        )
        current = tuple(
            _unvouched(shard, view.node_id, silent)
            for node in stored.plan.nodes
            if (view := self._context.registry.view(node.node_id)) is not None
            if view.report is not None and (report := view.report.member) is not None
            if report.run == run and report.generation == stored.plan.generation
            for shard in _shard_records(report, stored)
        )
        current = tuple(sorted(current, key=lambda shard: shard.rank))
        before = self._protection.get(run, ())
        if not current or current == before:
            return ()
        if _holders(current) == _holders(before) and now - self._protected_at.get(run, 0.0) < SWEEP_SECONDS:
            return ()
        self._protection[run] = current
        self._protected_at[run] = now
        return current

    def _renewed(self, lease: Lease) -> Lease:
        return (self._job_leases if lease.kind == "job" else self._fleet_leases).renewed(lease)

    def _forget(self, run: RunId) -> None:
        self._protection.pop(run, None)
        self._protected_at.pop(run, None)
        self._job_leases.drop(run)
        self.observer.forget_job(run)


@dataclass(frozen=True, slots=True)
class _Held:
    lease: Lease
    first_counter: int
    """The lease's counter at the time when this server claimed the lease from another owner."""


class _Leases:
    """The leases of one kind (jobs or fleets) that this server holds.

    A lease is renewed after a third of its duration, not in every pass. Each loop uses its own instance from one thread
    at a time. Only `renewed` may be called from other threads.
    """

    def __init__(self, context: LoopContext, kind: Loop) -> None:
        self._database = context.database
        self._figures = context.figures
        self._monotonic = context.monotonic
        self._ttl_seconds = grace_seconds(context.timeouts)
        self._leaser = Leaser(context.owner, self._ttl_seconds, context.monotonic)
        self._kind: Loop = kind
        self._held: dict[str, _Held] = {}

    def hold(self, key: str, *, at_once: bool = False) -> Lease | None:
        """Return the lease, after claiming or renewing it if necessary.

        Return None while another server holds the lease. See `Leaser.claim` for `at_once`.
        """
        held = self._held.get(key)
        if held is not None and not self._leaser.is_due(held.lease):
            return held.lease
        with self._database.write() as session:
            lease = self._leaser.claim(session, self._kind, key, at_once=at_once)
        if lease is None:
            self.lose(key)
            return None
        is_unbroken = held is not None and lease.counter == held.lease.counter + 1
        self._held[key] = _Held(lease, held.first_counter if held is not None and is_unbroken else lease.counter)
        return lease

    def renewed(self, lease: Lease) -> Lease:
        """Return the newest renewal of a lease.

        If this server has lost the lease, return the argument itself, which `guard` then rejects.
        """
        held = self._held.get(lease.key)
        return held.lease if held is not None and held.first_counter <= lease.counter else lease

    def holds(self, key: str) -> bool:
        """Return whether this server certainly still holds the lease."""
        held = self._held.get(key)
        return held is not None and self._monotonic() - held.lease.taken_at < self._ttl_seconds

    def has_lapsed(self, key: str) -> bool:
        """Return whether a lease of this server has expired.

        Another server may have taken over an expired lease.
        """
        return key in self._held and not self.holds(key)

    def sees_another(self, key: str) -> bool:
        """Return whether another server is active under this lease."""
        return key not in self._held and self._leaser.sees_another(self._kind, key)

    def lose(self, key: str) -> None:
        """Forget a lease that another server has taken over, and count the loss."""
        if self._held.pop(key, None) is not None:
            self._figures.lost_lease(self._kind)

    def drop(self, key: str) -> None:
        """Forget a lease that is no longer needed."""
        self._held.pop(key, None)

    def release_all(self) -> None:
        """Release all leases, so that other servers can claim them immediately."""
        with self._database.write() as session:
            for held in self._held.values():
                self._leaser.release(session, held.lease)
        self._held.clear()


def _shard_records(report: MemberReport, stored: StoredJob) -> list[protection.ShardRecord]:
    return [
        protection.ShardRecord(
            rank=shard.rank,
            generation=report.generation,
            owner_node_id=shard.holders[0] if shard.holders else "",
            committed_step=shard.committed,
            payload_bytes=shard.payload_bytes,
            reason=shard.reason,
            holders=tuple(
                protection.HolderRecord(node_id=holder, is_in_view=holder in shard.in_view) for holder in shard.holders
            ),
            verified=tuple(
                protection.VerifiedRecord(node_id=holder, step=step, at=records.at(at))
                # older agents do not report verified steps
                for holder, (step, at) in zip(shard.holders, shard.verified, strict=False)
                if step >= 0
            ),
        )
        for shard in report.protection
        if shard.rank < stored.job.spec.world_size
    ]


def _unvouched(shard: protection.ShardRecord, owner: NodeId, silent: frozenset[NodeId]) -> protection.ShardRecord:
    """Return the shard's status without the silent nodes in its list of holders.

    The runner calls this function while no step commits. The silent node may be lost, and its copy with it.
    """
    quiet = next(
        (
            node
            for node in (owner, *(holder.node_id for holder in shard.holders if holder.is_in_view))
            if node in silent
        ),
        None,
    )
    reason = shard.reason if quiet is None else f"the agent of {quiet} says nothing, and no step is committed"
    holders = tuple(
        replace(holder, is_in_view=holder.is_in_view and holder.node_id not in silent) for holder in shard.holders
    )
    return replace(shard, reason=reason, holders=holders)


def _holders(shards: tuple[protection.ShardRecord, ...]) -> tuple[object, ...]:
    return tuple((shard.rank, shard.generation, shard.holders, shard.reason) for shard in shards)
