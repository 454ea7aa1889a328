"""A job that starts before others in the queue never delays the job at the head of the queue, whichever jobs end and
when. The queue pauses no more jobs than needed. `schedule`, which the tests call, does not receive the real duration of
jobs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import combinations

from hypothesis import assume, given
from hypothesis import strategies as st

from control_plane.core.observed.fleets import FleetJob
from control_plane.core.queue import cannot_delay, schedule
from control_plane.core.states import JobState
from everstep.protocol.ids import JobName, RunId

CAPACITY = 16


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


@given(st.integers(1, 12), st.integers(1, 12), st.lists(st.integers(1, 12), max_size=6), st.integers(1, 20))
def test_whichever_of_the_others_end(head: int, newcomer: int, holding: list[int], capacity: int) -> None:
    """`cannot_delay` equals its definition: whichever of the other jobs end, the job at the head can start no later."""
    left = [sum(some) for size in range(len(holding) + 1) for some in combinations(holding, size)]
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
        replace(waiting(f"h{i}", count, rank), state=state, may_pause=may)
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
        and (job.state is JobState.ALLOCATING or (job.may_pause and job.state is JobState.RUNNING))
    ]
    assert all(job in able for job in paused)
    gained = soon + sum(job.node_count for job in paused)
    if needs <= soon or needs > soon + sum(job.node_count for job in able):
        assert not paused
    else:
        assert gained >= needs
        assert all(gained - job.node_count < needs for job in paused), "one of them need not have been paused"


GROWING = st.lists(
    st.tuples(
        st.sampled_from([JobState.QUEUED, JobState.ALLOCATING, JobState.RUNNING, JobState.PAUSING, JobState.PREPARING]),
        st.integers(1, 6),
        st.integers(0, 6),
        st.integers(0, 6),
        st.sampled_from([None, 4, 9]),
    ),
    max_size=7,
)


@given(GROWING, st.integers(1, 20))
def test_jobs_that_may_grow_share_what_no_other_job_needs(
    some: list[tuple[JobState, int, int, int, int | None]], capacity: int
) -> None:
    jobs = [
        FleetJob(
            job=JobName(f"j{place}"),
            run=RunId(f"j{place}"),
            state=state,
            node_count=count,
            most_node_count=count + more,
            member_count=min(members, count + more),
            priority=0,
            created_at=float(place),
            project="p" if quota is not None else f"p{place}",
            quota=quota,
        )
        for place, (state, count, more, members, quota) in enumerate(some)
    ]
    found = schedule(jobs, capacity, 0.0)
    claims = {job.run: job.claim_count for job in jobs if job.run in found.admitted}
    assert found.counts.keys() == claims.keys()
    assert all(found.counts[run] >= claim for run, claim in claims.items())
    grown = sum(found.counts.values()) - sum(claims.values())
    assert grown <= max(0, capacity - sum(claims.values())), "growth needs nodes that the group cannot have"
    if any(job.run not in found.limited for job in found.waiting):
        assert grown == 0, "a job grows while another one waits"
    held = sum(count for run, count in found.counts.items() for job in jobs if job.run == run and job.project == "p")
    at_first = sum(claims[job.run] for job in jobs if job.run in claims and job.project == "p")
    limits = [job.quota for job in jobs if job.quota is not None and found.counts.get(job.run, 0) > job.claim_count]
    assert held == at_first or held <= max(limits)
