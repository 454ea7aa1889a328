"""Tests when the members of a new generation load and start, and when they do not (`core.job.launching`)."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from control_plane.accounts.facts import sentence
from control_plane.core.job.launching import load_and_start
from control_plane.core.observed.jobs import JobRecord
from control_plane.core.observed.nodes import Cause
from control_plane.core.observed.spans import Bucket
from control_plane.core.observed.steps import RefusedSource, SealedStates, StepStates
from control_plane.core.states import JobState
from everstep.protocol.agent_messages import MemberPhase, MemberReport, NodeFault, ShardProtection
from everstep.protocol.ids import Generation, Rank, Step
from everstep.protocol.plan import ShardSource
from tests.unit.control_plane.core.test_job_view import KILLED, NOW, TWO, checkpoint, made, report
from tests.unit.worker.rank_plans import rank_plan

PROMISED, LOADED, RUNNING = (
    tuple(report(rank, phase=phase, boundary=0) for rank in (0, 1))
    for phase in (MemberPhase.PROMISED, MemberPhase.LOADED, MemberPhase.RUNNING)
)
BROKEN = NodeFault(code="bad_source", message="no such file", is_permanent=True)


def launched(
    state: JobState,
    members: tuple[MemberReport, ...],
    *,
    base: int = 0,
    steps: tuple[int, ...] = (),
    **record: Any,
) -> Any:
    plan = structs.replace(rank_plan(addresses=("a", "b")), base_step=Step(base))
    values = {"state": state, "accounted_until": NOW, **record}
    return load_and_start(made(values, *members, checkpoints=tuple(map(checkpoint, steps)), plan=plan)).record


@pytest.mark.parametrize(
    ("state", "members", "after"),
    [
        pytest.param(JobState.LOADING, PROMISED, JobState.LOADING, id="they load"),
        pytest.param(JobState.LOADING, (LOADED[0], PROMISED[1]), JobState.LOADING, id="one still loads"),
        pytest.param(JobState.LOADING, LOADED, JobState.STARTING, id="all have loaded"),
        pytest.param(JobState.LOADING, (RUNNING[0], LOADED[1]), JobState.STARTING, id="one was started earlier"),
        pytest.param(JobState.STARTING, (RUNNING[0], LOADED[1]), JobState.STARTING, id="one still starts"),
        pytest.param(JobState.STARTING, RUNNING, JobState.RUNNING, id="all have started"),
    ],
)
def test_all_members_load_then_all_start(state: JobState, members: tuple[MemberReport, ...], after: JobState) -> None:
    assert launched(state, members).state is after


@pytest.mark.parametrize(
    ("base", "steps", "state", "after"),
    [
        pytest.param(0, (), JobState.LOADING, JobState.STOPPED, id="from the start"),
        pytest.param(5, (5,), JobState.LOADING, JobState.STOPPED, id="S3 has the step"),
        pytest.param(5, (4,), JobState.LOADING, JobState.LOADING, id="only memory has the step"),
        pytest.param(0, (), JobState.STARTING, JobState.STARTING, id="its ranks may run"),
    ],
)
def test_a_stop_ends_a_job_that_loads_if_no_step_is_lost(
    base: int, steps: tuple[int, ...], state: JobState, after: JobState
) -> None:
    members = PROMISED if state is JobState.LOADING else LOADED
    assert launched(state, members, base=base, steps=steps, stop_requested_at=NOW).state is after


@pytest.mark.parametrize(("trained", "has_failed"), [(0, True), (1, False)])
def test_one_permanent_fault_fails_a_job_that_never_trained(trained: int, has_failed: bool) -> None:
    members = (structs.replace(PROMISED[0], faults=(BROKEN,)), PROMISED[1])
    found = launched(JobState.LOADING, members, max_boundary=Step(trained)).state
    assert (found is JobState.FAILED) is has_failed


def test_a_rank_that_fails_in_its_start_counts_against_the_job() -> None:
    found = launched(JobState.STARTING, (report(0, KILLED, boundary=0), RUNNING[1]))
    assert (found.state, len(found.failures)) == (JobState.PREPARING, 1)


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        pytest.param({}, (NOW, 0), id="the first start"),
        pytest.param({"microseconds": {Bucket.PAUSED.value: 7}}, (NOW, 7), id="paused before"),
        pytest.param(
            {"started_at": 9_100.0, "microseconds": {Bucket.PAUSED.value: 7}}, (9_100.0, 0), id="started before"
        ),
    ],
)
def test_the_first_load_starts_the_runtime(record: dict[str, Any], expected: tuple[float, int]) -> None:
    found = launched(JobState.LOADING, LOADED, **record)
    assert (found.started_at, found.paused_microseconds_before_start) == expected


def test_a_copy_that_is_not_the_state_of_its_former_owner_is_not_trained_on() -> None:
    source = ShardSource(
        kind="peer", origin_generation=Generation(1), step=Step(5), digest=b"x" * 16, payload_bytes=1, node_id=TWO
    )
    made_plan = rank_plan(addresses=("a", "b"), generation=2)
    ranks = tuple(structs.replace(rank, sources=(source,)) for rank in made_plan.ranks)
    plan = structs.replace(made_plan, base_step=Step(5), ranks=ranks)
    sealed = StepStates(step=Step(5), digests=b"a" * 8 + b"b" * 8)
    record = {
        "state": JobState.LOADING,
        "accounted_until": NOW,
        "generation": plan.generation,
        "states": SealedStates(generation=Generation(1), world_size=2, newest=(sealed,)),
    }

    def loaded(*digests: bytes) -> JobRecord:
        reports = [
            structs.replace(
                report(rank, phase=MemberPhase.LOADED, boundary=0),
                generation=plan.generation,
                protection=(
                    ShardProtection(
                        rank=Rank(rank),
                        holders=(),
                        in_view=(),
                        committed=Step(-1),
                        payload_bytes=1,
                        states=((Step(5), digest),),
                    ),
                ),
            )
            for rank, digest in enumerate(digests)
        ]
        return load_and_start(made(record, *reports, plan=plan)).record

    assert loaded(b"a" * 8, b"b" * 8).state is JobState.STARTING
    found = loaded(b"a" * 8, b"z" * 8)
    assert found.state is JobState.PREPARING
    refused = RefusedSource(rank=Rank(1), origin_generation=Generation(1), step=Step(5), digest=source.digest)
    assert found.refused == (refused,)
    assert found.failures == ()
    assert found.incident is not None
    assert found.incident.cause is Cause.LOAD_FAILED
    assert sentence(found.incident.evidence[0]) == (
        f"{TWO} restored step 5 of rank 1, and the copy of {TWO} is not the state that the rank's former node reported"
    )
