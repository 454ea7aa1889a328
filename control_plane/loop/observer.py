"""Builds the input for a decision (`control_plane.core`) about a job or a fleet.

Invariant: no database session is open while this module waits for agents or AWS. An agent's silence counts only from
the time at which this server could have received a message.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy.orm import Session

from control_plane.accounts import jobs as accounts
from control_plane.core import capacity, encryption, recovery
from control_plane.core.absence import resolve_absence
from control_plane.core.actions import LAUNCH_CALL, reboot_key
from control_plane.core.encryption import ReplicaEncryption
from control_plane.core.evidence import WATCHED_FROM_LEASES, is_fleet_blind
from control_plane.core.fleets import RATE_WINDOW_SECONDS
from control_plane.core.moves import is_ready
from control_plane.core.notices import merged
from control_plane.core.observed.causes import JoinsFail, Reason, ReplacementLimit
from control_plane.core.observed.facts import InstanceEnded, Requested
from control_plane.core.observed.fleets import FleetHistory, FleetObserved, FleetSpec, NodeRecord
from control_plane.core.observed.jobs import JobObserved
from control_plane.core.observed.nodes import InstanceCondition, NodeObserved, Notice
from control_plane.core.observed.specs import JobSpec
from control_plane.core.observed.steps import CheckpointRecord, GenerationRecord
from control_plane.core.queue import QueueSchedule
from control_plane.core.states import FleetStatus, NodeState
from control_plane.core.timeouts import grace_seconds
from control_plane.db import (
    automation,
    checkpoints,
    drills,
    fleets,
    implications,
    incidents,
    intents,
    jobs,
    nodes,
    notices,
    rolls,
)
from control_plane.db.errors import NotFound
from control_plane.loop import records
from control_plane.loop.agents import AgentView
from control_plane.loop.cloud_watch import CloudView, CloudWatch
from control_plane.loop.context import LoopContext
from control_plane.loop.fleet_rows import FleetRows, read_fleet_rows, schedule_of
from everstep.protocol.ids import FleetName, Generation, NodeId, RunId, Step
from everstep.protocol.manifest import ManifestShard
from everstep.protocol.plan import GenerationPlan, Timeouts

HISTORY_SECONDS = 60.0
"""Maximum age of a cached `FleetHistory`. Each decision about a fleet would otherwise sum over all jobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredJob:
    """The database rows from which the input for a decision about one job is made."""

    job: jobs.SavedJob
    plan: GenerationPlan | None
    lineage: tuple[GenerationRecord, ...]
    checkpoints: tuple[CheckpointRecord, ...]
    dropped_checkpoints: frozenset[tuple[Generation, Step]]
    """The newest generation's newest checkpoints in any state."""
    around: FleetRows
    open_fleets: frozenset[FleetName] = frozenset()
    """Those fleets in which the job may start that accept jobs now."""
    drill: drills.DrillRecord | None = None

    @property
    def fleet(self) -> fleets.FleetRecord | None:
        """The job's fleet, or None if it was deleted after its jobs had ended."""
        return self.around.fleets.get(self.around.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFleet:
    """The database rows from which the input for a decision about one fleet is made, read in one session."""

    fleet: fleets.FleetRecord
    nodes: tuple[nodes.SavedNode, ...]
    jobs: tuple[jobs.SavedJob, ...]
    notices: tuple[notices.NoticeRecord, ...]
    implications: Mapping[str, tuple[implications.ImplicationRecord, ...]]
    replaced: tuple[datetime, ...]
    """At least the requests of the last hour. See `core.observed.fleets.FleetObserved.replaced`."""
    failed_join_count: int
    rebooted: Mapping[NodeId, datetime]
    """Time at which EC2 accepted the reboot request, for each node in state REBOOTING."""
    launch: intents.IntentRecord | None
    pause: str = ""
    """The person who paused all automatic actions, and the reason. Empty while automation is active."""


@dataclass(frozen=True, slots=True)
class _NodeFacts:
    notices: Mapping[NodeId, tuple[Notice, ...]]
    implications: Mapping[str, tuple[implications.ImplicationRecord, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sight:
    """Facts about a fleet from which the core decides about each of its jobs, computed once per `FleetRows`."""

    of: FleetRows
    turns: QueueSchedule
    assigned: Mapping[RunId, tuple[NodeId, ...]]
    newest_node_at: float | None
    spare_count: int
    is_blind: bool


class SilenceClock:
    """Measures each agent's silence, without the time in which this server could not receive messages."""

    def __init__(self, timeouts: Timeouts, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._timeouts = timeouts
        self._monotonic = monotonic
        self._listens_since = monotonic() + grace_seconds(timeouts)
        self._serves_since: dict[FleetName, float] = {}
        self._last_beat = monotonic()

    def begin_anew(self, fleets: Iterable[FleetName]) -> None:
        """Restart the grace period of fleets that another control-plane server manages now."""
        # If this server takes such a fleet over later, the fleet's agents need time to connect to it.
        for fleet in fleets:
            self._serves_since[fleet] = self._monotonic() + grace_seconds(self._timeouts)

    def beat(self) -> None:
        """Record that the server's event loop runs. After a late call, silence counts as 0 for `lease_seconds`."""
        now = self._monotonic()
        # A late call means that this process was suspended or starved.
        if now - self._last_beat > self._timeouts.lease_seconds / 2:
            self._listens_since = max(self._listens_since, now + self._timeouts.lease_seconds)
        self._last_beat = now

    def silent_seconds(self, fleet: FleetName, view: AgentView | None) -> float:
        """Return an agent's silence in seconds. It is 0 during the grace period after a start or a takeover."""
        heard_at = view.heard_at if view is not None else 0.0
        return max(
            0.0,
            self._monotonic() - max(heard_at, self._listens_since, self._serves_since.get(fleet, self._listens_since)),
        )

    def verdict_in(self, views: Iterable[AgentView]) -> float:
        """Return the seconds until the next agent has been silent for `lease_seconds`, or infinity."""
        lease = self._timeouts.lease_seconds
        left = [
            lease - silent
            for view in views
            if WATCHED_FROM_LEASES * lease < (silent := self.silent_seconds(view.fleet, view)) <= lease
        ]
        return min(left, default=float("inf"))


class Observer:
    """Builds the input for decisions from database rows, agents' reports and AWS's answers."""

    def __init__(self, context: LoopContext, cloud: CloudWatch, silence_clock: SilenceClock) -> None:
        self._context = context
        self._cloud = cloud
        self._silence_clock = silence_clock
        self._plans: dict[RunId, GenerationPlan] = {}
        self._shards: dict[RunId, dict[tuple[int, int], tuple[ManifestShard, ...]]] = {}
        """For each run, the shards of the checkpoints that the last decision considered."""
        self._sights: dict[FleetName, _Sight] = {}
        self._histories: dict[FleetName, tuple[float, FleetHistory]] = {}

    def read_fleet_rows(self, name: FleetName) -> FleetRows:
        """Read the database rows that the jobs of a fleet share. Blocks."""
        with self._context.database.read() as session:
            return read_fleet_rows(session, name)

    def read_job(self, run: RunId, known: FleetRows | None = None) -> StoredJob:
        """Read all database rows that a decision about a job needs, in one transaction. Blocks.

        `known` are rows of the job's fleet that the caller has read. Raises NotFound if the job was removed.
        """
        with self._context.database.read() as session:
            job = jobs.get_run(session, run)
            plan = self._plans.get(run)
            if plan is None or plan.generation != job.generation:
                plan = jobs.generation(session, run, job.generation).plan if job.generation else None
            name = FleetName(job.fleet_name)
            around = known if known is not None and known.name == name else read_fleet_rows(session, name)
            lineage = records.lineage_of(job, jobs.lineage(session, run))
            generation = Generation(job.generation)
            stored = StoredJob(
                job=job,
                plan=plan,
                lineage=lineage,
                checkpoints=(*_initial(session, job), *self._checkpoints(session, run, lineage)),
                dropped_checkpoints=frozenset(
                    (generation, Step(step)) for step in checkpoints.newest_steps(session, run, generation)
                ),
                around=around,
                open_fleets=frozenset(
                    name
                    for name, fleet in around.fleets.items()
                    if name in job.spec.fleet_names and _takes_in(fleet, job)
                ),
                drill=drills.open_of_run(session, run),
            )
        if plan is not None:
            self._plans[run] = plan  # Stored plans are immutable, so the observer may cache them.
        return stored

    def _checkpoints(
        self, session: Session, run: RunId, lineage: tuple[GenerationRecord, ...]
    ) -> tuple[CheckpointRecord, ...]:
        """Return the run's newest checkpoints that a restore may use, and the damaged ones between them."""
        # The number of a job's checkpoints has no limit, and each manifest has an entry per rank. A pass therefore
        # reads few rows, and decodes each manifest once.
        path = recovery.path_of(lineage, recovery.newest_started(lineage))
        rows = checkpoints.newest_usable(
            session, run, lambda generation, step: recovery.is_on_path(path, Generation(generation), Step(step))
        )
        known = self._shards.get(run, {})
        shards = {key: known[key] for each in rows if (key := (each.generation, each.step)) in known}
        new = [key for each in rows if (key := (each.generation, each.step)) not in shards]
        shards |= {key: manifest.shards for key, manifest in checkpoints.manifests(session, run, new).items()}
        self._shards[run] = shards
        found = (records.checkpoint_record(each, shards.get((each.generation, each.step))) for each in rows)
        return tuple(each for each in found if each is not None)

    def forget_job(self, run: RunId) -> None:
        """Drop the cached plan and checkpoints of an ended job."""
        self._plans.pop(run, None)
        self._shards.pop(run, None)

    def observe_job(self, stored: StoredJob, now: float) -> tuple[JobSpec, JobObserved]:
        """Return the input for a decision about a job at the time `now`, in Unix seconds. Does not wait."""
        around, run = stored.around, RunId(stored.job.run_id)
        fleet, facts = around.name, _NodeFacts(around.notices, around.implications)
        sight = self._sight(around, now)
        assigned, turns = sight.assigned.get(run, ()), sight.turns
        planned = tuple(node.node_id for node in stored.plan.nodes) if stored.plan is not None else ()
        team = dict.fromkeys([*assigned, *planned])
        is_lifted = stored.fleet is not None and stored.fleet.blindness_lifted_at is not None
        group = self._cloud.newest_group(fleet)
        failure = None if group is None else capacity.failure(group)
        first, reduction = turns.giving_way.get(run), turns.reductions.get(run)
        return records.job_spec(stored.job), JobObserved(
            record=records.job_record(stored.job),
            plan=stored.plan,
            lineage=stored.lineage,
            checkpoints=stored.checkpoints,
            dropped_checkpoints=stored.dropped_checkpoints,
            assigned=assigned,
            nodes={
                node_id: self._node(
                    fleet, node_id, around.nodes.get(node_id), self._context.registry.view(node_id), facts
                )
                for node_id in team
            },
            price_usd_per_hour=stored.fleet.price_usd_per_hour if stored.fleet is not None else None,
            drill=None if stored.drill is None else records.drill(stored.drill),
            is_admitted=run in turns.admitted,
            gives_way_to=f"{first.job} (priority {first.priority})" if first is not None else "",
            keep_count=None if reduction is None else reduction.keep_count,
            returns_to=f"{reduction.head.job} (priority {reduction.head.priority})" if reduction is not None else "",
            queue_words=accounts.queue_words(turns, run),
            newest_node_at=sight.newest_node_at,
            spare_count=sight.spare_count,
            is_fleet_blind=sight.is_blind and not is_lifted,
            lack_reasons=_what_holds(stored.fleet) if failure is None else (failure,),
            failed_launches=None if group is None else capacity.failed_launches(group),
            launch_failed_at=None if group is None else group.failed_at,
            open_fleets=stored.open_fleets,
            encrypts_peers=stored.fleet is not None
            and encryption.is_needed(
                ReplicaEncryption(stored.fleet.replica_encryption),
                {row.instance_type for node_id in assigned if (row := around.nodes.get(node_id)) is not None},
                stored.fleet.encrypting_types,
            ),
        )

    def _sight(self, around: FleetRows, now: float) -> _Sight:
        # The result of the last call for each fleet is valid for the same `FleetRows` object.
        known = self._sights.get(around.name)
        if known is not None and known.of is around:
            return known
        facts = _NodeFacts(around.notices, around.implications)
        in_use = {
            node_id: row for node_id, row in around.nodes.items() if row.state in (NodeState.SPARE, NodeState.ASSIGNED)
        }
        seen = {
            node_id: self._node(around.name, node_id, row, self._context.registry.view(node_id), facts)
            for node_id, row in in_use.items()
        }
        assigned: dict[RunId, tuple[NodeId, ...]] = {}
        for node_id, row in in_use.items():
            if row.state == NodeState.ASSIGNED and row.run_id is not None:
                assigned[RunId(row.run_id)] = (*assigned.get(RunId(row.run_id), ()), node_id)
        self._sights[around.name] = sight = _Sight(
            of=around,
            turns=schedule_of(around.fleets.get(around.name), around.jobs, around.nodes.values(), now),
            assigned=assigned,
            newest_node_at=max((row.created_at.timestamp() for row in around.nodes.values()), default=None),
            spare_count=sum(
                row.state == NodeState.SPARE and is_ready(seen[node_id], now, self._context.timeouts)
                for node_id, row in in_use.items()
            ),
            is_blind=is_fleet_blind(seen.values(), self._context.timeouts),
        )
        return sight

    def read_history(self, name: FleetName) -> FleetHistory:
        """Read a fleet's history of failures and replacements, cached for `HISTORY_SECONDS`. Blocks."""
        kept = self._histories.get(name)
        if kept is None or self._context.monotonic() - kept[0] > HISTORY_SECONDS:
            with self._context.database.read() as session:
                count, seconds = nodes.arrivals(session, name)
                history = FleetHistory(
                    node_seconds=jobs.totals(session, name, ()).node_microseconds / 1_000_000,
                    lost_node_count=incidents.totals(session, fleet_name=name).lost_node_count,
                    replacement_count=count,
                    replacement_seconds=seconds,
                )
            kept = self._histories[name] = (self._context.monotonic(), history)
        return kept[1]

    def read_fleet(self, name: FleetName, now: datetime) -> StoredFleet:
        """Read a fleet with its nodes and unfinished jobs, in one transaction. Blocks. Raises NotFound."""
        with self._context.database.read() as session:
            rows = nodes.of_fleet(session, name)
            keys = {
                reboot_key(row.node_id, row.since): row.node_id
                for row in map(records.node_record, rows)
                if row.state is NodeState.REBOOTING
            }
            return StoredFleet(
                fleet=fleets.get(session, name),
                nodes=rows,
                jobs=jobs.unfinished(session, name),
                notices=notices.of_fleet(session, name),
                implications=implications.of_fleet(session, name),
                replaced=nodes.replaced_since(session, name, now - timedelta(seconds=RATE_WINDOW_SECONDS)),
                failed_join_count=nodes.failed_join_count(session, name),
                rebooted={keys[key]: at for key, at in intents.done_at(session, keys).items()} if keys else {},
                launch=intents.newest(session, f"fleet/{name}", LAUNCH_CALL),
                pause=automation.words(session),
            )

    def observe_fleet(
        self, stored: StoredFleet, view: CloudView, history: FleetHistory
    ) -> tuple[FleetSpec, FleetObserved]:
        """Return the input for a decision about a fleet. Does not wait."""
        name = FleetName(stored.fleet.name)
        views = self._context.registry.views()
        by_id = {NodeId(row.id): row for row in stored.nodes}
        facts = _NodeFacts(records.notices_of(stored.notices), stored.implications)
        table: tuple[NodeRecord, ...] = tuple(
            records.node_record(row) for row in by_id.values() if row.state != NodeState.GONE
        )
        ids = dict.fromkeys([*(row.node_id for row in table), *(member.node_id for member in view.group.members)])
        return records.fleet_spec(stored.fleet), FleetObserved(
            group=view.group,
            records=table,
            nodes={
                node_id: self._node(name, node_id, by_id.get(node_id), views.get(node_id), facts) for node_id in ids
            },
            jobs=tuple(records.fleet_job(job) for job in stored.jobs),
            history=history,
            vacancies=stored.fleet.vacancies,
            replaced=tuple(moment.timestamp() for moment in stored.replaced),
            failed_join_count=stored.failed_join_count,
            rebooted={node_id: moment.timestamp() for node_id, moment in stored.rebooted.items()},
            launch=None if stored.launch is None else records.launch_record(stored.launch),
            roll=rolls.roll_of(stored.fleet),
            roll_progress=rolls.progress_of(stored.fleet),
        )

    def _node(
        self, fleet: FleetName, node_id: NodeId, row: nodes.SavedNode | None, view: AgentView | None, facts: _NodeFacts
    ) -> NodeObserved:
        silent_seconds = self._silence_clock.silent_seconds(fleet, view)
        reported, ended = self._cloud.condition(fleet, node_id)
        condition = resolve_absence(
            reported,
            is_connected=view is not None and view.is_connected,
            silent_seconds=silent_seconds,
            timeouts=self._context.timeouts,
        )
        if row is not None and row.state == NodeState.GONE and condition is not InstanceCondition.ENDED:
            condition = InstanceCondition.ENDED
            ended = row.reason if isinstance(row.reason, InstanceEnded) else None
        returned_at = row.returned_at if row is not None else None
        lines = [line for line in facts.implications.get(node_id, ()) if returned_at is None or line.at > returned_at]
        report = view.report if view is not None else None
        if (
            silent_seconds > WATCHED_FROM_LEASES * self._context.timeouts.lease_seconds
            and condition is not InstanceCondition.ENDED
        ):
            self._cloud.suspect(fleet, node_id)
        return NodeObserved(
            node_id=node_id,
            instance=condition,
            ended=ended,
            failed_status_check=self._cloud.failed_status_check(fleet, node_id),
            is_connected=view is not None and view.is_connected,
            silent_seconds=silent_seconds,
            heard_at=view.heard_at_seconds if view is not None else None,
            address=view.hello.address if view is not None else (row.address if row is not None else ""),
            peer_port=view.hello.peer_port if view is not None else (row.peer_port if row is not None else 0),
            protocol_minor=view.hello.protocol_minor if view is not None and view.is_connected else None,
            has_reported=report is not None,
            is_warm=report is not None and report.is_warm,
            sources=frozenset(report.sources) if report is not None else frozenset(),
            member=report.member if report is not None else None,
            faults=report.faults if report is not None else (),
            burn_in=report.burn_in if report is not None else None,
            history=tuple(records.implication(line) for line in lines),
            request=row.request if row is not None and isinstance(row.request, Requested) else None,
            domain=row.failure_domain if row is not None else None,
            notices=merged([*facts.notices.get(node_id, ()), *records.own_notices(report)]),
        )


def _initial(session: Session, job: jobs.SavedJob) -> tuple[CheckpointRecord, ...]:
    """Return another job's checkpoint from which this job starts. Empty without one, or if it was removed."""
    initial = job.spec.initial
    if initial is None:
        return ()
    try:
        stored = checkpoints.find(session, initial.run_id, step=initial.step, generation=initial.generation)
    except NotFound:
        return ()
    found = records.initial_checkpoint(stored)
    return () if found is None else (found,)


def _takes_in(fleet: fleets.FleetRecord, job: jobs.SavedJob) -> bool:
    is_open = (
        fleet.state == FleetStatus.ACTIVE
        and fleet.delete_requested_at is None
        and job.spec.node_count <= fleet.max_node_count
    )
    return is_open and (job.spec.max_cost_usd is None or fleet.price_usd_per_hour is not None)


def _what_holds(fleet: fleets.FleetRecord | None) -> tuple[Reason, ...]:
    reasons = () if fleet is None else fleet.reasons
    return reasons if any(isinstance(reason, ReplacementLimit | JoinsFail) for reason in reasons) else ()
