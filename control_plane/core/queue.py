"""The queue of a fleet: which jobs may hold nodes, which may start early, and how many nodes each job may hold.

    capacity  8   running: big 5          free 3
    queue     1.  head, needs 6           waits: 3 are free, 8 once big has ended
              2.  small, needs 2          may start: head still has the 6 nodes that it needs once big has ended
              3.  other, needs 3          may not start: head would have only 5 nodes once big has ended

The fleet serves its queue by priority, then by age. The first job that does not fit is the head. A job behind it may
start only on nodes that the head cannot use. Other jobs release nodes for the head (`core.preemption`).

- **Quotas.** While a job waits for its project's quota, outside the queue, no job of the project grows beyond
  NodeCount.
- **Elastic jobs.** After `patience_seconds`, such a job starts on its minimum of nodes. It claims the rest of its
  NodeCount before jobs behind it start, and holds more while no job waits.
- **Patience.** A job that receives no node for `GANG_PATIENCE_SECONDS` releases its nodes and stands aside for a while.

Invariant: pure. Jobs together never receive more nodes than the capacity, unless running generations already use more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from control_plane.core.observed.fleets import FleetJob
from control_plane.core.preemption import LEAVING, Reduction, can_stop, in_order_of_release, kept_counts, yields_to
from control_plane.core.states import HOLDING_JOBS, LAUNCHED_JOBS, JobState
from everstep.protocol.ids import RunId

STAND_ASIDE_SECONDS = 900.0
MOST_STAND_ASIDE_SECONDS = 7_200.0
"""The time for which a job stands aside doubles with each attempt, from `STAND_ASIDE_SECONDS` up to this limit."""
_MOST_DOUBLINGS = 10
PAUSE_AGAIN_SECONDS = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSchedule:
    """The number of nodes that each job of a fleet may hold, and the jobs that wait."""

    admitted: frozenset[RunId]
    """Jobs that hold nodes now, and queued jobs that may start."""
    giving_way: Mapping[RunId, FleetJob]
    """Jobs that must release all of their nodes, each with the job that receives them."""
    waiting: tuple[FleetJob, ...]
    """The order is that of the queue. Jobs that stand aside are last."""
    limited: Mapping[RunId, int]
    """Waiting jobs that would exceed their project's quota, each with the number of nodes that its project holds."""
    capacity: int
    free_count: int
    counts: Mapping[RunId, int] = field(default_factory=dict[RunId, int])
    reductions: Mapping[RunId, Reduction] = field(default_factory=dict[RunId, Reduction])
    """Running jobs that must return some of their nodes, each with the number that it keeps."""

    def place_of(self, run: RunId) -> int | None:
        """Return a job's position in the queue, counted from 1, or None."""
        return next((place for place, job in enumerate(self.waiting, 1) if job.run == run), None)

    def ahead_of(self, run: RunId) -> tuple[FleetJob, ...]:
        """Return the jobs that are ahead of a job in the queue."""
        place = self.place_of(run)
        return self.waiting[: place - 1] if place is not None else ()


def schedule(jobs: Iterable[FleetJob], capacity: int, now: float) -> QueueSchedule:
    """Return which unfinished jobs of a fleet may hold nodes. `capacity` is the group's MaxSize minus held nodes."""
    every = tuple(job for job in jobs if not (job.is_paused and job.state is JobState.QUEUED))
    holding = [job for job in every if job.state in HOLDING_JOBS]
    queued = in_order(job for job in every if job.state is JobState.QUEUED)
    aside = [job for job in queued if _stands_aside(job, now)]
    queue = [job for job in queued if not _stands_aside(job, now)]
    shares = _Shares(holding, capacity, now)
    limited: list[FleetJob] = []
    while queue:
        head = queue[0]
        shares.raise_to_claims(head)
        if not shares.is_within_quota(head):
            limited.append(queue.pop(0))
        elif head.needed_count(now) <= shares.free:
            shares.admit(queue.pop(0))
        else:
            break
    waiting, giving_way, reductions = queue, dict[RunId, FleetJob](), dict[RunId, Reduction]()
    if queue:
        head, waiting = queue[0], queue[:1]
        kept = kept_counts(head, shares.holding, shares.counts, shares.left_for(head), now)
        if shares.suffices(head, kept, capacity):
            giving_way = {run: head for run, count in kept.items() if not count}
            reductions = {run: Reduction(keep_count=count, head=head) for run, count in kept.items() if count}
        for job in queue[1:]:
            if not shares.is_within_quota(job):
                limited.append(job)
            elif job.needed_count(now) <= shares.free and all(
                cannot_delay(count, job.node_count, [_sizes(other, head, now) for other in shares.holding], capacity)
                for count in _start_counts(head, now)
            ):
                shares.admit(job)
            else:
                waiting.append(job)
    else:
        shares.raise_to_claims(None)
        reductions = shares.returns(limited)
        if not aside:
            shares.grow(frozenset(job.project for job in limited))
    return QueueSchedule(
        admitted=frozenset(shares.counts),
        giving_way=giving_way,
        reductions=reductions,
        waiting=(*waiting, *limited, *aside),
        limited={job.run: shares.held_by(job.project) for job in limited},
        capacity=capacity,
        free_count=max(0, shares.free),
        counts=shares.counts,
    )


class _Shares:
    def __init__(self, holding: Iterable[FleetJob], capacity: int, now: float) -> None:
        self.now = now
        self.holding: list[FleetJob] = []
        self.counts: dict[RunId, int] = {}
        self.free = capacity
        for job in holding:
            self.admit(job)

    def admit(self, job: FleetJob) -> None:
        self.holding.append(job)
        self.counts[job.run] = job.needed_count(self.now)
        self.free -= self.counts[job.run]

    def raise_to_claims(self, head: FleetJob | None) -> None:
        """Raise jobs to `FleetJob.claim_count` while nodes are free, except jobs that yield to `head`."""
        for job in in_order(self.holding):
            if job.state not in LEAVING and (head is None or not yields_to(job, head)):
                self._raise(job, job.claim_count(self.now))

    def left_for(self, head: FleetJob) -> int:
        """Return how many nodes remain for the head, negative if jobs that do not yield to it lack nodes."""
        after = _Shares(self.holding, sum(job.claim_count(self.now) for job in self.holding), self.now)
        after.raise_to_claims(head)
        return self.free + sum(self.counts.values()) - sum(after.counts.values())

    def suffices(self, head: FleetJob, kept: Mapping[RunId, int], capacity: int) -> bool:
        """Return whether the head can start, within its quota, once other jobs keep only `kept` nodes."""
        staying = [job for job in self.holding if job.state not in LEAVING and kept.get(job.run) != 0]
        after = _Shares(
            [replace(job, member_count=kept.get(job.run, job.member_count)) for job in staying], capacity, self.now
        )
        after.raise_to_claims(head)
        return after.is_within_quota(head) and head.needed_count(self.now) <= after.free

    def grow(self, limited: frozenset[str]) -> None:
        """Raise elastic jobs beyond their NodeCount, except in projects with jobs that wait for a quota (`limited`)."""
        for job in in_order(self.holding):
            if job.state in LAUNCHED_JOBS - LEAVING and job.project not in limited:
                self._raise(job, job.most_node_count)

    def returns(self, limited: Sequence[FleetJob]) -> dict[RunId, Reduction]:
        """Return which running jobs must return nodes beyond NodeCount, and for which job."""
        for job in in_order(self.holding):
            if job.state in LAUNCHED_JOBS - LEAVING and not job.is_taken_over:
                missing = job.claim_count(self.now) - self.counts[job.run]
                if job.quota is not None:
                    missing = min(missing, job.quota - self.held_by(job.project))
                if found := self._returns_to(job, missing, self.holding):
                    return found
        for job in limited:
            assert job.quota is not None  # Only a quota limits a job.
            missing = self.held_by(job.project) + job.needed_count(self.now) - job.quota
            found = self._returns_to(job, missing, [each for each in self.holding if each.project == job.project])
            released = sum(self.counts[run] - each.keep_count for run, each in found.items())
            if released == missing and self.free + released >= job.needed_count(self.now):
                return found
        return {}

    def _returns_to(self, head: FleetJob, missing: int, holding: Iterable[FleetJob]) -> dict[RunId, Reduction]:
        """Return which jobs return together at most `missing` nodes beyond their NodeCount to `head`."""
        found: dict[RunId, Reduction] = {}
        for job in in_order_of_release(holding):
            count = min(missing, self.counts[job.run] - job.node_count)
            if count > 0 and job.run != head.run and can_stop(job, self.now):
                found[job.run] = Reduction(keep_count=self.counts[job.run] - count, head=head)
                missing -= count
        return found

    def is_within_quota(self, job: FleetJob) -> bool:
        return job.quota is None or self.held_by(job.project) + job.needed_count(self.now) <= job.quota

    def held_by(self, project: str) -> int:
        return sum(self.counts[job.run] for job in self.holding if job.project == project)

    def _raise(self, job: FleetJob, count: int) -> None:
        more = min(count - self.counts[job.run], self.free)
        if job.quota is not None:
            more = min(more, job.quota - self.held_by(job.project))
        self.counts[job.run] += max(0, more)
        self.free -= max(0, more)


def cannot_delay(head_count: int, newcomer_count: int, holding_sizes: Sequence[range], capacity: int) -> bool:
    """Return whether a new job can start without a delay for the head, in whatever order other jobs end or resize.

    For every subset of the holding jobs and all their possible sizes: if the head fits beside the subset, it also fits
    beside the subset and the new job.
    """
    reachable = 1  # Bit n of this number is set if some subset of the jobs that hold nodes holds exactly n nodes.
    for sizes in holding_sizes:
        with_job, more = reachable << sizes[0], len(sizes) - 1
        # Bit n of `with_job` is set if this job and some subset of the jobs before it hold exactly n nodes. At first,
        # `with_job` covers only the smallest number in `sizes`. Each iteration about doubles how many of these numbers
        # `with_job` covers. This takes fewer shifts than one per number.
        while more:
            step = (more + 1) // 2
            with_job |= with_job << step
            more -= step
        reachable |= with_job
    # Suppose that some jobs have ended and the remaining jobs hold n nodes. If n < `least`, the fleet has room for both
    # the first job of the queue and the new job. If n is in `critical`, only one of them has room, so the new job would
    # delay the first job. If n is larger, the first job has no room even without the new job.
    least = max(0, capacity - head_count - newcomer_count + 1)
    critical = range(least, capacity - head_count + 1)
    return not any(reachable >> taken & 1 for taken in critical)


def in_order(jobs: Iterable[FleetJob]) -> list[FleetJob]:
    """Return jobs in the order in which they receive nodes: recovering jobs first, then by priority, then by age."""
    return sorted(jobs, key=lambda job: (job.state not in LAUNCHED_JOBS, -job.priority, job.created_at, job.run))


def stand_aside_seconds(attempt_count: int) -> float:
    """Return how long a job stands aside after its `attempt_count`-th wait in a row for nodes that did not arrive."""
    return min(MOST_STAND_ASIDE_SECONDS, STAND_ASIDE_SECONDS * 2.0 ** min(attempt_count - 1, _MOST_DOUBLINGS))


def _sizes(job: FleetJob, head: FleetJob, now: float) -> range:
    """Return the numbers of nodes with which `job` may run until it ends, also after a release for `head`."""
    counts = [job.needed_count(now), job.node_count]
    if yields_to(job, head):
        counts.append(job.least_node_count or job.node_count)
    return range(min(counts), max(counts) + 1)


def _start_counts(head: FleetJob, now: float) -> set[int]:
    needed = head.needed_count(now)
    return {needed, needed if head.smaller_from is None else head.least_node_count or head.node_count}


def _stands_aside(job: FleetJob, now: float) -> bool:
    return job.not_before is not None and now < job.not_before
