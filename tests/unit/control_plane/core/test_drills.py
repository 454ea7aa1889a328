"""A drill is a fault that a person injects. A failure counts as part of a drill only if the drill can cause it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from control_plane.core import drills, incidents
from control_plane.core.incidents import Fault
from control_plane.core.observed.drills import DrillKind, DrillObserved, DrillOutcome, DrillState
from control_plane.core.observed.facts import Recorded
from control_plane.core.observed.incidents import FailureRecord, IncidentRecord, RestartsRanks
from control_plane.core.observed.jobs import JobRecord
from control_plane.core.observed.nodes import Cause, Implication, Remedy
from control_plane.core.states import JobState
from control_plane.core.timeouts import ladder
from everstep.protocol.agent_messages import ExitClass, MemberPhase, MemberReport, RankExit, RankStatus
from everstep.protocol.ids import Generation, JobName, NodeId, Rank, RunId, Step
from tests.unit.worker.rank_plans import rank_plan

STRUCK, OTHER = NodeId("i-1"), NodeId("i-2")
NOW = 1000.0


def drill(kind: DrillKind) -> DrillObserved:
    return DrillObserved(
        id="drill-1",
        kind=kind,
        node_id=STRUCK,
        rank=Rank(1) if kind is DrillKind.KILL_RANK else None,
        requested_by="ann",
        requested_at=NOW - 2,
        state=DrillState.STRUCK,
        generation=Generation(3),
        struck_at=NOW - 1,
    )


def exit_of(rank: int, node: NodeId, at: float = NOW) -> Fault:
    return Fault(
        cause=Cause.RANK_EXIT,
        evidence=Recorded(text=f"rank {rank} on {node} ended"),
        at=at,
        seen_on=(node,),
        rank=Rank(rank),
    )


def reports(
    exit_class: ExitClass | None = ExitClass.KILLED, *, rank: int = 1, node: NodeId = STRUCK
) -> dict[NodeId, MemberReport]:
    """Return the report of an agent, by default that of the drill's target, about one of its ranks."""
    ended = (
        RankExit(exit_class=exit_class, code=-9, at_seconds=NOW, boundary=Step(7)) if exit_class is not None else None
    )
    ranks = (RankStatus(rank=Rank(rank), boundary=Step(7), exit=ended),)
    return {
        node: MemberReport(
            job=JobName("gpt"), run=RunId("r"), generation=Generation(3), phase=MemberPhase.RUNNING, ranks=ranks
        )
    }


def opened_by(*found: Fault) -> IncidentRecord:
    return incidents.opened(RunId("r"), Generation(3), found, decision=RestartsRanks(), reached=Step(7), now=NOW)


def fault(cause: Cause, node: NodeId | None = None, *, speaks_against: NodeId | None = None) -> Fault:
    line = (
        Implication(
            node_id=speaks_against,
            incident_id="",
            at=NOW,
            what=cause.value,
            evidence=Recorded(text=""),
            remedy=Remedy.RESTART,
        )
        if speaks_against
        else None
    )
    return Fault(
        cause=cause,
        evidence=Recorded(text=f"{cause} of {node or speaks_against}"),
        at=NOW,
        node_id=node,
        implicates=line,
    )


def failure(node: NodeId) -> FailureRecord:
    return FailureRecord(
        generation=Generation(3),
        step=Step(7),
        exit_class=ExitClass.KILLED,
        code=-9,
        at=NOW,
        max_boundary=Step(7),
        node_id=node,
    )


def causes(
    kind: DrillKind, *found: Fault, generation: int = 3, told: dict[NodeId, MemberReport] | None = None
) -> list[Cause]:
    return [each.cause for each in drills.attributed(drill(kind), generation, found, reports=told or {})[0]]


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        (DrillKind.KILL_AGENT, (fault(Cause.AGENT_LOST, speaks_against=STRUCK),)),
        (DrillKind.KILL_AGENT, (fault(Cause.NODE_UNREACHABLE, STRUCK),)),
        (DrillKind.KILL_AGENT, (fault(Cause.AGENT_LOST, speaks_against=STRUCK), fault(Cause.AGENT_LOST))),
        (DrillKind.TERMINATE_INSTANCE, (fault(Cause.INSTANCE_TERMINATED, STRUCK),)),
        (DrillKind.TERMINATE_INSTANCE, (fault(Cause.INSTANCE_TERMINATED, STRUCK), fault(Cause.GROUP_LOST))),
        (DrillKind.TERMINATE_INSTANCE, (fault(Cause.NODE_UNREACHABLE, STRUCK), fault(Cause.RANK_EXIT))),
    ],
)
def test_what_follows_from_a_drill_is_the_drills(kind: DrillKind, found: tuple[Fault, ...]) -> None:
    told, _ = drills.attributed(drill(kind), 3, found)
    assert {each.cause for each in told} == {Cause.DRILL}
    assert [each.evidence for each in told] == [*(each.evidence for each in found), drills.ordered(drill(kind))]
    assert all(each.implicates is None for each in told)
    opened = incidents.opened(RunId("r"), Generation(3), told, decision=RestartsRanks(), reached=Step(7), now=NOW)
    assert (opened.cause, opened.lost_node_count) == (Cause.DRILL, 0)
    assert opened.instance_ids == tuple(each.node_id for each in found if each.node_id is not None)


@pytest.mark.parametrize(
    ("first", "told", "is_drills"),
    [
        pytest.param(exit_of(1, STRUCK), reports(), True, id="the struck rank"),
        pytest.param(exit_of(0, OTHER), reports(), True, id="one that ended for want of it and is heard first"),
        pytest.param(exit_of(0, OTHER), {}, False, id="another one, and nothing is heard of the struck one yet"),
        pytest.param(exit_of(0, OTHER), reports(None), False, id="another one, and the struck one runs"),
        pytest.param(
            exit_of(0, OTHER), reports(ExitClass.HALTED), False, id="another one, for which the struck one was halted"
        ),
        pytest.param(exit_of(0, OTHER, NOW - 1), reports(), True, id="one that ended at that time"),
        pytest.param(exit_of(0, OTHER, NOW - 2), reports(), False, id="one that had ended before"),
        pytest.param(exit_of(2, STRUCK), reports(rank=2), False, id="another rank of its node"),
        pytest.param(exit_of(2, STRUCK, NOW - 2), reports(), False, id="another rank of its node, before"),
    ],
)
def test_an_exit_is_the_drills_once_the_rank_that_it_killed_is_known_to_have_ended(
    first: Fault, told: dict[NodeId, MemberReport], *, is_drills: bool
) -> None:
    killed = drill(DrillKind.KILL_RANK)
    expected = [Cause.DRILL, Cause.DRILL] if is_drills else [Cause.RANK_EXIT]
    found, remembered = drills.attributed(killed, 3, (first,), failure(OTHER), reports=told)
    assert [each.cause for each in found] == expected
    assert (remembered is None) is is_drills
    assert causes(DrillKind.KILL_RANK, first, generation=4, told=told) == [Cause.RANK_EXIT]


def test_an_incident_of_another_ranks_exit_is_told_as_the_drills_once_the_struck_rank_is_heard() -> None:
    killed = drill(DrillKind.KILL_RANK)
    struck, _ = drills.attributed(killed, 3, (exit_of(1, STRUCK),), reports=reports())
    assert (
        incidents.with_faults(drills.recast(killed, opened_by(exit_of(0, OTHER)), struck), struck).cause is Cause.DRILL
    )
    assert drills.recast(killed, opened_by(exit_of(0, OTHER, NOW - 2)), struck).cause is Cause.RANK_EXIT, (
        "it had ended before the drill struck"
    )


def test_members_that_cannot_reach_the_struck_coordinator_say_what_the_drill_did_before_aws_does() -> None:
    cut_off = replace(fault(Cause.AGENT_LOST), seen_on=(OTHER,), unreached=STRUCK)
    assert causes(DrillKind.TERMINATE_INSTANCE, cut_off) == [Cause.DRILL, Cause.DRILL]
    assert causes(DrillKind.KILL_AGENT, cut_off) == [Cause.DRILL, Cause.DRILL]
    assert causes(DrillKind.KILL_RANK, cut_off) == [Cause.AGENT_LOST]
    assert causes(DrillKind.TERMINATE_INSTANCE, replace(cut_off, unreached=OTHER)) == [Cause.AGENT_LOST]
    assert causes(DrillKind.TERMINATE_INSTANCE, cut_off, generation=4) == [Cause.AGENT_LOST], (
        "another one is coordinator since"
    )
    of_instance = drill(DrillKind.TERMINATE_INSTANCE)
    incident = opened_by(*drills.attributed(of_instance, 3, (cut_off,))[0])
    lost, _ = drills.attributed(of_instance, 3, (fault(Cause.INSTANCE_TERMINATED, STRUCK),))
    whole = incidents.with_faults(drills.recast(of_instance, incident, lost), lost)
    assert (whole.cause, whole.lost_node_count, whole.instance_ids) == (Cause.DRILL, 0, (STRUCK,))


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        # a drill that kills a rank does not terminate the instance
        (DrillKind.KILL_RANK, fault(Cause.INSTANCE_TERMINATED, STRUCK)),
        (DrillKind.KILL_AGENT, fault(Cause.INSTANCE_TERMINATED, STRUCK)),
        # the node reported this fault itself, so the drill did not cause it
        (DrillKind.TERMINATE_INSTANCE, fault(Cause.NODE_FAULT, STRUCK)),
        (DrillKind.TERMINATE_INSTANCE, fault(Cause.INSTANCE_TERMINATED, OTHER)),
        (DrillKind.KILL_AGENT, fault(Cause.RANK_EXIT)),
        (DrillKind.KILL_RANK, fault(Cause.HANG)),
    ],
)
def test_what_a_drill_does_not_bring_about_is_none_of_it(kind: DrillKind, found: Fault) -> None:
    assert drills.attributed(drill(kind), 3, (found,)) == ((found,), None)


def test_of_a_later_generation_only_the_end_of_the_instance_is_the_drills() -> None:
    lost = fault(Cause.NODE_UNREACHABLE, STRUCK)
    assert causes(DrillKind.KILL_AGENT, lost, generation=4) == [Cause.NODE_UNREACHABLE]
    assert causes(DrillKind.TERMINATE_INSTANCE, lost, generation=4) == [Cause.DRILL, Cause.DRILL]
    assert causes(DrillKind.TERMINATE_INSTANCE, lost, fault(Cause.RANK_EXIT), generation=4) == [
        Cause.DRILL,
        Cause.RANK_EXIT,
        Cause.DRILL,
    ]
    assert causes(DrillKind.TERMINATE_INSTANCE, exit_of(1, STRUCK)) == [Cause.DRILL, Cause.DRILL]
    assert causes(DrillKind.TERMINATE_INSTANCE, exit_of(1, STRUCK), generation=4) == [Cause.RANK_EXIT]


def test_what_fails_by_itself_beside_a_drill_names_the_incident_and_asks_for_a_spare_of_its_own() -> None:
    both = (fault(Cause.INSTANCE_TERMINATED, STRUCK), fault(Cause.INSTANCE_TERMINATED, OTHER), fault(Cause.GROUP_LOST))
    assert causes(DrillKind.TERMINATE_INSTANCE, *both) == [
        Cause.DRILL,
        Cause.INSTANCE_TERMINATED,
        Cause.GROUP_LOST,
        Cause.DRILL,
    ]
    found, _ = drills.attributed(drill(DrillKind.TERMINATE_INSTANCE), 3, both[:2])
    incident = incidents.opened(RunId("r"), Generation(3), found, decision=RestartsRanks(), reached=Step(7), now=NOW)
    assert (incident.cause, incident.lost_node_count, incident.instance_ids) == (
        Cause.INSTANCE_TERMINATED,
        1,
        (STRUCK, OTHER),
    )


def test_a_rank_that_failed_for_want_of_the_struck_instance_is_told_as_the_drills_once_that_is_known() -> None:
    of_instance, of_agent = drill(DrillKind.TERMINATE_INSTANCE), drill(DrillKind.KILL_AGENT)
    incident = incidents.opened(
        RunId("r"), Generation(3), (fault(Cause.RANK_EXIT),), decision=RestartsRanks(), reached=Step(7), now=NOW
    )
    lost, _ = drills.attributed(of_instance, 3, (fault(Cause.INSTANCE_TERMINATED, STRUCK),))
    assert incidents.with_faults(drills.recast(of_instance, incident, lost), lost).cause is Cause.DRILL
    other = (fault(Cause.INSTANCE_TERMINATED, OTHER),)
    assert incidents.with_faults(drills.recast(of_instance, incident, other), other).cause is Cause.INSTANCE_TERMINATED
    silent, _ = drills.attributed(of_agent, 3, (fault(Cause.NODE_UNREACHABLE, STRUCK),))
    assert incidents.with_faults(drills.recast(of_agent, incident, silent), silent).cause is Cause.RANK_EXIT, (
        "no agent's death ends a rank"
    )
    assert drills.recast(of_instance, incidents.with_faults(incident, (fault(Cause.HANG),)), lost).cause is Cause.HANG
    assert drills.recast(None, incident, lost) is incident
    own = incidents.with_faults(incidents.with_faults(incident, lost), (fault(Cause.RANK_EXIT),))
    assert drills.recast(of_instance, own, lost).cause is Cause.RANK_EXIT, "the drill was known before that rank failed"


@pytest.mark.parametrize(
    ("state", "has_another", "ended", "outcome"),
    [
        (
            JobState.RUNNING,
            False,
            DrillState.RECOVERED,
            DrillOutcome.TRAINED_ON,
        ),
        (
            JobState.STOPPING,
            False,
            DrillState.RECOVERED,
            DrillOutcome.TRAINED_ON,
        ),
        (
            JobState.COMPLETED,
            False,
            DrillState.RECOVERED,
            DrillOutcome.TRAINED_ON,
        ),
        (
            JobState.FAILED,
            False,
            DrillState.NOT_RECOVERED,
            DrillOutcome.JOB_FAILED,
        ),
        (
            JobState.STOPPED,
            False,
            DrillState.NOT_RECOVERED,
            DrillOutcome.JOB_STOPPED,
        ),
        (
            JobState.QUEUED,
            False,
            DrillState.NOT_RECOVERED,
            DrillOutcome.JOB_PAUSED,
        ),
        (
            JobState.PREPARING,
            True,
            DrillState.NOT_RECOVERED,
            DrillOutcome.OTHER_INCIDENT,
        ),
        (
            JobState.RUNNING,
            True,
            DrillState.NOT_RECOVERED,
            DrillOutcome.OTHER_INCIDENT,
        ),
    ],
)
def test_a_drill_is_recovered_from_only_where_training_has_gone_on(
    state: JobState, has_another: bool, ended: DrillState, outcome: DrillOutcome
) -> None:
    another = opened_by(fault(Cause.RANK_EXIT)) if has_another else None
    record = JobRecord(state=state, reason="", created_at=0.0, state_since=0.0, incident=another)
    followed = drills.follow(
        replace(drill(DrillKind.KILL_RANK), incident_id="of the drill"), record, None, NOW, ladder(3.0)
    ).drill
    assert (followed.state, followed.outcome, followed.ended_at) == (ended, outcome, NOW)


@pytest.mark.parametrize(
    ("state", "ended"),
    [
        (JobState.RUNNING, DrillState.STRUCK),
        (JobState.COMPLETED, DrillState.ABSORBED),
        (JobState.FAILED, DrillState.NOT_RECOVERED),
        (JobState.STOPPED, DrillState.NOT_RECOVERED),
    ],
)
def test_a_drill_is_not_absorbed_by_a_job_that_ended_over_it(state: JobState, ended: DrillState) -> None:
    record = JobRecord(state=state, reason="", created_at=0.0, state_since=0.0)
    assert drills.follow(drill(DrillKind.KILL_RANK), record, None, NOW, ladder(3.0)).drill.state is ended


@pytest.mark.parametrize(
    ("kind", "seconds", "state", "ended"),
    [
        pytest.param(DrillState.REQUESTED, 120.0, JobState.PREPARING, DrillState.REQUESTED, id="may still strike"),
        pytest.param(DrillState.REQUESTED, 121.0, JobState.PREPARING, DrillState.NOT_DONE, id="could not strike"),
        pytest.param(DrillState.REQUESTED, 1.0, JobState.STOPPED, DrillState.NOT_DONE, id="the job has ended"),
        pytest.param(DrillState.STRUCK, 120.0, JobState.RUNNING, DrillState.STRUCK, id="may still have a result"),
        pytest.param(DrillState.STRUCK, 121.0, JobState.RUNNING, DrillState.ABSORBED, id="had no result"),
    ],
)
def test_a_drill_waits_for_twice_t_max(kind: DrillState, seconds: float, state: JobState, ended: DrillState) -> None:
    at = NOW - seconds
    begun = replace(drill(DrillKind.KILL_RANK), state=kind, requested_at=at, struck_at=at)
    record = JobRecord(state=state, reason="", created_at=0.0, state_since=0.0)
    found = drills.follow(begun, record, None, NOW, ladder(3.0))
    assert (found.drill.state, found.course) == (ended, drills.DrillCourse.WAIT)


@pytest.mark.parametrize(
    ("changes", "target", "strikes"),
    [
        pytest.param({}, NodeId("i-1"), True, id="a member of a job that trains"),
        pytest.param({}, NodeId("i-9"), False, id="no member"),
        pytest.param({"state": JobState.PREPARING}, NodeId("i-1"), False, id="no training"),
        pytest.param({"incident": opened_by(exit_of(0, OTHER))}, NodeId("i-1"), False, id="an open incident"),
        pytest.param({"taken_over_by": "ann"}, NodeId("i-1"), False, id="a person has taken the job over"),
    ],
)
def test_a_drill_strikes_only_a_job_that_trains_without_an_incident(
    changes: dict[str, Any], target: NodeId, strikes: bool
) -> None:
    wanted = replace(drill(DrillKind.KILL_RANK), state=DrillState.REQUESTED, struck_at=None, node_id=target)
    values = {"state": JobState.RUNNING, "created_at": 0.0, "state_since": 0.0, "generation": Generation(5), **changes}
    found = drills.follow(wanted, JobRecord(**values), rank_plan(addresses=("a", "b")), NOW, ladder(3.0))
    assert found.course is (drills.DrillCourse.STRIKE if strikes else drills.DrillCourse.WAIT)
    if strikes:
        assert (found.drill.state, found.drill.struck_at, found.drill.generation) == (DrillState.STRUCK, NOW, 5)
    assert drills.follow(wanted, JobRecord(**values), None, NOW, ladder(3.0)).course is drills.DrillCourse.WAIT


def test_a_drill_belongs_to_the_first_incident_that_names_it() -> None:
    struck = drill(DrillKind.KILL_RANK)
    own = replace(opened_by(exit_of(1, STRUCK)), id="inc-1", evidence=(drills.ordered(struck),))
    other = replace(own, id="inc-2", evidence=())
    values = {"state": JobState.PREPARING, "created_at": 0.0, "state_since": 0.0}

    def incident_of(before: DrillObserved, incident: IncidentRecord) -> str:
        record = JobRecord(**values, incident=incident)
        return drills.follow(before, record, None, NOW, ladder(3.0)).drill.incident_id

    assert [incident_of(struck, own), incident_of(struck, other)] == ["inc-1", ""]
    assert incident_of(replace(struck, incident_id="inc-0"), own) == "inc-0"
