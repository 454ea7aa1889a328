"""Tests how a running job gives up nodes: when its ranks stop, and when the job first waits for a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from control_plane.core.job import leaving
from control_plane.core.job.view import JobView
from control_plane.core.observed.incidents import CheckpointWaitKind, LeavesNodes
from control_plane.core.observed.jobs import Departure
from control_plane.core.observed.nodes import Cause, NodeObserved
from control_plane.core.observed.reasons import JobFact, JobNote
from control_plane.core.states import IncidentState, JobState
from everstep.protocol.agent_messages import MemberReport, ShardProtection
from everstep.protocol.ids import NodeId, Rank, Step
from tests.unit.control_plane.core.test_job_view import (
    NOW,
    ONE,
    POLICY,
    SUCCESS,
    TWO,
    checkpoint,
    incident,
    made,
    report,
    rounds,
)
from tests.unit.control_plane.core.test_resizing import departure

BLIND = POLICY.timeouts.blind_wait_seconds
SPARE = NodeId("i-2")
ASKED = departure(asked_at=NOW - 1)
RUNS = (report(0), report(1))
STOPPED = (report(0, SUCCESS), report(1, SUCCESS))


def leaving_job(
    moves: tuple[Departure, ...],
    members: tuple[MemberReport, ...] = STOPPED,
    *,
    ready: int = 0,
    steps: tuple[int, ...] = (9,),
    **record: Any,
) -> JobView:
    """Return the view of a job that has committed step 9, with `ready` spares and checkpoints of `steps`."""
    values = {"moves": moves, "boundary": Step(9), "committed": Step(9), "progress_at": NOW, **record}
    spares = tuple(NodeId(f"i-{2 + number}") for number in range(ready))
    view = made(values, *members, assigned=(ONE, TWO, *spares), checkpoints=tuple(map(checkpoint, steps)))
    nodes = {name: NodeObserved(node_id=name, is_connected=True, has_reported=True) for name in spares}
    return replace(view, nodes={**view.nodes, **nodes})


@pytest.mark.parametrize(
    ("ready", "asked", "what"),
    [
        pytest.param(0, [], None, id="no replacement"),
        pytest.param(1, [TWO], JobFact.TO_LEAVE_FOR, id="a replacement for the node that AWS ends"),
        pytest.param(2, [ONE, TWO], JobFact.TO_LEAVE_FOR, id="two replacements"),
    ],
)
def test_the_ranks_are_asked_to_stop_for_nodes_that_can_be_replaced(
    ready: int, asked: list[NodeId], what: JobFact | None
) -> None:
    moves = (departure(TWO, Cause.NOTICE, ends_at=NOW + 1e6), departure(ONE))
    decision = leaving.leave(leaving_job(moves, RUNS, ready=ready))
    assert (decision is not None) is bool(asked)
    if decision is not None:
        assert sorted(move.node_id for move in decision.record.moves if move.asked_at == NOW) == asked
        (event,) = decision.events
        assert isinstance(event.message, JobNote)
        assert (event.message.what, event.node_id, decision.requeue_after_seconds) == (what, TWO, 0.0)
        assert len(event.message.takers) == len(asked)


def test_the_ranks_are_asked_to_stop_at_the_last_moment_without_a_replacement() -> None:
    decision = leaving.leave(leaving_job((departure(TWO, Cause.NOTICE, ends_at=NOW + 1),), RUNS))
    assert decision is not None
    assert isinstance(decision.events[0].message, JobNote)
    assert decision.events[0].message.what is JobFact.TO_LEAVE


@pytest.mark.parametrize(
    ("record", "members", "state"),
    [
        pytest.param({"progress_at": NOW - BLIND}, RUNS, JobState.RUNNING, id="at the limit"),
        pytest.param({"progress_at": NOW - BLIND - 1}, RUNS, JobState.PREPARING, id="after the limit"),
        pytest.param(
            {"progress_at": NOW - BLIND - 9}, (report(0, limit=9.0), report(1)), JobState.RUNNING, id="a long phase"
        ),
    ],
)
def test_a_job_whose_ranks_stand_still_restarts_without_a_stop(
    record: dict[str, Any], members: tuple[MemberReport, ...], state: JobState
) -> None:
    moves = tuple(replace(ASKED, asked_at=1.0, cause=cause) for cause in (Cause.RETURNED, Cause.NODE_FAULT))
    decision = leaving.leave(leaving_job(moves, members, **record))
    assert decision is not None
    assert decision.record.state is state
    if state is JobState.PREPARING:
        assert [move.asked_at for move in decision.record.moves if move.cause is Cause.RETURNED] == [1.0]
        assert all(move.asked_at is None for move in decision.record.moves if move.cause is Cause.NODE_FAULT)


@pytest.mark.parametrize(
    ("record", "steps", "why"),
    [
        pytest.param({"committed": Step(0)}, (), CheckpointWaitKind.NO_STEP, id="no step"),
        pytest.param({"committed": Step(1)}, (), CheckpointWaitKind.SOLE_HOLDER, id="the first step"),
        pytest.param({}, (9,), CheckpointWaitKind.IN_S3, id="stored"),
        pytest.param({}, (8,), CheckpointWaitKind.SOLE_HOLDER, id="not stored"),
    ],
)
def test_a_stopped_job_waits_for_a_checkpoint_if_only_the_departing_node_has_the_step(
    record: dict[str, Any], steps: tuple[int, ...], why: CheckpointWaitKind
) -> None:
    decision = leaving.leave(leaving_job((ASKED,), steps=steps, **record))
    assert decision is not None
    opened = decision.record.incident
    assert opened is not None
    assert isinstance(opened.decision, LeavesNodes)
    assert (opened.decision.node_ids, opened.decision.is_return, opened.decision.wait.why) == ((TWO,), False, why)
    waits = why is CheckpointWaitKind.SOLE_HOLDER
    assert decision.record.state is (JobState.RUNNING if waits else JobState.PREPARING)


@pytest.mark.parametrize(
    ("held", "ready", "why"),
    [
        pytest.param(True, 0, CheckpointWaitKind.NO_REPLACEMENT, id="held, not replaceable"),
        pytest.param(True, 1, CheckpointWaitKind.IN_TIME, id="held and replaceable"),
        pytest.param(False, 1, CheckpointWaitKind.SOLE_HOLDER, id="not held"),
    ],
)
def test_a_job_waits_with_an_announced_end_by_what_the_other_nodes_can_do(
    held: bool, ready: int, why: CheckpointWaitKind
) -> None:
    members = [
        structs.replace(
            report,
            protection=(
                ShardProtection(rank=Rank(rank), holders=(ONE,), in_view=(ONE,), committed=Step(9), payload_bytes=1),
            ),
        )
        if held
        else report
        for rank, report in enumerate(STOPPED)
    ]
    notice = replace(ASKED, cause=Cause.NOTICE)
    moves = (notice,) if held else (notice, replace(ASKED, node_id=ONE))
    decision = leaving.leave(leaving_job(moves, members, ready=ready, steps=()))
    assert decision is not None
    assert decision.record.incident is not None
    assert isinstance(decision.record.incident.decision, LeavesNodes)
    wait = decision.record.incident.decision.wait
    assert (wait.why, wait.remaining_seconds) == (why, BLIND)


def test_a_departure_is_a_return_only_if_every_node_is_returned() -> None:
    returned = replace(ASKED, node_id=ONE, cause=Cause.RETURNED)
    for moves, is_return in (((returned,), True), ((returned, ASKED), False)):
        decision = leaving.leave(leaving_job(moves))
        assert decision is not None
        assert decision.record.incident is not None
        assert isinstance(decision.record.incident.decision, LeavesNodes)
        assert decision.record.incident.decision.is_return is is_return


@pytest.mark.parametrize(
    ("members", "failed_at", "reached"),
    [
        pytest.param(
            tuple(report(rank, structs.replace(SUCCESS, at_seconds=NOW - 5 + rank)) for rank in (0, 1)),
            NOW - 4,
            9,
            id="the last exit",
        ),
        pytest.param(
            tuple(report(rank, structs.replace(SUCCESS, at_seconds=NOW + 5), boundary=12) for rank in (0, 1)),
            NOW,
            12,
            id="a clock that is ahead, and newer steps",
        ),
        pytest.param(
            (report(0, round=rounds(finished=True, stopped=True), boundary=8), report(1)), NOW, 9, id="no exit yet"
        ),
    ],
)
def test_a_departure_begins_when_the_last_rank_stopped(
    members: tuple[MemberReport, ...], failed_at: float, reached: int
) -> None:
    decision = leaving.leave(leaving_job((ASKED,), members))
    assert decision is not None
    opened = decision.record.incident
    assert opened is not None
    assert (opened.failed_at, opened.reached_step) == (failed_at, reached)


@pytest.mark.parametrize(
    ("state", "is_same"),
    [(None, False), (IncidentState.REPLACING, True), (IncidentState.REWORKING, False)],
)
@pytest.mark.parametrize("steps", [(8,), (9,)])
def test_a_departure_is_part_of_the_incident_that_it_opened(
    state: IncidentState | None, is_same: bool, steps: tuple[int, ...]
) -> None:
    before = None if state is None else replace(incident(state), opened_at=NOW)
    decision = leaving.leave(leaving_job((ASKED,), steps=steps, incident=before))
    assert decision is not None
    opened = decision.record.incident
    assert opened is not None
    assert (opened.id == "inc-1") is is_same
    closed = [each.id for each in decision.incidents if each.state is IncidentState.CLOSED]
    assert closed == (["inc-1"] if state is IncidentState.REWORKING else [])


@pytest.mark.parametrize(
    ("cause", "parity", "named"),
    [
        pytest.param(Cause.NODE_UNREACHABLE, None, [ONE, SPARE], id="unreachable"),
        pytest.param(Cause.NODE_FAULT, None, [], id="another fault"),
        pytest.param(Cause.NODE_UNREACHABLE, 2, [], id="parity hides who is unreachable"),
    ],
)
def test_the_history_of_a_remaining_node_names_the_departing_node_that_it_could_not_reach(
    cause: Cause, parity: int | None, named: list[NodeId]
) -> None:
    unseen = ShardProtection(
        rank=Rank(0), holders=(ONE, TWO, SPARE), in_view=(ONE,), committed=Step(9), payload_bytes=1
    )
    first = structs.replace(STOPPED[0], protection=(unseen,))
    view = leaving_job((replace(ASKED, cause=cause),), (first, STOPPED[1]))
    decision = leaving.leave(replace(view, spec=replace(view.spec, parity_group_size=parity)))
    assert decision is not None
    partners = [line for line in decision.implications if line.node_id != TWO]
    assert sorted(line.node_id for line in partners) == sorted(named)
