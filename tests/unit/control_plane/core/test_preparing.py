"""Tests how a job prepares its next generation, stores its plan, or ends before that (`core.job.preparing`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from control_plane.core.job.preparing import prepare
from control_plane.core.observed.incidents import IncidentRecord
from control_plane.core.observed.jobs import Exclusion
from control_plane.core.observed.nodes import Cause
from control_plane.core.observed.reasons import AwaitsConsent, JobFact, JobNote, Waits
from control_plane.core.observed.steps import RefusedSource
from control_plane.core.states import JobState
from everstep.protocol.agent_messages import MemberPhase
from everstep.protocol.ids import NO_STEP, Generation, NodeId, Rank, Step
from everstep.protocol.plan import SlotRecord
from tests.unit.control_plane.core.test_job_view import NOW, ONE, POLICY, TWO, checkpoint
from tests.unit.control_plane.core.test_resizing import departure
from tests.unit.control_plane.core.test_roster import OPEN, SPARE, node, preparing, promised, slot

BLIND = POLICY.timeouts.blind_wait_seconds
BOTH = (slot(0, 9), slot(1, 9))
HELD = node(ONE, promised(*BOTH)), node(TWO, promised(*BOTH))


def test_a_job_takes_the_number_after_the_highest_that_any_agent_reports() -> None:
    reported = preparing(node(ONE, promised(generation=Generation(5))), record={"asked": ((ONE, NOW),)})
    found = prepare(reported).record
    assert (found.state, found.issued_generation, found.asked) == (JobState.PREPARING, 6, ())
    assert prepare(preparing(node(ONE, promised()))).record.issued_generation == 2


@pytest.mark.parametrize(
    ("boundary", "expected"),
    [
        pytest.param(8, (9, None, 9), id="older"),
        pytest.param(9, (9, 5.0, 9), id="equal"),
        pytest.param(12, (12, 5.0, 12), id="newer"),
    ],
)
def test_every_rank_has_finished_a_committed_step(boundary: int, expected: tuple[int, float | None, int]) -> None:
    record = {"boundary": Step(boundary), "boundary_at": 5.0, "max_boundary": Step(boundary)}
    late = structs.replace(promised(*BOTH), phase=MemberPhase.EXITED)
    found = prepare(preparing(node(ONE, late), node(TWO, late), record=record)).record
    assert (found.boundary, found.boundary_at, found.max_boundary) == expected
    alone = prepare(preparing(node(ONE, late), node(TWO), record=record)).record
    assert (alone.boundary, alone.max_boundary) == (expected[0], boundary), "one node alone names the step"


@pytest.mark.parametrize(
    ("steps", "record", "state"),
    [
        pytest.param((9,), {}, JobState.PREPARING, id="not to stop"),
        pytest.param((9,), {"stop_requested_at": NOW}, JobState.STOPPED, id="S3 has the step"),
        pytest.param(
            (8,), {"stop_requested_at": NOW - BLIND}, JobState.PREPARING, id="only memory has it: at the limit"
        ),
        pytest.param((8,), {"stop_requested_at": NOW - BLIND - 1}, JobState.STOPPED, id="after the limit"),
        pytest.param((8,), {"stop_reason": "limit", "state_since": NOW}, JobState.PREPARING, id="its own limit, now"),
        pytest.param((8,), {"stop_reason": "limit", "state_since": 9_000.0}, JobState.STOPPED, id="its own limit"),
    ],
)
def test_a_stop_without_ranks_waits_for_a_step_that_only_memory_has(
    steps: tuple[int, ...], record: dict[str, Any], state: JobState
) -> None:
    view = preparing(node(ONE), node(TWO), record=record, checkpoints=tuple(map(checkpoint, steps)))
    assert prepare(view).record.state is state


PAUSE = {"pause_requested_at": NOW - BLIND - 1, "state_since": NOW - BLIND - 1}


@pytest.mark.parametrize(
    ("record", "missing", "changes", "state"),
    [
        pytest.param({}, True, {}, JobState.QUEUED, id="after the limit"),
        pytest.param({"pause_requested_at": NOW - BLIND}, True, {}, JobState.PREPARING, id="at the limit"),
        pytest.param({"state_since": NOW - BLIND}, True, {}, JobState.PREPARING, id="in this state for a short time"),
        pytest.param({"pause_requested_at": None}, True, {}, JobState.PREPARING, id="no pause"),
        pytest.param({"pause_requested_at": NOW}, True, {"steps": (9,)}, JobState.QUEUED, id="S3 has the step"),
        pytest.param({}, False, {}, JobState.PREPARING, id="no node is missing"),
        pytest.param(
            {"exclusions": (Exclusion(node_id=ONE, evidence=OPEN.evidence[0], may_terminate=False),)},
            True,
            {},
            JobState.PREPARING,
            id="a node is still being given up",
        ),
        pytest.param({}, True, {"spec": {"max_repeated_minutes": 1}}, JobState.PREPARING, id="much would be repeated"),
    ],
)
def test_a_paused_job_gives_its_nodes_back_while_one_is_missing(
    record: dict[str, Any], missing: bool, changes: dict[str, Any], state: JobState
) -> None:
    nodes = (HELD[0],) if missing else (HELD[0], node(TWO))
    steps = tuple(map(checkpoint, changes.get("steps", (8,))))
    found = prepare(
        preparing(*nodes, record={**PAUSE, **record}, checkpoints=steps, spec=changes.get("spec", {}))
    ).record
    assert found.state is state
    assert found.committed == (max(changes.get("steps", (8,))) if state is JobState.QUEUED else 9)


def test_a_job_that_waits_says_for_which_nodes() -> None:
    late = prepare(preparing(node(ONE, promised()), node(TWO), lack_reasons=("none",))).record.reason
    assert isinstance(late, Waits)
    assert (late.missing_count, late.lack_reasons, late.late, late.smaller) == (0, (), (TWO,), None)
    assert late.consent is None
    missing = prepare(
        preparing(node(ONE, promised()), lack_reasons=("none",), spec={"min_node_count": 1})
    ).record.reason
    assert isinstance(missing, Waits)
    assert (missing.missing_count, missing.lack_reasons, missing.late) == (1, ("none",), ())
    assert missing.smaller is not None


@pytest.mark.parametrize(
    ("slots", "committed", "expected"),
    [
        pytest.param(BOTH, 9, (JobFact.RESTORES, 9, 9), id="the committed step"),
        pytest.param((slot(0, 7), slot(1, 7)), 9, (JobFact.RESTORES, 7, 7), id="an older step"),
        pytest.param((), -1, (JobFact.STARTS_ANEW, 0, -1), id="nothing yet"),
    ],
)
def test_a_plan_is_stored_once_every_member_has_promised(
    slots: tuple[SlotRecord, ...], committed: int, expected: tuple[JobFact, int, int]
) -> None:
    record = {"committed": Step(committed), "boundary": Step(12), "boundary_at": 5.0, "incident": None}
    found = prepare(preparing(*(node(name, promised(*slots)) for name in (ONE, TWO)), record=record))
    assert found.plan is not None
    assert isinstance(found.record.reason, JobNote)
    assert (found.record.reason.what, found.plan.base_step, found.record.committed) == expected
    assert (found.record.boundary, found.record.boundary_at) == (expected[1], None)
    assert bool(found.record.reason.name) is (expected[0] is JobFact.RESTORES)


@pytest.mark.parametrize(
    ("checkpoints", "expected"),
    [
        pytest.param((), JobFact.INITIAL_STATE_LOST, id="none is left"),
        pytest.param(({"is_wrong": True},), JobFact.INITIAL_STATE_LOST, id="it is damaged"),
        pytest.param(
            ({"is_wrong": True}, {"is_wrong": True, "verify_requested_at": 1.0}),
            JobFact.AWAITS_VERIFICATION,
            id="judged",
        ),
    ],
)
def test_a_job_does_not_start_anew_without_its_initial_checkpoint(
    checkpoints: tuple[dict[str, Any], ...], expected: JobFact
) -> None:
    found = prepare(
        preparing(
            node(ONE, promised()),
            node(TWO, promised()),
            record={"committed": NO_STEP},
            spec={"initial_checkpoint": "other"},
            checkpoints=tuple(replace(checkpoint(3), **each) for each in checkpoints),
        )
    ).record
    assert isinstance(found.reason, JobNote)
    assert found.reason.what is expected
    held = prepare(preparing(*HELD, spec={"initial_checkpoint": "other"})).record
    assert held.state is JobState.LOADING


def test_a_plan_that_repeats_much_training_waits_for_consent() -> None:
    nodes = (node(name, promised(slot(0, 7), slot(1, 7))) for name in (ONE, TWO))
    found = prepare(preparing(*nodes, spec={"max_repeated_minutes": 1}))
    assert isinstance(found.record.reason, AwaitsConsent)
    assert (found.plan, found.record.repeat is None) == (None, False)


def stored(incident: dict[str, Any], names: tuple[NodeId, ...] = (ONE, TWO), **record: Any) -> IncidentRecord:
    """Return the incident after the plan with the nodes `names` is stored, from the shards of step 9."""
    slots = record.pop("slots", BOTH)
    nodes = tuple(node(name, promised(*slots)) for name in names)
    steps = (checkpoint(9),)
    view = preparing(*nodes, record={"incident": replace(OPEN, **incident), **record}, checkpoints=steps)
    found = prepare(view).record.incident
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("named", "names", "expected"),
    [
        pytest.param((), (ONE, TWO), (), id="the same nodes"),
        pytest.param((), (ONE, SPARE), (SPARE,), id="a new node"),
        pytest.param((SPARE,), (ONE, SPARE), (SPARE,), id="named once"),
        pytest.param((NodeId("i-9"),), (ONE, SPARE), (SPARE,), id="an earlier replacement was lost"),
    ],
)
def test_an_incident_names_the_replacements_of_the_stored_plan(
    named: tuple[NodeId, ...], names: tuple[NodeId, ...], expected: tuple[NodeId, ...]
) -> None:
    found = stored({"replacement_instance_ids": named}, names)
    assert (found.replacement_instance_ids, found.generation_after, found.from_step) == (expected, 2, 9)
    assert found.restore_source is not None


@pytest.mark.parametrize(
    ("cause", "record", "is_lost"),
    [
        pytest.param(Cause.INSTANCE_TERMINATED, {}, True, id="a lost node"),
        pytest.param(Cause.RANK_EXIT, {}, False, id="a failed rank"),
        pytest.param(Cause.INSTANCE_TERMINATED, {"slots": BOTH}, False, id="memory has the step"),
        pytest.param(Cause.INSTANCE_TERMINATED, {"committed": Step(0)}, False, id="no step is committed"),
        pytest.param(
            Cause.INSTANCE_TERMINATED,
            {"refused": (RefusedSource(rank=Rank(0), origin_generation=Generation(1), step=Step(8)),)},
            False,
            id="a source was refused",
        ),
    ],
)
def test_a_restore_from_s3_after_a_lost_node_means_that_memory_lost_shards(
    cause: Cause, record: dict[str, Any], is_lost: bool
) -> None:
    found = stored({"cause": cause}, **{"slots": (), **record})
    assert (found.cause is Cause.GROUP_LOST) is is_lost


def test_an_incident_names_faulty_nodes_that_the_job_keeps() -> None:
    moves = (departure(TWO), departure(ONE, Cause.REQUESTED))
    nodes = node(ONE, promised(BOTH[0])), node(TWO, promised(BOTH[1]))
    found = prepare(preparing(*nodes, record={"moves": moves}, spare_count=2))
    assert found.record.incident is not None
    assert [event.message.node_ids for event in found.events if event.type == "NodeKept"] == [(TWO,), (ONE,)]
    assert found.record.incident.kept_instance_ids == (TWO,)


@pytest.mark.parametrize(
    ("arguments", "minor", "waits"),
    [
        pytest.param(("--fp16",), 0, True, id="an earlier agent"),
        pytest.param(("--fp16",), None, True, id="an agent of an unknown release"),
        pytest.param(("--fp16",), 1, False, id="agents that know arguments"),
        pytest.param((), 0, False, id="no arguments"),
    ],
)
def test_arguments_wait_for_agents_that_know_them(arguments: tuple[str, ...], minor: int | None, waits: bool) -> None:
    view = preparing(*HELD)
    script = structs.replace(view.spec.script, arguments=arguments)
    minors = {ONE: 1, TWO: minor}
    nodes = {name: replace(view.nodes[name], protocol_minor=minors[name]) for name in minors}
    view = replace(view, nodes=nodes, spec=replace(view.spec, script=script))
    found = prepare(view)
    assert (found.plan is None) == waits
    if waits:
        assert found.reason == JobNote(what=JobFact.AWAITS_AGENTS, node_ids=(TWO,))
