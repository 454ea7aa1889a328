"""Forecasts the start, the cost and the protection of a job for a dry run of CreateTrainingJob. Pure.

It uses the same functions as the server's background loops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from control_plane.accounts import jobs as accounts
from control_plane.api.schemas import jobs as jobs_schemas
from control_plane.api.schemas import plans as plans_schemas
from control_plane.api.views import MICRO, ODDS_UP_TO_LOST, History, queued_behind
from control_plane.core import forecast, parity, placement, slot_memory
from control_plane.core.observed.fleets import FleetJob
from control_plane.core.queue import QueueSchedule
from control_plane.core.states import JobState, NodeState
from control_plane.db.fleets import FleetRecord
from control_plane.db.jobs import SavedJobSpec
from control_plane.db.nodes import SavedNode
from control_plane.db.quotas import QuotaRecord
from everstep.protocol.ids import JobName, NodeId, RunId


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetNow:
    """The current state of the fleet of a dry run."""

    record: FleetRecord
    nodes: Sequence[SavedNode]
    """Nodes of the fleet, without ended ones."""
    connected: frozenset[NodeId]
    history: History


def waiting(
    request: jobs_schemas.CreateTrainingJobRequest, run_id: str, now: float, *, project: str, quota: QuotaRecord | None
) -> FleetJob:
    """Return the queue entry for `schedule` of a job that an admitted request would create now (Unix seconds)."""
    return FleetJob(
        job=JobName(request.training_job_name),
        run=RunId(run_id),
        state=JobState.QUEUED,
        node_count=request.node_count,
        least_node_count=request.elastic_config.min_node_count or request.node_count,
        most_node_count=request.elastic_config.max_node_count or request.node_count,
        priority=request.priority,
        created_at=now,
        is_preemptible=request.preemptible,
        project=project,
        quota=quota.max_node_count if quota is not None else None,
    )


def plan(
    spec: SavedJobSpec, job: FleetJob, turns: QueueSchedule, fleet: FleetNow, *, only_project: str | None = None
) -> plans_schemas.TrainingJobPlan:
    """Return the forecast of a job: its start, and its expected cost, memory per node and recovery.

    `turns` is the fleet's schedule with this job in the queue. `only_project` hides jobs of other projects; None names
    all.
    """
    record = fleet.record
    free = sum(node.state == NodeState.SPARE and NodeId(node.id) in fleet.connected for node in fleet.nodes)
    memory = min((node.memory_bytes for node in fleet.nodes if node.memory_bytes), default=None)
    price = record.price_usd_per_hour
    expected = forecast.expected(
        spec.node_count,
        node_seconds=fleet.history.jobs.node_microseconds / MICRO,
        failure_count=fleet.history.incidents.failure_count,
        mean_recovery_seconds=fleet.history.incidents.mean_recovery_seconds,
    )
    is_its_turn = job.run in turns.admitted
    return plans_schemas.TrainingJobPlan(
        fleet_name=record.name,
        node_count=spec.node_count,
        ranks_per_node=spec.ranks_per_node,
        world_size=spec.world_size,
        copies=spec.copies,
        parity_group_size=spec.parity_group_size,
        elasticity=accounts.forecast_words(spec) or None,
        slots_per_node=slot_memory.slots_per_node(spec),
        memory_ratio=float(slot_memory.memory_ratio(spec)),
        copies_memory_ratio=None if spec.parity_group_size is None else slot_memory.ratio_of_copies(spec),
        node_memory_bytes=memory,
        largest_shard_bytes=None if memory is None else slot_memory.largest_shard_bytes(spec, memory),
        recovery_odds=[
            plans_schemas.RecoveryOdds(lost_nodes=lost, probability=_recovery_probability(spec, lost))
            for lost in range(1, min(ODDS_UP_TO_LOST, spec.node_count) + 1)
        ],
        can_start_now=is_its_turn and free >= spec.node_count,
        queue_position=turns.place_of(job.run),
        queued_behind=queued_behind(turns, job.run, only_project),
        waits_for=_waits_for(spec, job, turns, free) if not (is_its_turn and free >= spec.node_count) else None,
        free_node_count=free,
        nodes_to_launch=max(0, spec.node_count - free) if is_its_turn else 0,
        cost_usd_per_hour=None if price is None else price * spec.node_count,
        most_cost_usd=_most_cost_usd(spec, price),
        expected_mttf_seconds=None if expected is None else expected.mttf_seconds,
        expected_recovery_seconds=None if expected is None else expected.mttr_seconds,
        expected_ettr_ratio=None if expected is None else expected.ettr_ratio,
    )


def _recovery_probability(spec: SavedJobSpec, lost_count: int) -> float:
    if spec.parity_group_size is not None:
        return parity.recovery_probability(spec.node_count, spec.parity_group_size, lost_count)
    return placement.recovery_probability(spec.node_count, spec.copies, lost_count)


def _most_cost_usd(spec: SavedJobSpec, price: float | None) -> float | None:
    by_time = (
        None
        if price is None or spec.max_runtime_seconds is None
        else price * spec.node_count * spec.max_runtime_seconds / 3600
    )
    return min((bound for bound in (spec.max_cost_usd, by_time) if bound is not None), default=None)


def _waits_for(spec: SavedJobSpec, job: FleetJob, turns: QueueSchedule, free: int) -> str:
    if job.run not in turns.admitted:
        return accounts.queue_words(turns, job.run)
    missing = spec.node_count - free
    start = accounts.start_words(spec)
    return f"{missing} more node{'s' if missing != 1 else ''}; {free} of {spec.node_count} are free now" + (
        f"; {start}" if start else ""
    )
