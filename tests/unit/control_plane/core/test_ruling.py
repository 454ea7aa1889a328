"""Tests what a job changes after repeated failures, given what its nodes hold (`core.job.ruling`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from control_plane.core.job.ruling import with_ruling
from control_plane.core.job.view import JobView
from control_plane.core.observed.incidents import FailureRecord, Repeated, Tries
from control_plane.core.observed.nodes import InstanceCondition
from control_plane.core.states import IncidentState
from everstep.protocol.agent_messages import ExitClass
from everstep.protocol.ids import Generation, Rank, Step
from everstep.protocol.plan import ShardSource, SlotRecord
from tests.unit.control_plane.core.test_job_view import NOW, ONE, TWO, incident
from tests.unit.control_plane.core.test_roster import node, preparing, promised, slot
from tests.unit.worker.rank_plans import rank_plan

NEW, OLD = (slot(0, 9), slot(1, 9)), (slot(0, 7), slot(1, 7))
FAILURE = FailureRecord(
    generation=Generation(1),
    step=Step(9),
    exit_class=ExitClass.ERROR,
    code=1,
    at=NOW - 60,
    max_boundary=Step(9),
    node_id=TWO,
    base_step=Step(9),
    last_lines="boom",
)
EARLIER = replace(FAILURE, generation=Generation(0))


def failing(
    one: tuple[SlotRecord, ...], two: tuple[SlotRecord, ...] | None, *, spares: int = 1, base: int = 9, **record: Any
) -> JobView:
    """Return the view of a job that failed three times alike from step 9, on node TWO.

    `one` and `two` are the slots of the members that have promised to join the next generation.
    """
    source = ShardSource(kind="local", origin_generation=Generation(1), step=Step(9), digest=bytes(16), payload_bytes=1)
    plan = rank_plan(addresses=("a", "b"))
    ranks = tuple(structs.replace(rank, sources=(source,)) for rank in plan.ranks)
    return preparing(
        node(ONE, promised(*one)),
        node(TWO, None if two is None else promised(*two)),
        record={
            "failures": (EARLIER, EARLIER, FAILURE),
            "max_boundary": Step(9),
            "incident": incident(IncidentState.REPLACING),
            **record,
        },
        spec={"max_attempts": 3},
        spare_count=spares,
        plan=structs.replace(plan, base_step=Step(base), ranks=ranks),
    )


def change(view: JobView) -> str | None:
    """Return what the job changes: `node`, `state`, `fails`, or None."""
    found, gives_up = with_ruling(view)
    if gives_up is not None:
        return "fails"
    return found.record.trials[-1].kind if found.record.trials else None


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        pytest.param(failing((*NEW, *OLD), (*NEW, *OLD)), "node", id="a spare takes over"),
        pytest.param(failing((*NEW, *OLD), (*NEW, *OLD), spares=0), "state", id="no spare"),
        pytest.param(failing(NEW, NEW, spares=0), "fails", id="no spare and no older state"),
        pytest.param(
            failing((*NEW, *OLD), (*NEW, *OLD), spares=0, base=8), "fails", id="the plan restored another step"
        ),
        pytest.param(failing(OLD, (*NEW, *OLD)), "state", id="only the failing node has the step"),
        pytest.param(failing(OLD, NEW), "state", id="without the failing node, the job is older"),
        pytest.param(failing((), (*NEW, *OLD), spares=1), "state", id="without the failing node, nothing is left"),
        pytest.param(failing((), NEW), "fails", id="without the failing node, nothing is left, nor is an older state"),
        pytest.param(failing((), (), committed=Step(0)), "node", id="no step is committed"),
        pytest.param(failing(NEW, None), None, id="a member has not promised yet"),
        pytest.param(failing(NEW, NEW, failures=()), None, id="no failure"),
        pytest.param(failing(NEW, NEW, failures=(FAILURE,)), None, id="one failure"),
        pytest.param(failing(NEW, NEW, failures=(FAILURE, FAILURE, EARLIER)), None, id="not of this generation"),
    ],
)
def test_what_a_job_changes_depends_on_what_its_nodes_hold(view: JobView, expected: str | None) -> None:
    assert change(view) == expected


def test_another_node_takes_over_and_the_failing_one_is_released() -> None:
    found, _ = with_ruling(failing((*NEW, *OLD), (*NEW, *OLD)))
    (exclusion,) = found.record.exclusions
    assert (exclusion.node_id, exclusion.may_terminate) == (TWO, False)
    (event,) = found.events
    assert isinstance(event.message, Tries)
    assert isinstance(event.message.because, Repeated)
    assert event.message.because.failure.last_lines == ""
    assert found.record.incident is not None
    assert found.record.incident.decision == event.message
    assert with_ruling(failing(NEW, NEW, incident=None))[0].record.incident is None


def test_every_source_of_the_failed_state_is_refused() -> None:
    found, _ = with_ruling(failing((*NEW, *OLD), (*NEW, *OLD), spares=0))
    assert found.record.exclusions == ()
    assert {(each.rank, each.is_object) for each in found.record.refused} == {
        (Rank(rank), is_object) for rank in (0, 1) for is_object in (False, True)
    }
    assert {(each.origin_generation, each.step) for each in found.record.refused} == {(1, 9)}


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_loss_that_aws_explains_later_does_not_count(has_ended: bool) -> None:
    lost = tuple(replace(each, is_node_loss=True, node_id=TWO) for each in (EARLIER, FAILURE))
    view = failing(NEW, NEW, failures=lost)
    if has_ended:
        ended = replace(view.nodes[TWO], instance=InstanceCondition.ENDED)
        view = replace(view, nodes={**view.nodes, TWO: ended})
    after, why = with_ruling(view)
    assert (why is None) == has_ended
    assert after.record.failures == (() if has_ended else lost)
