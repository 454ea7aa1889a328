"""Who of a fleet's jobs may hold nodes: priority, then age; gangs; who may jump the queue, and who gives way.

    capacity  8   running: big 5          free 3
    queue     1.  head, needs 6           waits: 3 are free, 8 once big has ended
              2.  small, needs 2          may jump: beside big 1 is left then, and with big gone 6, which is what head needs
              3.  other, needs 3          may not: with big gone only 5 would be left for head

The queue is served in order. The first job that does not fit is its head, and nothing may make the head start later:

- **Backfill.** A job behind the head may start only onto nodes that the head cannot use. Running jobs can end at any
  moment and in any order (`MaxRuntimeInSeconds` is the latest end, never the earliest), so whatever set of them is
  left, if the head fits without the newcomer, it must fit with it. That needs no known end, and holds for every one.
- **Preemption.** For a head of higher priority, preemptible jobs are paused (an agreed stop, checkpointed), lowest
  priority and youngest first, as few as are needed and none if all together are not enough. A job that waits for its
  gang has nothing to lose and goes back.
- **Quotas.** A job whose project holds too many nodes already to have its own, too, waits beside the queue: it is no
head, nobody makes way for it.
- **Pauses.** A job that a person paused gives its nodes back in the same way, and does not wait here: it holds up
nobody, until it is resumed.
- **Patience.** A gang that is not complete and to which no node has come for `GANG_PATIENCE_SECONDS` gives its nodes
  back and stands aside for a while, longer each time: it neither holds nodes nor holds back others, and its nodes are
  for jobs behind it, or surplus.

Invariant: pure; the loops of jobs and fleets ask the same question and get the same answer, and no job is told to move
by anything else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from control_plane.core.observed.fleets import FleetJob
from control_plane.core.states import HOLDING_JOBS, LAUNCHED_JOBS, JobState
from everstep.protocol.ids import RunId

STAND_ASIDE_SECONDS = 900.0
MOST_STAND_ASIDE_SECONDS = 7_200.0
"""How long a gang that did not come together stands aside: at first, doubled each time, at most."""
PAUSE_AGAIN_SECONDS = 600.0
"""How long a job that could not be paused is left alone."""
_LEAVING = frozenset({JobState.PAUSING, JobState.STOPPING})


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What becomes of a fleet's jobs for now."""

    admitted: frozenset[RunId]
    """May hold nodes: those that do, and those of the queue that may begin to."""
    giving_way: Mapping[RunId, FleetJob]
    """Jobs that have to let go of their nodes, each with the job that is to get them."""
    waiting: tuple[FleetJob, ...]
    """The rest of the queue, in order; those that stand aside come last."""
    limited: Mapping[RunId, int]
    """Those of them whose project holds too much to have theirs, too, each with the nodes that it holds."""
    capacity: int
    free_count: int
    """Nodes that no job may claim yet."""

    def place_of(self, run: RunId) -> int | None:
        """Return a job's place in the queue, from 1, or None if it does not wait."""
        return next((place for place, job in enumerate(self.waiting, 1) if job.run == run), None)

    def ahead_of(self, run: RunId) -> tuple[FleetJob, ...]:
        """Return who waits before a job."""
        place = self.place_of(run)
        return self.waiting[: place - 1] if place is not None else ()


def schedule(jobs: Iterable[FleetJob], capacity: int, now: float) -> Schedule:
    """Return who may hold nodes.

    Called in every pass over a job and over a fleet.

    Args:
        jobs: of one fleet, those that have not ended; those that a person paused do not wait.
        capacity: nodes that jobs may have: the group's MaxSize without held nodes.
        now: Unix seconds.

    Returns:
        The schedule; the same for the same jobs.
    """
    every = tuple(job for job in jobs if not (job.is_paused and job.state is JobState.QUEUED))
    holding = [job for job in every if job.state in HOLDING_JOBS]
    queued = in_order(job for job in every if job.state is JobState.QUEUED)
    aside = [job for job in queued if _stands_aside(job, now)]
    queue = [job for job in queued if not _stands_aside(job, now)]
    runs = {job.run for job in holding}
    free = capacity - sum(job.node_count for job in holding)
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
                head.node_count, job.node_count, [other.node_count for other in holding], capacity
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
    )


def cannot_delay(head_count: int, newcomer_count: int, holding_counts: Sequence[int], capacity: int) -> bool:
    """Say whether a job can start without ever being in the way of the head, whichever of the others end, and whenever.

    Args:
        head_count: nodes that the head needs.
        newcomer_count: nodes that the job behind it would take.
        holding_counts: nodes of each job that holds some now.
        capacity: nodes that there are.

    Returns:
        True if for every set of holding jobs that may be left: where the head fits without the newcomer, it fits with
        it.
    """
    reachable = 1  # bit n: some set of the others has n nodes together
    for count in holding_counts:
        reachable |= reachable << count
    least = max(0, capacity - head_count - newcomer_count + 1)  # with fewer nodes taken than this, both fit
    critical = range(least, capacity - head_count + 1)  # with so many, the head alone fits
    return not any(reachable >> taken & 1 for taken in critical)


def in_order(jobs: Iterable[FleetJob]) -> list[FleetJob]:
    """Return jobs as they are served: recovering ones, then by priority, then by age."""
    return sorted(jobs, key=lambda job: (job.state not in LAUNCHED_JOBS, -job.priority, job.created_at, job.run))


def stand_aside_seconds(attempt_count: int) -> float:
    """Return how long a gang stands aside after so many attempts, this one included."""
    return min(MOST_STAND_ASIDE_SECONDS, STAND_ASIDE_SECONDS * 2.0 ** min(attempt_count - 1, 10))


def in_words(plan: Schedule, run: RunId) -> str:
    """Return what a queued job waits for: its place, who is ahead, and the figures.

    Its project reads this: jobs of others are counted, not named.
    """
    place = plan.place_of(run)
    if place is None:
        return "its turn has come"
    job = plan.waiting[place - 1]
    if run in plan.limited:
        held = f"{job.project} may hold {job.quota} nodes of this fleet and holds {plan.limited[run]}"
        return f"waits for its project's quota: {held}, it needs {job.node_count}"
    ahead = plan.ahead_of(run)
    named = [f"{other.job} (priority {other.priority})" for other in ahead if other.project == job.project][:3]
    more = len(ahead) - len(named)
    behind = (
        f", behind {' and '.join([', '.join(named)] * bool(named) + [f'{more} more'] * bool(more))}" if ahead else ""
    )
    making_way = sorted(other for other, head in plan.giving_way.items() if head.run == run)
    paused = f"; {len(making_way)} of lower priority make way" if making_way else ""
    figures = f"needs {job.node_count} nodes, {plan.free_count} of {plan.capacity} are free"
    return f"place {place} of {len(plan.waiting)} in the queue{behind}: {figures}{paused}"


def _is_within_quota(job: FleetJob, holding: Iterable[FleetJob]) -> bool:
    return job.quota is None or _held_by(job.project, holding) + job.node_count <= job.quota


def _held_by(project: str, holding: Iterable[FleetJob]) -> int:
    return sum(job.node_count for job in holding if job.project == project)


def _stands_aside(job: FleetJob, now: float) -> bool:
    return job.not_before is not None and now < job.not_before


def _victims(head: FleetJob, holding: Sequence[FleetJob], free: int, now: float) -> list[FleetJob]:
    """Return the jobs to pause or send back for the head: as few as are needed, none where all are not enough or enough are leaving anyway."""
    soon = free + sum(job.node_count for job in holding if job.state in _LEAVING)
    candidates = [job for job in holding if job.priority < head.priority and _may_give_way(job, now)]
    candidates.sort(key=lambda job: (job.priority, -job.created_at, job.run))
    chosen: list[FleetJob] = []
    for job in candidates:
        if soon >= head.node_count:
            break
        chosen.append(job)
        soon += job.node_count
    if soon < head.node_count:
        return []
    for job in reversed(
        chosen[:]
    ):  # the last to be chosen is the dearest, and needed; of those before it some may not be
        if soon - job.node_count >= head.node_count:
            chosen.remove(job)
            soon -= job.node_count
    return chosen


def _may_give_way(job: FleetJob, now: float) -> bool:
    if job.state is JobState.ALLOCATING:
        return True
    return (
        job.state is JobState.RUNNING and job.may_pause and (job.no_pause_before is None or now >= job.no_pause_before)
    )
