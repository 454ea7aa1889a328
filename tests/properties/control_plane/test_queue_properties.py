"""A job that starts before others in the queue never delays the job at the head of the queue, whichever jobs end and
when. The queue pauses no more jobs than needed. `schedule`, which the tests call, does not receive the real duration of
jobs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, product

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from control_plane.core.observed.fleets import FleetJob
from control_plane.core.queue import QueueSchedule, cannot_delay, in_order, schedule
from control_plane.core.states import HOLDING_JOBS, LAUNCHED_JOBS, JobState
from everstep.protocol.ids import JobName, RunId

CAPACITY = 16
NOW = 100.0


def waiting(name: str, count: int, priority: int = 0) -> FleetJob:
    return FleetJob(
        job=JobName(name),
        run=RunId(name),
        state=JobState.QUEUED,
        node_count=count,
        priority=priority,
        created_at=float(name[1:]),
    )


def starts(jobs: Sequence[FleetJob], lengths: dict[RunId, int], capacity: int = CAPACITY) -> dict[RunId, int]:
    """Return the start time of each job in a simulated fleet.

    `lengths` contains the duration of each job. A running job starts at time 0.
    """
    began = {job.run: 0 for job in jobs if job.state is JobState.RUNNING}
    live = list(jobs)
    for now in range(1_000):
        live = [job for job in live if job.run not in began or now < began[job.run] + lengths[job.run]]
        admitted = schedule(live, capacity, float(now)).admitted
        for place, job in enumerate(live):
            if job.state is JobState.QUEUED and job.run in admitted:
                live[place] = replace(job, state=JobState.RUNNING)
                began[job.run] = now
        assert sum(job.node_count for job in live if job.state is JobState.RUNNING) <= capacity
        if not live:
            break
    return began


SIZES = st.tuples(st.integers(1, 8), st.integers(0, 4)).map(lambda pair: range(pair[0], pair[0] + pair[1] + 1))


@given(st.integers(1, 12), st.integers(1, 12), st.lists(SIZES, max_size=4), st.integers(1, 20))
def test_whichever_of_the_others_end_or_change_their_size(
    head: int, newcomer: int, holding: list[range], capacity: int
) -> None:
    """The result of `cannot_delay` equals its definition.

    By this definition, the head of the queue starts no later with the newcomer than without it, whichever other jobs
    end.
    """
    left = {
        sum(counts)
        for size in range(len(holding) + 1)
        for some in combinations(holding, size)
        for counts in product(*some)
    }
    is_harmless = all(capacity - taken - newcomer >= head for taken in left if capacity - taken >= head)
    assert cannot_delay(head, newcomer, holding, capacity) == is_harmless


@given(
    running=st.lists(st.integers(1, 8), max_size=5),
    queue=st.lists(st.tuples(st.integers(1, CAPACITY), st.integers(0, 2)), min_size=1, max_size=8),
    data=st.data(),
)
def test_the_head_starts_when_it_would_without_those_who_jumped(
    running: list[int], queue: list[tuple[int, int]], data: st.DataObject
) -> None:
    assume(sum(running) <= CAPACITY)
    there = [replace(waiting(f"r{i}", count), state=JobState.RUNNING) for i, count in enumerate(running)]
    queued = [waiting(f"q{i}", count, priority) for i, (count, priority) in enumerate(queue)]
    lengths = {job.run: data.draw(st.integers(1, 20)) for job in [*there, *queued]}
    first = schedule([*there, *queued], CAPACITY, 0.0)
    with_jumpers = starts([*there, *queued], lengths)
    assert with_jumpers.keys() == lengths.keys(), "somebody never started"
    if first.waiting:
        head = first.waiting[0]
        jumpers = {
            job.run
            for job in queued
            if job.run in first.admitted and (-job.priority, job.created_at) > (-head.priority, head.created_at)
        }
        for absent in (jumpers, behind(head, queued)):
            remaining = [job for job in [*there, *queued] if job.run not in absent]
            assert with_jumpers[head.run] == starts(remaining, lengths)[head.run]


def behind(head: FleetJob, queued: Collection[FleetJob]) -> set[RunId]:
    return {job.run for job in queued if (-job.priority, job.created_at) > (-head.priority, head.created_at)}


@given(
    holding=st.lists(
        st.tuples(
            st.integers(1, 6),
            st.integers(0, 3),
            st.booleans(),
            st.sampled_from([JobState.RUNNING, JobState.ALLOCATING, JobState.PAUSING]),
        ),
        max_size=5,
    ),
    needs=st.integers(1, CAPACITY),
    priority=st.integers(0, 4),
)
def test_as_few_as_needed_make_way_for_a_higher_priority(
    holding: list[tuple[int, int, bool, JobState]], needs: int, priority: int
) -> None:
    assume(sum(count for count, *_ in holding) <= CAPACITY)
    jobs = [
        replace(waiting(f"h{i}", count, rank), state=state, is_preemptible=may, is_settled=True)
        for i, (count, rank, may, state) in enumerate(holding)
    ]
    head = waiting("q99", needs, priority)
    plan = schedule([*jobs, head], CAPACITY, 0.0)
    paused = [job for job in jobs if job.run in plan.giving_way]
    soon = CAPACITY - sum(job.node_count for job in jobs if job.state is not JobState.PAUSING)
    able = [
        job
        for job in jobs
        if job.priority < priority
        and (job.state is JobState.ALLOCATING or (job.is_preemptible and job.state is JobState.RUNNING))
    ]
    assert all(job in able for job in paused)
    gained = soon + sum(job.node_count for job in paused)
    if needs <= soon or needs > soon + sum(job.node_count for job in able):
        assert not paused
    else:
        assert gained >= needs
        assert all(gained - job.node_count < needs for job in paused), "one of them need not have been paused"


HOLDING = [
    JobState.RUNNING,
    JobState.RUNNING,
    JobState.RUNNING,
    JobState.ALLOCATING,
    JobState.PAUSING,
    JobState.PREPARING,
]


@st.composite
def elastic_jobs(draw: st.DrawFn) -> tuple[list[FleetJob], int]:
    """Return jobs, most of them elastic, and the capacity of their fleet. The time is `NOW`.

    Some jobs hold nodes and some wait in the queue. Few nodes are free, so the waiting jobs depend on the others.
    """
    jobs: list[FleetJob] = []
    limit = draw(st.sampled_from([6, 9]))
    states = [
        *draw(st.lists(st.sampled_from(HOLDING), min_size=1, max_size=4)),
        *([JobState.QUEUED] * draw(st.integers(0, 3))),
    ]
    for place, state in enumerate(states):
        least, more, beyond = draw(st.integers(1, 4)), draw(st.integers(0, 3)), draw(st.integers(0, 3))
        count = least + more
        is_waiting = state in (JobState.QUEUED, JobState.ALLOCATING) and least < count
        quota = draw(st.sampled_from([None, None, limit]))
        job = FleetJob(
            job=JobName(f"j{place}"),
            run=RunId(f"j{place}"),
            state=state,
            node_count=count,
            least_node_count=least,
            most_node_count=count + beyond,
            member_count=draw(st.integers(least, count + beyond)) if state in LAUNCHED_JOBS else 0,
            smaller_from=draw(st.sampled_from([NOW - 1, NOW + 1])) if is_waiting else None,
            priority=draw(st.integers(0, 1)) + (state is JobState.QUEUED),
            created_at=float(place),
            project="p" if quota is not None else f"p{place}",
            quota=quota,
            is_preemptible=draw(st.booleans()),
            is_settled=state is JobState.RUNNING and draw(st.sampled_from([True, True, False])),
            not_before=NOW + 9 if state is JobState.QUEUED and draw(st.integers(0, 3)) == 0 else None,
        )
        jobs.append(job)
    held = sum(job.needed_count(NOW) for job in jobs if job.state in HOLDING_JOBS)
    return jobs, held + draw(st.integers(0, 4))


def head_of(found: QueueSchedule) -> FleetJob | None:
    """Return the first job that waits for nodes.

    Skip jobs at their quota, and jobs that may not start yet (`not_before`).
    """
    return next((job for job in found.waiting if job.run not in found.limited and job.not_before is None), None)


@settings(max_examples=300)
@given(elastic_jobs())
def test_elastic_jobs_share_the_nodes_that_no_other_job_needs(fleet: tuple[list[FleetJob], int]) -> None:
    jobs, capacity = fleet
    found = schedule(jobs, capacity, NOW)
    admitted = [job for job in jobs if job.run in found.admitted]
    assert found.counts.keys() == found.admitted
    assert all(job.needed_count(NOW) <= found.counts[job.run] for job in admitted)
    assert all(found.counts[job.run] <= max(job.node_count, job.most_node_count) for job in admitted)
    at_first = sum(job.needed_count(NOW) for job in jobs if job.state in HOLDING_JOBS)
    assert sum(found.counts.values()) <= max(capacity, at_first), "jobs receive nodes that the group cannot have"
    # No job may grow while another job waits, even if the waiting job may not start yet (`not_before`).
    if any(job.run not in found.limited for job in found.waiting):
        grown = [job for job in admitted if found.counts[job.run] > job.claim_count(NOW)]
        assert not grown, "a job grows beyond its NodeCount while another job waits"
    elif not found.waiting:
        for job in admitted:
            is_full = found.counts[job.run] >= (job.most_node_count if job.state in LAUNCHED_JOBS else job.node_count)
            assert is_full or found.free_count == 0 or job.quota is not None or job.state is JobState.PAUSING
    raised = [job for job in admitted if found.counts[job.run] > job.needed_count(NOW)]
    for job in raised:
        held = sum(found.counts[other.run] for other in admitted if other.project == job.project)
        assert job.quota is None or held <= job.quota


@settings(max_examples=300)
@given(elastic_jobs())
def test_a_job_starts_with_fewer_nodes_only_after_its_patience(fleet: tuple[list[FleetJob], int]) -> None:
    jobs, capacity = fleet
    found = schedule(jobs, capacity, NOW)
    for job in jobs:
        is_patient = job.smaller_from is not None and job.smaller_from <= NOW
        if job.state is JobState.QUEUED and job.run in found.admitted:
            assert found.counts[job.run] >= (job.least_node_count if is_patient else job.node_count)
    head = head_of(found)
    if head is not None:
        assert head.needed_count(NOW) > capacity - sum(
            found.counts[job.run]
            for job in jobs
            if job.run in found.admitted and (job.state in HOLDING_JOBS or in_order([job, head])[0] is job)
        )


@settings(max_examples=300)
@given(elastic_jobs())
def test_jobs_return_as_few_nodes_as_the_head_needs(fleet: tuple[list[FleetJob], int]) -> None:
    jobs, capacity = fleet
    found = schedule(jobs, capacity, NOW)
    held = {job.run: job for job in jobs}
    head = head_of(found)
    released = {run: found.counts[run] - each.keep_count for run, each in found.reductions.items()}
    if head is None:
        assert not found.giving_way
        check_returns_without_head(found, held, sum(released.values()))
        return
    for run, each in found.reductions.items():
        job = held[run]
        assert each.head is head
        assert job.is_settled
        is_lower = job.is_preemptible and job.priority < head.priority
        assert each.keep_count >= (job.least_node_count if is_lower else job.node_count)
        assert 0 < each.keep_count < found.counts[run]
    for run in found.giving_way:
        job = held[run]
        assert job.priority < head.priority
        assert job.state is JobState.ALLOCATING or (job.is_preemptible and job.is_settled)
        released[run] = found.counts[run]
    if released:
        assert is_next(head, after(jobs, found), capacity), "nodes are released although the head still cannot start"
        for run in found.reductions:
            fewer = replace(held[run], member_count=found.reductions[run].keep_count + 1)
            assert not is_next(head, [fewer if job.run == run else job for job in after(jobs, found)], capacity)
        for run in found.giving_way:
            others = [job for job in after(jobs, found) if job.run != run]
            assert not is_next(head, [*others, held[run]], capacity), "a job need not have paused"


def check_returns_without_head(found: QueueSchedule, held: Mapping[RunId, FleetJob], released: int) -> None:
    """Check the queue's `reductions` (jobs that must return some of their nodes) while no job is at its head.

    Jobs return nodes for a job that runs below its NodeCount, or for a job that waits for its project's quota.
    """
    for run, each in found.reductions.items():
        assert held[run].is_settled
        assert held[run].node_count <= each.keep_count < found.counts[run]
        if each.head.run in found.limited:
            assert held[run].project == each.head.project
            assert each.head.quota is not None
            assert found.limited[each.head.run] - released + each.head.needed_count(NOW) == each.head.quota
        else:
            assert each.head.state in LAUNCHED_JOBS
            assert found.counts[each.head.run] + released <= each.head.node_count


def after(jobs: Sequence[FleetJob], found: QueueSchedule) -> list[FleetJob]:
    """Return the jobs after each job has released its nodes. Omit jobs that pause and jobs at their quota.

    A release can bring a job below its quota. This job can then be the head of the queue.
    """
    absent = {*found.giving_way, *found.limited, *(job.run for job in jobs if job.state is JobState.PAUSING)}
    remaining = [job for job in jobs if job.run not in absent]
    kept = {run: each.keep_count for run, each in found.reductions.items()}
    started = [
        replace(job, state=JobState.ALLOCATING) if job.state is JobState.QUEUED and job.run in found.admitted else job
        for job in remaining
    ]
    return [replace(job, member_count=kept.get(job.run, job.member_count)) for job in started]


def is_next(head: FleetJob, jobs: Sequence[FleetJob], capacity: int) -> bool:
    """Return whether the head of the queue can start if `jobs` is the whole state of the fleet."""
    return head.run in schedule(jobs, capacity, NOW).admitted


@settings(max_examples=300)
@given(elastic_jobs())
def test_a_head_that_can_start_by_releases_makes_jobs_release_nodes(fleet: tuple[list[FleetJob], int]) -> None:
    jobs, capacity = [replace(job, quota=None) for job in fleet[0]], fleet[1]
    found = schedule(jobs, capacity, NOW)
    head = head_of(found)
    if head is None or found.reductions or found.giving_way:
        return
    ahead = [job for job in after(jobs, found) if job.state in HOLDING_JOBS and (job in jobs or is_before(job, head))]
    smaller = [each for job in ahead for each in smallest(job, head)]
    assert is_next(head, [*ahead, head], capacity) or not is_next(head, [*smaller, head], capacity)


def is_before(job: FleetJob, head: FleetJob) -> bool:
    """Return whether a job comes before the head of the queue, by priority and then by age."""
    return (-job.priority, job.created_at) < (-head.priority, head.created_at)


def smallest(job: FleetJob, head: FleetJob) -> list[FleetJob]:
    """Return a job after it has released all nodes that it can release for the head. Empty if it pauses."""
    is_lower = job.priority < head.priority
    if is_lower and (job.state is JobState.ALLOCATING or (job.is_preemptible and job.is_settled)):
        return []
    return [replace(job, member_count=min(job.member_count, job.node_count)) if job.is_settled else job]
