"""Decides about the unfinished jobs. A *pass* over a job is: claim the lease, observe, decide, execute and store.

A pass writes rows of its own job only. Passes over jobs of one fleet share the fleet's queue, so a transaction that
stores a job's place in it first computes the queue again (docs/adr/0034-passes-run-side-by-side.md).

Invariant: a pass stores all its results under the job's lease in one transaction, or none. Its messages follow from
state that an earlier pass stored. No two passes over one job run at the same time. A pass stores nothing after this
server has lost the lease of the job or of its fleet.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace
from functools import partial

from control_plane.accounts import jobs as accounts
from control_plane.accounts import responses
from control_plane.core import drills
from control_plane.core import incidents as core_incidents
from control_plane.core.actions import Decision, JobAction, PutManifest, Send, SendLoad
from control_plane.core.job import decide
from control_plane.core.observed.jobs import JobObserved
from control_plane.core.observed.specs import Policy
from control_plane.core.states import ENDED_JOBS, IncidentState, JobState
from control_plane.db import jobs
from control_plane.db.errors import NotFound, StaleLease
from control_plane.db.leases import Lease
from control_plane.loop.cloud_watch import CloudWatch
from control_plane.loop.context import LoopContext
from control_plane.loop.decision_store import DecisionStore
from control_plane.loop.executor import Executor
from control_plane.loop.fleet_rows import SharedRows
from control_plane.loop.held_leases import HeldLeases
from control_plane.loop.observer import Observer, StoredJob
from control_plane.loop.protection_watch import ProtectionWatch
from control_plane.loop.scheduler import Scheduler
from control_plane.loop.store_listings import StoreListings
from everstep.host.log_records import about
from everstep.protocol.ids import FleetName, RunId

log = logging.getLogger(__name__)

# A pass needs at most one database connection, and a server has 15. A higher limit would not be faster, because the
# database executes one write at a time (`db/session.py`).
PASS_LIMIT = 8
"""Limit of simultaneous passes. It is above 1, so that a few slow jobs do not delay other jobs."""
PATIENCE_SECONDS = 0.1
"""Seconds for which a sweep waits for the ends of its passes, once all have begun."""
AGAIN_LIMIT = 8
"""Limit of passes over one job in a row, if each decision requests the next one at once."""


@dataclass(eq=False)
class JobLoop:
    """Makes passes over the jobs of the fleets that this server manages."""

    context: LoopContext
    observer: Observer
    executor: Executor
    store: DecisionStore
    cloud: CloudWatch
    leases: HeldLeases
    fleet_leases: HeldLeases
    """Only the holder of a fleet's lease makes passes over the fleet's jobs."""

    def __post_init__(self) -> None:
        self._protection = ProtectionWatch(self.context.registry, self.context.timeouts)
        self._listings = StoreListings(self.context.objects, self.executor, self.context.now)
        self._shared = SharedRows(self.observer.read_fleet_rows)
        self._sent: dict[RunId, frozenset[tuple[str, str]]] = {}
        """Kind and node of each message of the last decision. Traces omit messages that are sent again."""
        self._live: dict[RunId, jobs.SavedJob] = {}
        self._scheduler = Scheduler(self._process, PASS_LIMIT, self.context.monotonic)

    def forget_rows(self, name: FleetName) -> None:
        """Drop the cached rows of a fleet. The fleet loop calls this method after it has stored a decision."""
        self._shared.forget(name)

    async def sweep(self) -> None:
        """Process each unfinished job once, and wait up to `PATIENCE_SECONDS` after the last work has begun."""
        if any(True for _ in self.context.registry.take_lost()):
            self.cloud.poll_now()
        self._shared.forget()
        live = [job for job in await asyncio.to_thread(self._live_jobs) if self.fleet_leases.holds(job.fleet_name)]
        self._live = {RunId(job.run_id): job for job in live}
        closely = (
            job
            for job in live
            if job.state not in (JobState.QUEUED, JobState.RUNNING) or job.memo.get("incident") is not None
        )
        self.context.registry.watch_closely(frozenset(RunId(job.run_id) for job in closely))
        self._scheduler.retain(frozenset(self._live))
        await self._scheduler.sweep(self._live, PATIENCE_SECONDS)

    async def idle(self) -> None:
        """Wait until no job needs a pass, and no pass runs."""
        await self._scheduler.idle()

    async def close(self) -> None:
        """Begin no further pass, and wait for passes in progress. The caller then releases the leases."""
        await self._scheduler.close()

    def cancel(self) -> None:
        """Cancel all passes in progress. The runner calls this method before it releases the leases."""
        self._scheduler.cancel()

    async def _process(self, run: RunId) -> None:
        job = self._live.get(run)
        if job is None:
            return  # The job has ended, or another server has taken its fleet over, since this call was scheduled.
        with about(job=job.name, run=run, generation=job.generation or None):
            try:
                await self.make_pass(run)
            except StaleLease as stale:
                log.info("job %s: %s", job.name, stale)
                self.leases.lose(run)
            except NotFound as gone:
                log.info("job %s: %s", job.name, gone)
                self.leases.drop(run)
            except Exception:
                log.exception("job %s (run %s): the pass failed; the next pass retries", job.name, run)
                raise

    async def make_pass(self, run: RunId) -> Decision | None:
        """Make passes over a job of the last sweep, while each decision requests another pass at once.

        Return the last decision, or None while another server holds the lease of the job or of its fleet. Raises
        StaleLease if another server took the job over during the pass; the last pass stored nothing. Raises NotFound if
        the job was removed.
        """
        decision, fleet = None, FleetName(self._live[run].fleet_name)
        for _ in range(AGAIN_LIMIT):
            # Only the server with the fleet's lease may claim the job's lease. Otherwise, two servers could repeatedly
            # take the job's lease from each other.
            if not self.fleet_leases.holds(fleet):
                return None
            lease = await asyncio.to_thread(partial(self.leases.hold, run, at_once=True))
            if lease is None:
                return None
            with self.context.loop_metrics.measured_pass("job", self.context.monotonic):
                around = await self._shared.get(fleet)
                stored = await asyncio.to_thread(self.observer.read_job, run, around)
                now = self.context.now().timestamp()
                spec, observed = self.observer.observe_job(stored, now)
                observed = replace(observed, listing=self._listings.newest(run))
                policy = Policy(
                    timeouts=self.context.timeouts, pause=stored.around.pause, is_local=self.context.is_local
                )
                decision = decide(now, spec, observed, policy)
                if not self.fleet_leases.holds(fleet):
                    # This server has lost the fleet's lease, so drop the decision. Keep the job's lease, because this
                    # server may get the fleet's lease again.
                    return None
                for action in decision.actions:
                    if isinstance(action, PutManifest):
                        self.executor.put_manifest(lease, action)
                    else:
                        self.executor.send(action)
                if decision.record.repeat is None:
                    self._listings.forget(run)
                else:
                    self._listings.refresh(run, spec.checkpoint_prefix)
                shards = self._protection.changed(stored, observed, now)
                if (
                    decision.record != observed.record
                    or decision.events
                    or decision.incidents
                    or decision.implications
                    or shards
                ):
                    is_stored = await asyncio.to_thread(
                        self.store.apply_job, lease, stored, observed, decision, shards, now
                    )
                    if not is_stored:
                        self._shared.forget(fleet)
                        decision = None
                        continue
                    self._protection.stored(run, shards, now)
                if (
                    decision.record.state is not observed.record.state
                    or decision.plan is not None
                    or decision.fleet is not None
                ):
                    self._shared.forget()
                for incident in decision.incidents:
                    if (
                        incident.state is IncidentState.CLOSED
                        and incident.cause.is_failure
                        and not incident.is_given_up
                    ):
                        self.context.loop_metrics.recovered(core_incidents.phase_seconds(incident, now))
                self._trace(run, observed, decision, now)
                await self._follow_drill(lease, stored, observed, decision, now)
            if decision.requeue_after_seconds > 0 or decision.record.state in ENDED_JOBS or decision.fleet is not None:
                break  # After a move to another fleet, the server that manages that fleet decides next.
        if decision is not None and decision.record.state in ENDED_JOBS:
            self._forget(run)
        return decision

    def _trace(self, run: RunId, before: JobObserved, decision: Decision, now: float) -> None:
        tracer = self.context.tracer
        if not tracer.is_recording:
            return
        ended = self.context.now().timestamp()
        after: dict[str, str | int] = {
            "generation": decision.record.issued_generation,
            "reason": accounts.reason(decision.record.reason),
        }
        if decision.record.state is not before.record.state:
            tracer.record(f"job {decision.record.state}", run, now, ended, after)
        sent = frozenset(map(_sent, decision.actions))
        for kind, node_id in sorted(sent - self._sent.get(run, frozenset())):
            tracer.record(f"send {kind}", run, now, ended, {**after, "node_id": node_id})
        self._sent[run] = sent
        for incident in decision.incidents:
            if incident.state is IncidentState.CLOSED:
                facts = {
                    "incident_id": incident.id,
                    "cause": incident.cause.value,
                    "decision": responses.response(incident.decision),
                }
                tracer.record("recovery", run, incident.failed_at, now, {**after, **facts})

    async def _follow_drill(
        self, lease: Lease, stored: StoredJob, observed: JobObserved, decision: Decision, now: float
    ) -> None:
        if observed.drill is None or stored.around.pause:
            return
        plan = decision.plan or observed.plan
        followed = drills.follow(observed.drill, decision.record, plan, now, self.context.timeouts)
        # The state STRUCK is stored before the fault is injected. After a crash in between, no server injects it.
        if followed.drill != observed.drill:
            await asyncio.to_thread(self.store.apply_drill, lease, stored, followed.drill, now)
        if followed.course is drills.DrillCourse.STRIKE and stored.fleet is not None:
            self.executor.strike(RunId(stored.job.run_id), stored.fleet.auto_scaling_group_name, followed.drill)

    def _live_jobs(self) -> tuple[jobs.SavedJob, ...]:
        with self.context.database.read() as session:
            return jobs.unfinished(session)

    def _forget(self, run: RunId) -> None:
        self._protection.forget(run)
        self.leases.drop(run)
        self.observer.forget_job(run)
        self._sent.pop(run, None)


def _sent(action: JobAction) -> tuple[str, str]:
    match action:
        case Send(node_id, message):
            return type(message).__name__, node_id
        case SendLoad(node_id=node_id):
            return "Load", node_id
        case PutManifest():
            return "PutManifest", ""
