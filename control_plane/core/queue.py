"""The queue of a fleet: which jobs may hold nodes, which may start early, and which must release their nodes.

    capacity  8   running: big 5          free 3
    queue     1.  head, needs 6           waits: 3 are free, 8 once big has ended
              2.  small, needs 2          may start: head still has the 6 nodes that it needs once big has ended
              3.  other, needs 3          may not start: head would have only 5 nodes once big has ended

The fleet serves its queue by priority, then by age. The first job that does not fit is the head. No other job may delay
the head:

- **Backfill.** A job behind the head may start only on nodes that the head cannot use. Running jobs can end at any time
  and in any order (`MaxRuntimeInSeconds` is the latest end, not the earliest). Therefore the rule considers every
  subset of the running jobs that may remain. If the head fits beside a subset, the head must also fit beside this
  subset plus the new job.
- **Preemption.** For a head of higher priority, preemptible jobs pause (an agreed stop with a checkpoint), lowest
  priority and youngest first. The fewest possible jobs pause. No job pauses if all of them together do not free enough
  nodes. A job that still waits for some of its nodes (its gang) returns to the queue without a loss.
- **Quotas.** A job that would exceed its project's quota waits outside the queue. Such a job cannot be the head, and no
  other job releases nodes for it.
- **Pauses.** A job that a person paused also releases its nodes at an agreed stop. It returns to the queue when a
  person resumes it.
- **Growth.** While no job waits in the queue, an elastic job may hold more nodes than it needs to start. A later job
  waits for the nodes that the elastic job uses.
- **Patience.** An incomplete gang that receives no node for `GANG_PATIENCE_SECONDS` releases its nodes. The job then
  stands aside: for a while, it neither holds nodes nor delays other jobs. This time grows with each attempt.

Invariant: pure. The loops of jobs and fleets call the same function and get the same result. Jobs release nodes for
another job only by these rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from control_plane.core.observed.fleets import FleetJob
from control_plane.core.states import HOLDING_JOBS, LAUNCHED_JOBS, JobState
from everstep.protocol.ids import RunId

STAND_ASIDE_SECONDS = 900.0
MOST_STAND_ASIDE_SECONDS = 7_200.0
"""Longest time for which a job that did not get all its nodes stands aside.

The time starts at `STAND_ASIDE_SECONDS` and doubles with each attempt.
"""
PAUSE_AGAIN_SECONDS = 600.0
"""Seconds after a failed pause before the control plane requests another pause of the same job."""
_LEAVING = frozenset({JobState.PAUSING, JobState.STOPPING})


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The current schedule of a fleet's jobs."""

    admitted: frozenset[RunId]
    """Jobs that may hold nodes: jobs that hold nodes now, and queued jobs that may start."""
    giving_way: Mapping[RunId, FleetJob]
    """Jobs that must release their nodes. The value for each job is the job that receives the nodes."""
    waiting: tuple[FleetJob, ...]
    """Jobs that wait in the queue, in order. Jobs that stand aside come last."""
    limited: Mapping[RunId, int]
    """Waiting jobs that would exceed their project's quota.

    The value for each job is the number of nodes that its project holds.
    """
    capacity: int
    free_count: int
    """Number of nodes that remain free under this schedule."""
    counts: Mapping[RunId, int] = field(default_factory=dict[RunId, int])
    """Number of nodes that each admitted job may hold."""

    def place_of(self, run: RunId) -> int | None:
        """Return a job's position in the queue, counted from 1. Return None if the job does not wait in the queue."""
        return next((place for place, job in enumerate(self.waiting, 1) if job.run == run), None)

    def ahead_of(self, run: RunId) -> tuple[FleetJob, ...]:
        """Return the jobs that are ahead of a job in the queue."""
        place = self.place_of(run)
        return self.waiting[: place - 1] if place is not None else ()


def schedule(jobs: Iterable[FleetJob], capacity: int, now: float) -> Schedule:
    """Return which jobs may hold nodes.

    Every pass over a job or a fleet calls this function.

    Args:
        jobs: the unfinished jobs of one fleet. A job that a person paused does not wait in the queue.
        capacity: number of nodes that jobs may hold: the group's MaxSize minus held nodes.
        now: Unix seconds.

    Returns:
        The schedule, the same for the same input.
    """
    every = tuple(job for job in jobs if not (job.is_paused and job.state is JobState.QUEUED))
    holding = [job for job in every if job.state in HOLDING_JOBS]
    queued = in_order(job for job in every if job.state is JobState.QUEUED)
    aside = [job for job in queued if _stands_aside(job, now)]
    queue = [job for job in queued if not _stands_aside(job, now)]
    runs = {job.run for job in holding}
    free = capacity - sum(job.claim_count for job in holding)
    limited: list[FleetJob] = []
    while queue:
        if not _is_within_quota(queue[0], holding):
            limited.append(queue.pop(0))
        elif queue[0].node_count <= free:
            free -= queue[0].node_count
            runs.add(queue[0].run)
            holding.append(queue.pop(0))
        else:
            break
    waiting, giving_way = queue, dict[RunId, FleetJob]()
    if queue:
        head, waiting = queue[0], queue[:1]
        giving_way = {job.run: head for job in _victims(head, holding, free, now)}
        for job in queue[1:]:
            if not _is_within_quota(job, holding):
                limited.append(job)
            elif job.node_count <= free and cannot_delay(
                head.node_count, job.node_count, [other.claim_count for other in holding], capacity
            ):
                free -= job.node_count
                runs.add(job.run)
                holding.append(job)
            else:
                waiting.append(job)
    return Schedule(
        admitted=frozenset(runs),
        giving_way=giving_way,
        waiting=(*waiting, *limited, *aside),
        limited={job.run: _held_by(job.project, holding) for job in limited},
        capacity=capacity,
        free_count=max(0, free),
        counts=_counts(holding, 0 if queue or aside else free),
    )


def cannot_delay(head_count: int, newcomer_count: int, holding_counts: Sequence[int], capacity: int) -> bool:
    """Return whether a new job can start without a delay for the head of the queue.

    The result is valid for every order in which the other jobs may end.

    Args:
        head_count: nodes that the head needs.
        newcomer_count: nodes that the new job would take.
        holding_counts: number of nodes of each job that holds nodes now.
        capacity: number of nodes that all jobs together may hold.

    Returns:
        True if the following holds for every subset of the jobs that hold nodes: if the head fits beside the subset, it
        also fits beside the subset and the new job.
    """
    reachable = 1  # Bit n is set if some subset of the jobs with nodes holds exactly n nodes.
    for count in holding_counts:
        reachable |= reachable << count
    # If the remaining jobs use fewer than `least` nodes, both jobs fit. If the number is in `critical`, only the head
    # fits.
    least = max(0, capacity - head_count - newcomer_count + 1)
    critical = range(least, capacity - head_count + 1)
    return not any(reachable >> taken & 1 for taken in critical)


def in_order(jobs: Iterable[FleetJob]) -> list[FleetJob]:
    """Return jobs in the order of service: recovering jobs first, then by priority, then by age."""
    return sorted(jobs, key=lambda job: (job.state not in LAUNCHED_JOBS, -job.priority, job.created_at, job.run))


def stand_aside_seconds(attempt_count: int) -> float:
    """Return how long a job stands aside, in seconds, after `attempt_count` waits for nodes that did not arrive."""
    return min(MOST_STAND_ASIDE_SECONDS, STAND_ASIDE_SECONDS * 2.0 ** min(attempt_count - 1, 10))


def in_words(plan: Schedule, run: RunId) -> str:
    """Return why a queued job waits: its position, the jobs ahead, and the numbers of nodes.

    Members of the job's project read this text. The text names jobs of this project. It only counts jobs of other
    projects.
    """
    place = plan.place_of(run)
    if place is None:
        return "it starts next"
    job = plan.waiting[place - 1]
    if run in plan.limited:
        held = f"{job.project} has a quota of {job.quota} nodes of this fleet and holds {plan.limited[run]}"
        return f"waits for its project's quota: {held}, the job needs {job.node_count}"
    ahead = plan.ahead_of(run)
    named = [f"{other.job} (priority {other.priority})" for other in ahead if other.project == job.project][:3]
    more = len(ahead) - len(named)
    behind = (
        f", behind {' and '.join([', '.join(named)] * bool(named) + [f'{more} more'] * bool(more))}" if ahead else ""
    )
    making_way = sorted(other for other, head in plan.giving_way.items() if head.run == run)
    paused = f"; {len(making_way)} jobs of lower priority are being paused" if making_way else ""
    figures = f"needs {job.node_count} nodes; {plan.free_count} of {plan.capacity} are free"
    return f"place {place} of {len(plan.waiting)} in the queue{behind}: {figures}{paused}"


def _counts(holding: Sequence[FleetJob], free: int) -> dict[RunId, int]:
    """Return how many nodes each job may hold, if `free` nodes remain for jobs that may grow."""
    counts = {job.run: job.claim_count for job in holding}
    for job in in_order(holding):
        wanted = job.most_node_count - counts[job.run] if job.state in LAUNCHED_JOBS - _LEAVING else 0
        if job.quota is not None:
            held = sum(counts[other.run] for other in holding if other.project == job.project)
            wanted = min(wanted, job.quota - held)
        more = max(0, min(wanted, free))
        counts[job.run] += more
        free -= more
    return counts


def _is_within_quota(job: FleetJob, holding: Iterable[FleetJob]) -> bool:
    return job.quota is None or _held_by(job.project, holding) + job.node_count <= job.quota


def _held_by(project: str, holding: Iterable[FleetJob]) -> int:
    return sum(job.claim_count for job in holding if job.project == project)


def _stands_aside(job: FleetJob, now: float) -> bool:
    return job.not_before is not None and now < job.not_before


def _victims(head: FleetJob, holding: Sequence[FleetJob], free: int, now: float) -> list[FleetJob]:
    """Return the jobs that must pause or return to the queue, so that the head can start.

    No job in the result is superfluous. The result is empty if all candidates together do not free enough nodes, or if
    jobs that already stop or pause free enough.
    """
    soon = free + sum(job.claim_count for job in holding if job.state in _LEAVING)
    candidates = [job for job in holding if job.priority < head.priority and _may_give_way(job, now)]
    candidates.sort(key=lambda job: (job.priority, -job.created_at, job.run))
    chosen: list[FleetJob] = []
    for job in candidates:
        if soon >= head.node_count:
            break
        chosen.append(job)
        soon += job.claim_count
    if soon < head.node_count:
        return []
    for job in reversed(chosen[:]):  # Drop each chosen job without which the head still fits.
        if soon - job.claim_count >= head.node_count:
            chosen.remove(job)
            soon -= job.claim_count
    return chosen


def _may_give_way(job: FleetJob, now: float) -> bool:
    if job.state is JobState.ALLOCATING:
        return True
    return (
        job.state is JobState.RUNNING and job.may_pause and (job.no_pause_before is None or now >= job.no_pause_before)
    )
