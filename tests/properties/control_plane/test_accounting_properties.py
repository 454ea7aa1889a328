"""The ledger of a job divides its whole time exactly, for every sequence of events, restarts and clock steps.

Each sequence is a list of updates of the ledger. Between two updates the clock moves forward or back. An update may be
lost before it is stored, and another control plane may read the stored record again.

The states follow the transition tables at random.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.core import accounting, incidents
from control_plane.core.incidents import Fault
from control_plane.core.observed.facts import Recorded
from control_plane.core.observed.incidents import RestartsRanks
from control_plane.core.observed.jobs import JobRecord
from control_plane.core.observed.nodes import Cause
from control_plane.core.observed.spans import Bucket
from control_plane.core.states import (
    ENDED_JOBS,
    INCIDENT_TRANSITIONS,
    JOB_TRANSITIONS,
    IncidentState,
    JobEvent,
    JobState,
    advance,
)
from control_plane.loop.records import at
from everstep.protocol.ids import Generation, RunId, Step

CREATED = 1_772_323_200.123457
MOVES = st.one_of(st.floats(-3600, 3600), st.floats(0, 2), st.sampled_from([0.0, 1e-6, 0.3, 86_400.0]))
PASSES = st.tuples(MOVES, st.integers(0, 63), st.integers(0, 9), st.booleans(), st.booleans(), st.booleans())


def reread(job: JobRecord) -> JobRecord:
    """Return the record as another control plane would read it from the database."""
    return replace(
        job,
        microseconds=json.loads(json.dumps(job.microseconds)),
        created_at=at(job.created_at).timestamp(),
        accounted_until=None if job.accounted_until is None else at(job.accounted_until).timestamp(),
        ended_at=None if job.ended_at is None else at(job.ended_at).timestamp(),
    )


def wall(job: JobRecord) -> int:
    """Return the microseconds from the job's creation until the time up to which its ledger reaches.

    Both times have the database's resolution.
    """
    passed = at(accounting.accounted_until(job)) - at(job.created_at)
    return (passed.days * 86_400 + passed.seconds) * 1_000_000 + passed.microseconds


def one_pass(job: JobRecord, now: float, choice: int, nodes: int, is_stalled: bool) -> JobRecord:
    """Charge the elapsed time to the job, then apply a random event that the transition tables allow.

    Each launch has another number of nodes than the one before.
    """
    before = job
    job = accounting.charge(job, now, gap_seconds=12.0, node_count=nodes, is_stalled=is_stalled)
    charged = job
    if job.state in ENDED_JOBS:
        return job
    events = [None, *(event for state, event in JOB_TRANSITIONS if state is job.state)]
    event = events[choice % len(events)]
    if event is JobEvent.FAULTED:
        fault = Fault(cause=Cause.RANK_EXIT, evidence=Recorded(text="a rank ended"), at=now - choice)
        opened = incidents.opened(
            RunId("r" * 32), Generation(1), (fault,), decision=RestartsRanks(), reached=Step(0), now=now
        )
        after = [opened] if before.incident is None else [replace(before.incident, closed_at=opened.failed_at), opened]
        resumed = accounting.bucket(replace(charged, incident=None))
        job = accounting.follow(job, after, resumed=resumed)
        job = replace(job, incident=opened)
    elif job.incident is not None:
        moves = [event for state, event in INCIDENT_TRANSITIONS if state is job.incident.state]
        moved = incidents.moved(job.incident, moves[choice % len(moves)], now - choice)
        job = accounting.follow(job, [moved], resumed=Bucket.TRAIN)
        job = replace(job, incident=None if moved.state is IncidentState.CLOSED else moved)
    if event is not None:
        state = advance(JOB_TRANSITIONS, "job", job.state, event)
        is_first = state is JobState.STARTING and job.started_at is None
        started_at = accounting.accounted_until(job) if is_first else job.started_at
        job = replace(
            job,
            state=state,
            started_at=started_at,
            boundary=Step(choice % 2),
            member_count=1 + choice % 5,
            missing_count=choice % 3,
            ended_at=accounting.accounted_until(job) if state in ENDED_JOBS else None,
        )
    return job


@given(st.lists(PASSES, max_size=60))
def test_the_buckets_add_up_to_the_wall_time_to_the_microsecond(
    history: list[tuple[float, int, int, bool, bool, bool]],
) -> None:
    stored = JobRecord(state=JobState.QUEUED, reason="", created_at=CREATED, state_since=CREATED)
    now = CREATED
    for move, choice, nodes, is_stalled, is_lost, is_restarted in history:
        now += move
        job = one_pass(stored, now, choice, nodes, is_stalled)
        assert sum(job.microseconds.values()) == wall(job)
        assert all(spent >= 0 for spent in job.microseconds.values())
        assert wall(job) >= wall(stored), "the ledger went back"
        if job.ended_at is not None:
            assert at(job.ended_at) == at(accounting.accounted_until(job))
        if not is_lost:
            stored = reread(job) if is_restarted else job
        if stored.state in ENDED_JOBS:
            assert accounting.charge(stored, now + 10, gap_seconds=12.0, node_count=nodes) is stored


SIZES = st.tuples(st.integers(1, 8), st.integers(0, 8))
TRAINING = st.lists(st.tuples(st.floats(0, 100), st.floats(0, 1), SIZES), min_size=1, max_size=30)


@given(TRAINING)
def test_training_counts_by_the_share_of_its_nodes(history: list[tuple[float, float, tuple[int, int]]]) -> None:
    """If only n of N nodes work, a period counts as n/N of its length. The ledger agrees with a reference.

    Each period ends with a failure that began earlier in the period. The next period has other numbers of nodes.
    """
    job = JobRecord(
        state=JobState.RUNNING, reason="", created_at=CREATED, state_since=CREATED, boundary=Step(1), base_step=Step(0)
    )
    job, now = accounting.charge(job, CREATED, gap_seconds=9e9), CREATED
    trained = lost = 0.0
    for seconds, detected_late, (present, missing) in history:
        job = replace(job, member_count=present, missing_count=missing)
        now += seconds
        job = accounting.charge(job, now, gap_seconds=9e9)
        fault = Fault(cause=Cause.RANK_EXIT, evidence=Recorded(text="a rank ended"), at=now - seconds * detected_late)
        opened = incidents.opened(
            RunId("r" * 32), Generation(1), (fault,), decision=RestartsRanks(), reached=Step(0), now=now
        )
        closed = replace(opened, closed_at=now, state=IncidentState.CLOSED)
        job = accounting.follow(job, [closed], resumed=Bucket.TRAIN)
        trained += seconds * (1 - detected_late) * present / (present + missing)
        lost += seconds * (1 - detected_late) * missing / (present + missing)
    assert job.microseconds.get("train", 0) / 1e6 == pytest.approx(trained, abs=3e-6 * len(history))
    assert job.microseconds.get("shortage", 0) / 1e6 == pytest.approx(lost, abs=3e-6 * len(history))
    assert sum(job.microseconds.values()) == wall(job)
    elapsed = wall(job) / 1e6
    ratio = accounting.ettr_ratio(job.microseconds)
    assert (ratio or 0.0) * elapsed == pytest.approx(trained, abs=3e-6 * len(history)), "the ETTR counts the throughput"


@given(st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10)), min_size=1, max_size=30))
def test_nothing_is_paid_twice_or_never(charges: list[tuple[int, int]]) -> None:
    job = JobRecord(state=JobState.RUNNING, reason="", created_at=CREATED, state_since=CREATED)
    now = accounting.microseconds(CREATED)
    for passed, nodes in charges:
        job = accounting.charge(job, now / 1_000_000, gap_seconds=12.0, node_count=nodes)
        now += passed
        job = accounting.charge(job, now / 1_000_000, gap_seconds=12.0, node_count=nodes)
    assert job.node_microseconds == sum(passed * nodes for passed, nodes in charges)
