"""Tests what one node alone can claim about the steps of a job."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import msgspec
import pytest

from control_plane.core import claims
from control_plane.core.observed.jobs import JobObserved, JobRecord
from control_plane.core.states import JobState
from everstep.protocol.agent_messages import MemberReport, PageCommit
from everstep.protocol.ids import NodeId, Step
from tests.unit.control_plane.core.cluster import fresh
from tests.unit.worker.rank_plans import rank_plan

RECORD = JobRecord(
    state=JobState.RUNNING,
    reason="",
    created_at=0.0,
    state_since=0.0,
    accounted_until=1000.0,
    stepped_at=900.0,
    base_step=Step(100),
    boundary=Step(590),
    max_boundary=Step(590),
)
FAR = 10**12


def seen(nodes: int) -> JobObserved:
    plan = rank_plan(addresses=tuple("abc"[:nodes]))
    return JobObserved(record=RECORD, plan=plan, lineage=(), checkpoints=(), assigned=(), nodes={})


def named(**steps: int) -> dict[NodeId, Step]:
    return {NodeId(name): Step(step) for name, step in steps.items()}


@pytest.mark.parametrize(
    ("nodes", "steps", "expected"),
    [
        (2, {"a": 600, "b": 598}, 600),
        (2, {"a": 600, "b": 560}, 600),
        (2, {"a": FAR, "b": 600}, 600 + 64 + 40),
        (3, {"a": FAR, "b": 600, "c": 580}, 600 + 64 + 40),
        (3, {"a": 0, "b": 600, "c": 599}, 600),
        (2, {"a": FAR}, 590 + 2000),
        (2, {"a": 600}, 600),
        (1, {"a": FAR}, FAR),
        (2, {}, -1),
    ],
)
def test_one_node_counts_for_little_more_than_the_next_one(nodes: int, steps: dict[str, int], expected: int) -> None:
    assert claims.reached(seen(nodes), RECORD, named(**steps), 1000.5) == expected


def test_before_the_first_step_of_a_generation_one_node_counts_for_few_steps() -> None:
    record = replace(RECORD, stepped_at=None, boundary=Step(100), max_boundary=Step(100))
    assert claims.reached(seen(2), record, named(a=FAR, b=100), 1000.0) == 164


@pytest.mark.parametrize(
    ("nodes", "steps", "seconds", "expected"),
    [
        (3, {"a": FAR, "b": 700}, 0.0, 700 + 1000),
        (2, {"a": FAR}, 0.0, 590 + 1000),
        (2, {"a": FAR}, 599.5, 590 + 601_000),
        (2, {"a": FAR, "b": 7}, 0.0, 590 + 1000),
        (1, {"a": FAR}, 0.0, FAR + 1000),
    ],
)
def test_the_time_since_the_record_limits_what_one_node_claims(
    nodes: int, steps: dict[str, int], seconds: float, expected: int
) -> None:
    assert claims.limit(seen(nodes), RECORD, named(**steps), 1000.0 + seconds) == expected


def test_the_base_that_the_control_plane_has_chosen_needs_no_further_witness() -> None:
    record = replace(RECORD, base_step=Step(620), boundary=Step(620))
    assert claims.supported(seen(2), record, named(a=620)) == 620


def test_a_commit_that_one_node_invents_does_not_raise_the_highest_step_for_ever() -> None:
    simulation = fresh()
    job = simulation.jobs[0]
    for _ in range(8):
        simulation.train(job, 1)
        simulation.step()
    first, liar, *_ = simulation.running(job)
    simulation.kill_rank(first)
    true, generation = liar.member, job.record.generation

    def lie() -> MemberReport | None:
        report, commit = true(), PageCommit(generation=generation, step=Step(FAR))
        return None if report is None else msgspec.structs.replace(report, commits=(commit,))

    with patch.object(liar, "member", lie):
        for _ in range(3):
            simulation.step()
    for _ in range(30):
        simulation.step()
    assert simulation.running(job)
    assert job.record.generation > generation
    assert job.record.max_boundary == 8
