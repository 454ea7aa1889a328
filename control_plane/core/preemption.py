"""Decides which jobs release nodes so that the first job of the queue can start. Pure.

    rule   job that releases nodes                its priority            the job
    1      elastic, with more than NodeCount      any                     returns the nodes beyond its NodeCount
    2      still waits for all of its nodes       lower than first job's  returns to the queue
    3      preemptible and elastic                lower than first job's  continues on fewer nodes
    4      preemptible                            lower than first job's  pauses

The rules apply in this order, and only if all jobs together release enough. Jobs release no more than the first job
needs. A running job releases nodes at an agreed stop, so it loses no step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from control_plane.core.observed.fleets import FleetJob
from control_plane.core.states import JobState
from everstep.protocol.ids import RunId

LEAVING = frozenset({JobState.PAUSING, JobState.STOPPING})


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """A running job stops all its ranks at the same step, and continues with fewer nodes."""

    keep_count: int
    head: FleetJob
    """The job that receives the nodes."""


def kept_counts(
    head: FleetJob, holding: Sequence[FleetJob], counts: Mapping[RunId, int], free: int, now: float
) -> dict[RunId, int]:
    """Return how many nodes other jobs keep if they release enough for the head of the queue, or nothing.

    `free` is negative if running jobs that have precedence still lack nodes.
    """
    missing = head.needed_count(now) - free - sum(counts[job.run] for job in holding if job.state in LEAVING)
    kept: dict[RunId, int] = {}
    touched: list[FleetJob] = []
    gained = 0
    for job, keep_count in _steps(head, holding, now):
        if gained >= missing:
            break
        released = kept.get(job.run, counts[job.run]) - keep_count
        if released > 0:
            kept[job.run] = keep_count
            gained += released
            touched = [*(other for other in touched if other is not job), job]
    if gained < missing:
        return {}
    # Together, the jobs in `touched` may release more nodes than the first job of the queue needs. Leave the surplus to
    # the jobs in `touched`, beginning with the last job. A job that releases all of its nodes receives none of the
    # surplus if it cannot train on so few nodes.
    for job in reversed(touched):
        most = min(counts[job.run], kept[job.run] + gained - missing)
        if kept[job.run] == 0 and most < _least(job, now) and most < counts[job.run]:
            continue
        gained -= most - kept[job.run]
        kept[job.run] = most
    return {run: count for run, count in kept.items() if count < counts[run]}


def yields_to(job: FleetJob, other: FleetJob) -> bool:
    """Return whether `job`, which holds fewer nodes than its NodeCount, lets the queued job `other` start first."""
    return (job.is_preemptible or job.state is JobState.ALLOCATING) and job.priority < other.priority


def can_stop(job: FleetJob, now: float) -> bool:
    """Return whether a job can stop at an agreed step now and lose almost no work."""
    return (
        job.state is JobState.RUNNING and job.is_settled and (job.no_pause_before is None or now >= job.no_pause_before)
    )


def in_order_of_release(holding: Iterable[FleetJob]) -> list[FleetJob]:
    """Return jobs in the order in which they release nodes: the lowest priority first, then the youngest."""
    return sorted(holding, key=lambda job: (job.priority, -job.created_at, job.run))


def _steps(head: FleetJob, holding: Sequence[FleetJob], now: float) -> list[tuple[FleetJob, int]]:
    """Return which jobs could release nodes, in the order of the module's table, and how many each would keep."""
    jobs = in_order_of_release(holding)
    lower = [job for job in jobs if job.priority < head.priority]
    preemptible = [job for job in lower if job.is_preemptible and can_stop(job, now)]
    return [
        *((job, job.node_count) for job in jobs if can_stop(job, now)),
        *((job, 0) for job in lower if job.state is JobState.ALLOCATING and not job.is_taken_over),
        *((job, _least(job, now)) for job in preemptible),
        *((job, 0) for job in preemptible),
    ]


def _least(job: FleetJob, now: float) -> int:
    is_preemptible = job.is_preemptible and can_stop(job, now)
    return (job.least_node_count or job.node_count) if is_preemptible else job.node_count
