"""Tests single decisions of the job loop about a job without nodes.

The tests in tests/unit/control_plane/loop cover whole sequences.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from control_plane.accounts.jobs import reason
from control_plane.core.capacity import FIRST_RETRY_SECONDS
from control_plane.core.job import decide as decide_job
from control_plane.core.observed.jobs import CapacityWait, FailedLaunches, JobObserved, JobRecord
from control_plane.core.observed.reasons import JobFact, JobNote
from control_plane.core.observed.specs import Policy
from control_plane.core.queue import stand_aside_seconds
from control_plane.core.states import JobState
from control_plane.core.timeouts import GANG_PATIENCE_SECONDS, ladder
from control_plane.core.verification import Blocked
from everstep.protocol.agent_messages import Obstacle
from everstep.protocol.ids import FleetName, Generation, NodeId, Step
from tests.unit.control_plane.core.cluster import spec_of

POLICY = Policy(timeouts=ladder(3.0))
SPEC = spec_of("gpt", "a", 2, 2)
NOW = 10_000.0


def decide_whole(state: JobState, *, spec=SPEC, assigned: tuple[str, ...] = (), record: dict | None = None, **seen):
    values = {"state": state, "reason": "", "created_at": 9_000.0, "state_since": 9_990.0, **(record or {})}
    observed = JobObserved(
        record=JobRecord(**values),
        plan=None,
        lineage=(),
        checkpoints=(),
        assigned=tuple(NodeId(name) for name in assigned),
        nodes={},
        **seen,
    )
    return decide_job(NOW, spec, observed, POLICY)


def decide(state: JobState, **case):
    return decide_whole(state, **case).record


def test_a_job_whose_turn_has_come_waits_until_its_former_nodes_are_given_back() -> None:
    """A job that is next in the queue stays QUEUED until its former nodes are free.

    If the job started earlier, a concurrent pass of the fleet loop could read its old state and free the nodes of the
    new generation.
    """
    assert decide(JobState.QUEUED, is_admitted=True, assigned=("i-1",)).state is JobState.QUEUED
    assert decide(JobState.QUEUED, is_admitted=True).state is JobState.ALLOCATING


def test_a_job_stores_its_wait_for_capacity_only_while_it_lacks_nodes_and_launches_fail() -> None:
    failed = FailedLaunches(message="no p5", failed_count=3, next_attempt_at=NOW + 60)
    wait = CapacityWait(missing_count=1, message="no p5", failed_count=3, next_attempt_at=NOW + 60)
    old = {"capacity_wait": replace(wait, missing_count=2)}
    one, both = ("i-1",), ("i-1", "i-2")
    assert decide(JobState.ALLOCATING, assigned=one, record=old, failed_launches=failed).capacity_wait == wait
    admitted = decide(JobState.QUEUED, is_admitted=True, failed_launches=failed)
    assert admitted.capacity_wait == replace(wait, missing_count=2)
    assert decide(JobState.ALLOCATING, assigned=one, record=old).capacity_wait is None
    assert decide(JobState.ALLOCATING, assigned=both, record=old, failed_launches=failed).capacity_wait is None
    assert decide(JobState.QUEUED, record=old, failed_launches=failed).capacity_wait is None


def test_a_gang_gives_way_before_it_starts_even_when_it_is_complete() -> None:
    record = decide(JobState.ALLOCATING, assigned=("i-1", "i-2"), gives_way_to="urgent (priority 5)")
    assert (record.state, reason(record.reason)) == (
        JobState.QUEUED,
        "gives way to urgent (priority 5) before it started",
    )


def test_a_gang_waits_as_long_as_nodes_keep_coming() -> None:
    long_ago = NOW - GANG_PATIENCE_SECONDS - 1
    waits = {"state_since": long_ago}
    assert (
        decide(JobState.ALLOCATING, record=waits, newest_node_at=NOW - GANG_PATIENCE_SECONDS).state
        is JobState.ALLOCATING
    )
    aside = decide(JobState.ALLOCATING, record={**waits, "gang_attempts": 1}, newest_node_at=long_ago)
    assert (aside.state, aside.gang_attempts, aside.not_before) == (JobState.QUEUED, 2, NOW + stand_aside_seconds(2))
    assert decide(JobState.ALLOCATING, record={**waits, "gang_attempts": 4}, assigned=("i-1", "i-2")).gang_attempts == 0


def test_a_gang_is_asked_for_elsewhere_once_a_launch_has_failed_since_it_waits() -> None:
    several = replace(SPEC, fleets=(SPEC.fleet, FleetName("second"), FleetName("third")))
    elsewhere = {"spec": several, "open_fleets": frozenset(map(FleetName, ("second", "third")))}

    def fleet(*, spec=several, record: dict | None = None, **seen):
        return decide_whole(
            JobState.ALLOCATING, record=record, **{**elsewhere, "launch_failed_at": NOW - 1, **seen, "spec": spec}
        ).fleet

    assert fleet() == "second"
    assert fleet(open_fleets=frozenset({FleetName("third")})) == "third"
    assert fleet(open_fleets=frozenset()) is None
    assert fleet(launch_failed_at=9_990.0) is None  # this launch failure happened before the job began to wait
    assert fleet(open_fleets=frozenset({SPEC.fleet})) is None
    assert fleet(launch_failed_at=None) is None
    assert fleet(launch_failed_at=None, record={"state_since": NOW - GANG_PATIENCE_SECONDS - 1}) == "second"
    assert fleet(record={"issued_generation": Generation(1)}) is None  # the job has already run in this fleet
    assert fleet(assigned=("i-1",)) is None
    last = replace(several, fleet=FleetName("third"))
    assert fleet(spec=last, open_fleets=frozenset({SPEC.fleet, FleetName("second")})) == SPEC.fleet
    round_over = decide_whole(
        JobState.ALLOCATING, spec=last, open_fleets=frozenset({SPEC.fleet}), launch_failed_at=NOW - 1
    ).record
    assert (round_over.state, round_over.gang_attempts, round_over.not_before) == (
        JobState.QUEUED,
        1,
        NOW + FIRST_RETRY_SECONDS,
    )


def test_standing_aside_doubles_up_to_a_limit() -> None:
    assert [stand_aside_seconds(count) for count in (1, 2, 3, 4, 50)] == [900, 1800, 3600, 7200, 7200]


@pytest.mark.covers("CreateTrainingJob.StoppingCondition.MaxPendingTimeInSeconds")
def test_pending_is_the_time_before_the_first_start() -> None:
    limited = replace(SPEC, max_pending_seconds=60.0)
    assert decide(JobState.QUEUED, spec=limited).state is JobState.STOPPED
    assert decide(JobState.QUEUED, spec=limited, record={"started_at": 9_010.0}).state is JobState.QUEUED


@pytest.mark.covers("CreateTrainingJob.StoppingCondition.MaxRuntimeInSeconds")
def test_time_without_nodes_is_no_runtime() -> None:
    limited = replace(SPEC, max_runtime_seconds=600.0)
    ran = {"started_at": 9_010.0, "base_step": Step(5), "accounted_until": NOW}
    assert (
        decide(JobState.QUEUED, spec=limited, record={**ran, "microseconds": {"paused": 400_000_000}}).state
        is JobState.QUEUED
    )
    assert (
        decide(JobState.QUEUED, spec=limited, record={**ran, "microseconds": {"paused": 300_000_000}}).state
        is JobState.STOPPED
    )
    earlier = {**ran, "microseconds": {"paused": 400_000_000}, "paused_microseconds_before_start": 100_000_000}
    assert decide(JobState.QUEUED, spec=limited, record=earlier).state is JobState.STOPPED, (
        "a pause before its first start is no time of its run"
    )


@pytest.mark.parametrize(
    ("assigned", "waited", "state"),
    [
        (("i-1",), 31.0, JobState.ALLOCATING),
        (("i-1", "i-2"), 29.0, JobState.ALLOCATING),
        (("i-1", "i-2"), 30.0, JobState.PREPARING),
        (("i-1", "i-2", "i-3"), 30.0, JobState.PREPARING),
        (("i-1", "i-2", "i-3", "i-4"), 0.0, JobState.PREPARING),
    ],
)
def test_an_elastic_gang_starts_with_its_minimum_after_its_patience(
    assigned: tuple[str, ...], waited: float, state: JobState
) -> None:
    elastic = replace(spec_of("gpt", "a", 4, 2), min_node_count=2, patience_seconds=30)
    record = decide(
        JobState.ALLOCATING,
        spec=elastic,
        assigned=assigned,
        record={"vacant_since": NOW - waited, "accounted_until": NOW - 1},
    )
    assert record.state is state
    if state is JobState.PREPARING:
        smaller = len(assigned) if len(assigned) < 4 else 0
        assert (record.reduced_count, record.vacant_since) == (smaller, None)
    else:
        assert reason(record.reason) == f"waits for {4 - len(assigned)} nodes; starts on at least 2 nodes after 30 s"


def test_a_pause_by_a_person_ends_the_patience() -> None:
    waits = {"vacant_since": NOW - 50}
    assert decide(JobState.QUEUED, record=waits).vacant_since == NOW - 50
    assert decide(JobState.QUEUED, record={**waits, "pause_requested_at": NOW - 1}).vacant_since is None
    assert decide(JobState.QUEUED).vacant_since == NOW


def fact(state: JobState, **case) -> JobNote:
    found = decide(state, **case).reason
    assert isinstance(found, JobNote)
    return found


def test_a_job_without_nodes_says_for_what_it_waits() -> None:
    assert fact(JobState.ALLOCATING).what is JobFact.LACKS_NODES
    elastic = replace(SPEC, min_node_count=1, patience_seconds=30)
    assert fact(JobState.ALLOCATING, spec=elastic).what is JobFact.LACKS_NODES_TO_START_SMALLER
    aside = {"not_before": NOW + 1}
    assert fact(JobState.QUEUED, record=aside).what is JobFact.STANDS_ASIDE
    store = Blocked(obstacle=Obstacle.DENIED, since=NOW - 9)
    assert fact(JobState.QUEUED, record={**aside, "store_wait": store}).what is JobFact.STANDS_ASIDE_FROM_STORE
    turn = JobNote(what=JobFact.LACKS_NODES)
    assert fact(JobState.QUEUED, record={"not_before": NOW}, queue_words=turn) == turn


@pytest.mark.parametrize(
    ("started_at", "what"), [(None, JobFact.STOPPED_BEFORE_START), (9_010.0, JobFact.STOPPED_WHILE_PAUSED)]
)
def test_a_stop_without_nodes_says_whether_the_job_ever_ran(started_at: float | None, what: JobFact) -> None:
    assert fact(JobState.QUEUED, record={"stop_requested_at": NOW, "started_at": started_at}).what is what


@pytest.mark.parametrize(
    ("assigned", "expected"),
    [
        (("i-1", "i-2"), (JobFact.PREPARES, 2, 0)),
        (("i-1", "i-2", "i-3"), (JobFact.PREPARES, 3, 0)),
        (("i-1",), (JobFact.PREPARES_SMALLER, 1, 1)),
    ],
)
def test_a_job_with_its_nodes_prepares_a_generation_of_a_new_number(
    assigned: tuple[str, ...], expected: tuple[JobFact, int, int]
) -> None:
    elastic = replace(SPEC, min_node_count=1, patience_seconds=30)
    waits = {"vacant_since": NOW - 30, "accounted_until": NOW - 1}
    before = {**waits, "issued_generation": Generation(4), "member_count": 3, "missing_count": 1}
    found = decide(JobState.ALLOCATING, spec=elastic, assigned=assigned, record=before)
    assert isinstance(found.reason, JobNote)
    assert (found.reason.what, found.reason.count, found.reduced_count) == expected
    assert (found.issued_generation, found.member_count, found.missing_count) == (5, 0, 0)
