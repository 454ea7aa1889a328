"""Tests single decisions of the fleet loop. The tests in tests/unit/control_plane/loop cover whole sequences."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from control_plane.accounts.reasons import sentence, sentences
from control_plane.core import capacity, fleets
from control_plane.core.actions import (
    CompleteTermination,
    HoldTermination,
    ProtectMembers,
    RebootMember,
    ResumeLaunch,
    RetryLaunch,
    Send,
    SendKeepEvidence,
    SetDesired,
    TerminateMember,
)
from control_plane.core.observed.causes import GivenUp, Reason, ReplacementLimit, Surplus
from control_plane.core.observed.facts import InstanceEnded, NodeRequest, Recorded, Requested
from control_plane.core.observed.fleets import (
    FleetHistory,
    FleetJob,
    FleetObserved,
    FleetSpec,
    GroupMember,
    GroupObserved,
    Hold,
    HoldRelease,
    NodeRecord,
)
from control_plane.core.observed.jobs import Departure, Exclusion
from control_plane.core.observed.nodes import Cause, Implication, InstanceCondition, NodeObserved, Notice, Remedy
from control_plane.core.observed.specs import Policy
from control_plane.core.queue import schedule
from control_plane.core.remedies import LEMON_INCIDENTS
from control_plane.core.states import JobState, NodeState
from control_plane.core.timeouts import HOLD_SECONDS, JOIN_SECONDS, REBOOT_SECONDS, ladder
from everstep.protocol.agent_messages import (
    HaltRanks,
    KeepSources,
    MemberPhase,
    MemberReport,
    NodeFault,
    NoticeKind,
    Release,
)
from everstep.protocol.ids import FleetName, Generation, JobName, NodeId, RunId
from everstep.protocol.plan import ObjectReference, SourceArchive

POLICY = Policy(timeouts=ladder(3.0))
SPEC = FleetSpec(name=FleetName("main"), group="group", min_node_count=2, spare_count=1)
NOW = 1000.0

REQUESTED = Requested(request=NodeRequest.REPLACE, node_id=NodeId("i1"), by="ann")


def job(
    name: str,
    state: JobState,
    count: int,
    *,
    created: float = 0.0,
    priority: int = 0,
    exclusions: tuple[Exclusion, ...] = (),
) -> FleetJob:
    return FleetJob(
        job=JobName(name),
        run=RunId(name),
        state=state,
        node_count=count,
        priority=priority,
        created_at=created,
        exclusions=exclusions,
    )


def row(
    name: str, state: NodeState = NodeState.SPARE, run: str | None = None, reason: Reason | str = "", **changes: Any
) -> NodeRecord:
    values = {
        "created_at": float(name[1:]),
        "connected_at": None if state is NodeState.JOINING else float(name[1:]),
        **changes,
    }
    why = Recorded(text=reason) if isinstance(reason, str) else reason
    return NodeRecord(node_id=NodeId(name), state=state, run=RunId(run) if run else None, reason=why, **values)


def member_of(run: str, phase: MemberPhase = MemberPhase.PROMISED) -> MemberReport:
    return MemberReport(job=JobName(run), run=RunId(run), generation=Generation(3), phase=phase)


def seen(
    rows: list[NodeRecord],
    jobs: list[FleetJob],
    *,
    desired: int = 3,
    ended: tuple[str, ...] = (),
    silent: tuple[str, ...] = (),
    working: dict[str, MemberReport] | None = None,
    cold: tuple[str, ...] = (),
    awaiting: tuple[str, ...] = (),
    drift: tuple[str, ...] = (),
    max_size: int = 10,
    domains: dict[str, str] | None = None,
    announced: dict[str, Notice] | None = None,
    faulty: dict[str, NodeFault] | None = None,
    silent_seconds: float = 10.0,
    replaced: tuple[float, ...] = (),
    **group_changes: Any,
) -> FleetObserved:
    nodes = {
        record.node_id: NodeObserved(
            node_id=record.node_id,
            instance=InstanceCondition.ENDED if record.node_id in ended else InstanceCondition.PRESENT,
            ended=InstanceEnded(node_id=record.node_id, state="terminated") if record.node_id in ended else None,
            is_connected=record.node_id not in silent and record.node_id not in ended,
            silent_seconds=silent_seconds if record.node_id in silent else 0.0,
            has_reported=True,
            is_warm=record.node_id not in cold,
            member=(working or {}).get(record.node_id),
            domain=(domains or {}).get(record.node_id),
            notices=(announced[record.node_id],) if record.node_id in (announced or {}) else (),
            faults=(faulty[record.node_id],) if faulty and record.node_id in faulty else (),
        )
        for record in rows
    }
    members = tuple(
        GroupMember(
            node_id=record.node_id, is_leaving=record.node_id in awaiting, awaits_termination=record.node_id in awaiting
        )
        for record in rows
    )
    group = GroupObserved(
        desired_count=desired,
        min_size=0,
        max_size=max_size,
        members=members,
        termination_hooks=("hook",),
        drift=drift,
        **group_changes,
    )
    return FleetObserved(group=group, records=tuple(rows), nodes=nodes, jobs=tuple(jobs), replaced=replaced)


def decide(observed: FleetObserved, spec: FleetSpec = SPEC):
    decision = fleets.decide(NOW, spec, observed, POLICY)
    assert fleets.decide(NOW, spec, observed, POLICY) == decision
    return decision


def states(decision) -> dict[str, tuple[str, str | None]]:
    return {record.node_id: (record.state.value, record.run) for record in decision.records}


def test_a_fleet_as_it_should_be_is_left_alone() -> None:
    decision = decide(seen([row("i1"), row("i2"), row("i3")], []))
    assert (decision.records, decision.actions) == ((), ())
    assert sentences(decision.reasons) == "keeps 3 nodes"


def test_the_floor_and_the_spares_are_kept_without_any_job() -> None:
    assert decide(seen([], [], desired=0)).actions == (SetDesired(group="group", desired_count=3),)


@pytest.mark.parametrize(
    "spec",
    [
        SPEC,
        replace(SPEC, min_node_count=0, spare_count=0),
        replace(SPEC, min_node_count=9, spare_count=9),
        replace(SPEC, spare_count=0, spare_probability=0.999),
    ],
)
def test_what_is_told_of_a_fleets_size_before_it_is_there_is_what_it_asks_for_at_first(spec) -> None:
    group = seen([], [], desired=1, max_size=10)
    assert fleets.first_desired(spec, min_size=0, max_size=10) == decide(group, spec).desired_count
    floor = replace(group, group=replace(group.group, min_size=4))
    assert fleets.first_desired(spec, min_size=4, max_size=10) == decide(floor, spec).desired_count >= 4


def test_desired_capacity_stays_within_the_group() -> None:
    waiting = [job("a", JobState.QUEUED, 4)]
    assert decide(seen([], waiting, desired=0, max_size=4)).desired_count == 4


def test_a_gang_starts_whole_or_not_at_all() -> None:
    assert decide(seen([row("i1"), row("i2"), row("i3")], [job("a", JobState.ALLOCATING, 4)], desired=5)).records == ()
    assert states(decide(seen([row("i1"), row("i2"), row("i3")], [job("a", JobState.ALLOCATING, 2)]))) == {
        "i1": ("assigned", "a"),
        "i2": ("assigned", "a"),
    }


def test_who_waits_first_is_not_overtaken() -> None:
    waiting = [job("big", JobState.ALLOCATING, 4, created=1), job("small", JobState.ALLOCATING, 1, created=2)]
    assert decide(seen([row("i1"), row("i2")], waiting, desired=6)).records == ()


def test_priority_comes_before_age() -> None:
    waiting = [
        job("old", JobState.ALLOCATING, 1, created=1),
        job("urgent", JobState.ALLOCATING, 1, created=2, priority=5),
    ]
    assert states(decide(seen([row("i1")], waiting)))["i1"] == ("assigned", "urgent")


def test_recovering_jobs_come_before_any_that_wait() -> None:
    waiting = [
        job("urgent", JobState.ALLOCATING, 1, created=1, priority=9),
        job("hurt", JobState.PREPARING, 2, created=2),
    ]
    assert states(decide(seen([row("i1", NodeState.ASSIGNED, "hurt"), row("i2")], waiting)))["i2"] == (
        "assigned",
        "hurt",
    )


def test_a_job_that_may_grow_receives_what_the_fleet_does_not_need_as_spares() -> None:
    grows = replace(job("grows", JobState.RUNNING, 2), most_node_count=5, member_count=2)
    rows = [row(f"n{number}", NodeState.ASSIGNED, "grows") for number in range(2)]
    rows += [row(f"n{number}") for number in range(2, 5)]
    decision = decide(seen(rows, [grows], desired=5))
    assert decision.desired_count == 6, "five for the job and one spare"
    assert [run for _, run in states(decision).values()] == ["grows", "grows"], "one spare stays"
    waits = job("waits", JobState.QUEUED, 10, created=1.0)
    assert "grows" not in [run for _, run in states(decide(seen(rows, [grows, waits], desired=5))).values()]


def test_a_job_that_shrank_receives_a_spare_at_once() -> None:
    small = replace(job("small", JobState.RUNNING, 3), most_node_count=3, member_count=2)
    rows = [row("n0", NodeState.ASSIGNED, "small"), row("n1", NodeState.ASSIGNED, "small"), row("n2")]
    assert states(decide(seen(rows, [small]))) == {"n2": ("assigned", "small")}


def test_a_recovering_job_takes_what_there_is() -> None:
    assert states(decide(seen([row("i1")], [job("hurt", JobState.PREPARING, 4)], desired=5))) == {
        "i1": ("assigned", "hurt")
    }


def test_a_recovering_job_is_given_a_spare_that_is_heard_while_aws_does_not_answer() -> None:
    observed = seen([row("i1", NodeState.ASSIGNED, "a"), row("i2"), row("i3")], [job("a", JobState.PREPARING, 2)])
    unknown = {node_id: replace(node, instance=InstanceCondition.UNKNOWN) for node_id, node in observed.nodes.items()}
    assert states(decide(replace(observed, nodes=unknown))) == {"i2": ("assigned", "a")}


def test_only_idle_nodes_are_given() -> None:
    observed = seen(
        [row("i1"), row("i2"), row("i3")],
        [job("a", JobState.ALLOCATING, 1)],
        silent=("i1",),
        working={"i2": member_of("old")},
    )
    assert states(decide(observed)) == {"i3": ("assigned", "a")}


def test_warm_nodes_are_given_first_and_cold_ones_are_not_left() -> None:
    """A job gets warm nodes first: nodes on which ranks start at once. It gets cold nodes only if no warm node is free.

    A node is cold, for example, just after its boot.
    """
    rows = [row("i1"), row("i2"), row("i3")]
    assert states(decide(seen(rows, [job("hurt", JobState.PREPARING, 1)], cold=("i1", "i2")))) == {
        "i3": ("assigned", "hurt")
    }
    both = states(decide(seen(rows, [job("hurt", JobState.PREPARING, 2)], cold=("i1", "i2"))))
    assert both == {"i1": ("assigned", "hurt"), "i3": ("assigned", "hurt")}
    assert states(decide(seen(rows[:2], [job("hurt", JobState.PREPARING, 2)], cold=("i1", "i2")))).keys() == {
        "i1",
        "i2",
    }


def test_a_spare_comes_from_another_failure_domain_than_the_survivors() -> None:
    rows = [
        row("i1", NodeState.ASSIGNED, "hurt"),
        row("i2", NodeState.ASSIGNED, "hurt"),
        row("i3"),
        row("i4"),
        row("i5"),
    ]
    domains = {"i1": "a", "i2": "b", "i3": "a", "i4": "b", "i5": "c"}
    observed = seen(rows, [job("hurt", JobState.PREPARING, 3)], desired=5, domains=domains)
    assert states(decide(observed, replace(SPEC, spare_count=2))) == {"i5": ("assigned", "hurt")}
    two = states(decide(seen(rows, [job("hurt", JobState.PREPARING, 4)], domains=domains)))
    assert two == {"i3": ("assigned", "hurt"), "i5": ("assigned", "hurt")}
    warm_first = decide(
        replace(observed, nodes=seen(rows, [], domains=domains, cold=("i5",)).nodes), replace(SPEC, spare_count=2)
    )
    assert states(warm_first) == {"i3": ("assigned", "hurt")}


def test_a_lost_node_is_taken_away_and_its_spare_promoted_in_one_pass_and_a_new_one_asked_for() -> None:
    rows = [row("i1", NodeState.ASSIGNED, "hurt"), row("i2", NodeState.ASSIGNED, "hurt"), row("i3")]
    decision = decide(seen(rows, [job("hurt", JobState.PREPARING, 2)], ended=("i1",)))
    assert states(decision) == {"i1": ("gone", None), "i3": ("assigned", "hurt")}
    assert decision.actions == (
        TerminateMember(
            group="group",
            node_id=NodeId("i1"),
            decrement=False,
            reason=InstanceEnded(node_id=NodeId("i1"), state="terminated"),
        ),
    )


def test_spares_by_probability_are_counted_from_what_the_fleet_has_seen() -> None:
    spec = replace(SPEC, spare_probability=0.99)
    observed = seen(
        [row(f"i{n}", NodeState.ASSIGNED, "a") for n in range(1, 6)],
        [job("a", JobState.RUNNING, 5)],
        desired=6,
        max_size=50,
    )
    assert decide(observed, spec).desired_count == 6
    bad = FleetHistory(node_seconds=5 * 86_400.0, lost_node_count=400)
    assert decide(replace(observed, history=bad), spec).desired_count == 5 + 7
    held = seen([row("i1", NodeState.HELD, reason="inspection"), row("i2", NodeState.DRAINING)], [], desired=3)
    assert decide(held).desired_count == 4, "a held node is no spare"


def test_the_queue_is_admitted_in_order_as_far_as_the_group_can_grow() -> None:
    queue = [
        job("held", JobState.RUNNING, 4),
        job("first", JobState.QUEUED, 4, created=1),
        job("second", JobState.QUEUED, 4, created=2),
        job("third", JobState.QUEUED, 1, created=3),
    ]
    assert schedule(queue, 8, NOW).admitted == {"held", "first"}
    assert schedule(queue, 13, NOW).admitted == {"held", "first", "second", "third"}


def test_nodes_of_an_ended_job_are_spares_again_and_forget_it() -> None:
    observed = seen(
        [row("i1", NodeState.ASSIGNED, "a"), row("i2"), row("i3")],
        [],
        working={"i1": member_of("a", MemberPhase.EXITED)},
    )
    decision = decide(observed)
    assert states(decision) == {"i1": ("spare", None)}
    assert decision.actions == (Send(NodeId("i1"), Release(run=RunId("a"), unstored_count=0)),)


@pytest.mark.parametrize("jobs", [[], [job("a", JobState.QUEUED, 2)]], ids=["ended", "queued"])
def test_all_nodes_of_a_job_without_use_for_them_are_spares_again(jobs: list[FleetJob]) -> None:
    rows = [row("i1", NodeState.ASSIGNED, "a"), row("i2", NodeState.ASSIGNED, "a"), row("i3")]
    assert states(decide(seen(rows, jobs))) == {"i1": ("spare", None), "i2": ("spare", None)}


def test_a_person_is_heard_about_every_node() -> None:
    """The first spare has no request, the second one still holds state of a run, and the first held node has none."""
    wants = Requested(request=NodeRequest.REPLACE, node_id=NodeId("i3"), by="ann")
    spares = [row("i1"), row("i2", request=wants), row("i3", request=wants)]
    observed = seen(spares, [], working={"i2": member_of("old")})
    assert ended(decide(observed)) == ["i3"]
    held = [row("i1", NodeState.HELD, hold=Hold.PERSON), row("i2", NodeState.HELD, hold=Hold.PERSON, request=wants)]
    assert ended(decide(seen(held, [], desired=3))) == ["i2"]


def test_ranks_of_a_job_that_failed_elsewhere_are_halted_before_it_is_forgotten() -> None:
    observed = seen(
        [row("i1", NodeState.ASSIGNED, "a"), row("i2"), row("i3")],
        [],
        working={"i1": member_of("a", MemberPhase.RUNNING)},
    )
    assert [type(action.message) for action in decide(observed).actions] == [HaltRanks]


def test_an_ended_member_is_removed_by_name_and_replaced() -> None:
    decision = decide(seen([row("i1"), row("i2"), row("i3")], [], ended=("i2",)))
    assert states(decision) == {"i2": ("gone", None)}
    assert decision.actions == (
        TerminateMember(
            group="group",
            node_id=NodeId("i2"),
            decrement=False,
            reason=InstanceEnded(node_id=NodeId("i2"), state="terminated"),
        ),
    )
    assert decision.forgotten == ("i2",)


def test_an_ended_member_that_its_group_still_lists_is_no_new_node() -> None:
    observed = seen([row("i1"), row("i2"), row("i3")], [], ended=("i2",))
    decision = decide(replace(observed, records=tuple(each for each in observed.records if each.node_id != "i2")))
    assert (decision.records, decision.events) == ((), ())
    assert ends(decision) == [("i2", False)], "asked again until AWS has taken it"


def test_an_ended_member_that_nobody_needs_takes_its_capacity_along() -> None:
    decision = decide(seen([row("i1"), row("i2"), row("i3"), row("i4")], [], desired=4, ended=("i2",)))
    assert decision.actions[0] == TerminateMember(
        group="group",
        node_id=NodeId("i2"),
        decrement=True,
        reason=InstanceEnded(node_id=NodeId("i2"), state="terminated"),
    )


def test_only_as_many_ended_members_take_their_capacity_along_as_are_surplus() -> None:
    rows = [row("i1"), row("i2"), row("i3"), row("i4")]
    assert ends(decide(seen(rows, [], desired=4, ended=("i2", "i3")))) == [("i2", True), ("i3", False)]


def test_surplus_is_ended_newest_first_with_its_capacity() -> None:
    decision = decide(seen([row(f"i{n}") for n in range(1, 6)], [], desired=5))
    assert [
        (action.node_id, action.decrement) for action in decision.actions if isinstance(action, TerminateMember)
    ] == [("i5", True), ("i4", True)]
    assert states(decision) == {"i4": ("draining", None), "i5": ("draining", None)}


def ends(decision) -> list[tuple[str, bool]]:
    return [(action.node_id, action.decrement) for action in decision.actions if isinstance(action, TerminateMember)]


def test_members_beyond_desired_capacity_are_ended_without_it() -> None:
    """If Auto Scaling launches members after the desired capacity was lowered, the fleet itself terminates them.

    These terminations do not lower the desired capacity once more. Auto Scaling terminates no such member by itself,
    because Everstep protects them from scale-in.
    """
    rows = [row(f"i{n}") for n in range(1, 6)]
    assert ends(decide(seen(rows, [], desired=3))) == [("i5", False), ("i4", False)]
    assert ends(decide(seen(rows, [], desired=4))) == [("i5", True), ("i4", False)]
    on_its_way = [
        *rows[:3],
        *(replace(each, state=NodeState.DRAINING, reason=Surplus(desired_count=3)) for each in rows[3:]),
    ]
    assert ends(decide(seen(on_its_way, [], desired=4))) == [("i5", True), ("i4", False)], "said again, it is the same"
    lowered_too_far = decide(seen(rows, [], desired=1))
    assert lowered_too_far.actions[0] == SetDesired(group="group", desired_count=3)
    assert ends(lowered_too_far) == [("i5", False), ("i4", False)]
    assert ends(decide(seen([row("i1")], [], desired=0), replace(SPEC, is_deleting=True))) == [("i1", False)]


def test_a_deleted_fleet_keeps_what_its_group_must_have_and_says_who_can_change_that() -> None:
    """A deleted fleet keeps the instances that its group's MinSize demands, and asks a person to set MinSize to 0.

    AWS refuses a capacity below MinSize. It would replace each instance that is terminated without lowering the
    capacity.
    """
    observed = seen([row("i1"), row("i2")], [], desired=2)
    bound = decide(replace(observed, group=replace(observed.group, min_size=1)), replace(SPEC, is_deleting=True))
    assert ends(bound) == [("i2", True)]
    left = seen([row("i1")], [], desired=1)
    kept = decide(replace(left, group=replace(left.group, min_size=1)), replace(SPEC, is_deleting=True))
    assert (ends(kept), kept.is_empty) == ([], False)
    assert sentences(kept.reasons) == "cannot be deleted while its Auto Scaling group has MinSize 1: set it to 0"
    assert ends(decide(left, replace(SPEC, is_deleting=True))) == [("i1", True)]


def test_an_ended_member_beyond_desired_capacity_makes_room_for_those_that_run() -> None:
    rows = [row(f"i{n}") for n in range(1, 6)]
    assert ends(decide(seen(rows, [], desired=3, ended=("i1",)))) == [("i1", False), ("i5", False)]
    assert ends(decide(seen(rows, [], desired=3, ended=("i1", "i2")))) == [("i1", False), ("i2", False)]
    excluded = [*rows[:4], row("i5", NodeState.DRAINING, reason="broken", replaced_at=NOW, since=NOW)]
    assert ends(decide(seen(excluded, [], desired=3))) == [("i5", False), ("i4", False)]


def test_an_instance_that_a_person_put_aside_is_no_member_too_many() -> None:
    """The fleet does not count an instance in Standby as a surplus member, because Auto Scaling does not count it
    either.

    If the fleet terminated another member, Auto Scaling would replace it, and the cycle would repeat.
    """
    observed = seen([row(f"i{n}") for n in range(1, 5)], [])
    aside = replace(observed.group.members[0], lifecycle_state="Standby")
    assert (
        decide(replace(observed, group=replace(observed.group, members=(aside, *observed.group.members[1:])))).actions
        == ()
    )


def test_nobody_waits_for_instances_that_nobody_needs() -> None:
    """A job of six nodes no longer waits. Three of its instances arrived, and three were never launched.

    The fleet lowers the capacity to the number of present instances, and then terminates the surplus instances.
    """
    decision = decide(seen([row(f"i{n}") for n in range(1, 5)], [], desired=6))
    lowered, *ended = decision.actions
    assert lowered == SetDesired(group="group", desired_count=4)
    assert [(action.node_id, action.decrement) for action in ended if isinstance(action, TerminateMember)] == [
        ("i4", True)
    ]
    assert not [
        action for action in decide(seen([row("i1")], [], desired=6)).actions if isinstance(action, TerminateMember)
    ]
    assert decide(seen([row(f"i{n}") for n in range(1, 5)], [], desired=6, drift=("AZRebalance is on.",))).actions == ()


def test_capacity_that_an_ended_member_takes_along_is_not_lowered_once_more() -> None:
    """If a termination lowers the desired capacity, the fleet sends no second call that lowers it."""
    rows = [row(f"i{number}") for number in range(1, 5)]
    decision = decide(seen(rows, [], desired=5, ended=("i4",)))
    assert decision.actions[0] == TerminateMember(
        group="group",
        node_id=NodeId("i4"),
        decrement=True,
        reason=InstanceEnded(node_id=NodeId("i4"), state="terminated"),
    )
    assert not any(isinstance(action, SetDesired) for action in decision.actions)
    assert SetDesired(group="group", desired_count=4) in decide(seen(rows, [], desired=5)).actions


def test_surplus_that_is_on_its_way_is_not_counted_twice() -> None:
    rows = [
        row("i1"),
        row("i2"),
        row("i3"),
        row("i4"),
        row("i5", NodeState.DRAINING, reason=Surplus(desired_count=3)),
    ]
    decision = decide(seen(rows, [], desired=5))
    assert {action.node_id for action in decision.actions if isinstance(action, TerminateMember)} == {"i5", "i4"}


def test_working_nodes_are_never_surplus() -> None:
    rows = [row(f"i{n}", NodeState.ASSIGNED, "a") for n in range(1, 6)]
    assert decide(seen(rows, [job("a", JobState.RUNNING, 5)], desired=9)).actions == (
        SetDesired(group="group", desired_count=6),
    )


def test_drift_and_blindness_freeze_what_ends_nodes() -> None:
    rows = [row(f"i{n}") for n in range(1, 6)]
    drifted = decide(seen(rows, [], desired=5, drift=("AZRebalance is on.",)))
    assert (drifted.actions, sentences(drifted.reasons)) == ((), "frozen: AZRebalance is on.")
    blind = decide(seen(rows, [], desired=5, silent=("i1", "i2", "i3")))
    assert blind.actions == ()
    assert blind.is_frozen
    assert "silent" in sentences(blind.reasons)


def test_an_excluded_node_is_ended_if_aws_or_its_agent_said_so_and_held_if_nobody_did() -> None:
    def excluded(may_terminate: bool):
        exclusion = Exclusion(node_id=NodeId("i1"), evidence=Recorded(text="words"), may_terminate=may_terminate)
        rows = [row("i1", NodeState.ASSIGNED, "a"), row("i2", NodeState.ASSIGNED, "a"), row("i3")]
        return decide(
            seen(rows, [job("a", JobState.PREPARING, 2, exclusions=(exclusion,))], working={"i1": member_of("a")})
        )

    ended = excluded(True)
    assert states(ended)["i1"] == ("draining", None)
    assert [action.node_id for action in ended.actions if isinstance(action, TerminateMember)] == ["i1"]
    held = excluded(False)
    assert states(held)["i1"] == ("held", None)
    assert held.actions == (
        Send(NodeId("i1"), Release(run=RunId("a"), unstored_count=0)),
        SetDesired(group="group", desired_count=4),
    )
    assert states(held)["i3"] == ("assigned", "a")


def test_a_node_held_by_a_person_stays_held_one_that_was_unreachable_returns() -> None:
    rows = [
        row("i1", NodeState.HELD, reason="unreachable by a: words", hold=Hold.UNREACHABLE, replaced_at=1.0),
        row("i2", NodeState.HELD, reason="inspection", hold=Hold.INSPECTION, replaced_at=1.0, evidence_at=1.0),
        row("i3"),
    ]
    assert states(decide(seen(rows, [], desired=4))) == {"i1": ("spare", None)}


def test_a_held_node_that_has_not_let_go_of_its_job_stays_held() -> None:
    rows = [
        row("i1", NodeState.HELD, reason="unreachable by a: words", hold=Hold.UNREACHABLE, replaced_at=1.0),
        row("i2"),
        row("i3"),
    ]
    assert states(decide(seen(rows, [], desired=4, working={"i1": member_of("a")}))) == {}


def test_an_instance_that_a_hook_holds_is_let_go_once_no_job_has_it() -> None:
    rows = [row("i1", NodeState.DRAINING), row("i2", NodeState.ASSIGNED, "a"), row("i3", NodeState.ASSIGNED, "a")]
    decision = decide(seen(rows, [job("a", JobState.RUNNING, 2)], awaiting=("i1", "i2")))
    released = [action for action in decision.actions if isinstance(action, CompleteTermination)]
    assert released == [CompleteTermination(group="group", hook="hook", node_id=NodeId("i1"))]


def test_why_instances_do_not_come_is_said_in_aws_words() -> None:
    assert "InsufficientInstanceCapacity" in sentences(
        decide(seen([row("i1")], [], launch_failure="InsufficientInstanceCapacity: none")).reasons
    )


# Notices: maintenance and terminations that AWS announces


def spot(seconds: float = 120.0) -> Notice:
    return Notice(kind=NoticeKind.SPOT_INTERRUPTION, message="soon", ends_at=NOW + seconds)


REBALANCE = Notice(kind=NoticeKind.REBALANCE, message="maybe")
RUNNING = member_of("a", MemberPhase.RUNNING)


DEPARTURE = Departure(
    node_id=NodeId("i1"),
    evidence=Recorded(text="words"),
    cause=Cause.NODE_FAULT,
    remedy=Remedy.REPLACE,
    may_terminate=True,
)


def working_team(**changes: Any) -> FleetObserved:
    rows = [row("i1", NodeState.ASSIGNED, "a"), row("i2", NodeState.ASSIGNED, "a"), row("i3")]
    return seen(rows, [job("a", JobState.RUNNING, 2)], working={"i1": RUNNING, "i2": RUNNING}, **changes)


def test_a_job_with_a_node_to_leave_is_given_another_beside_it_and_capacity_is_asked_for() -> None:
    decision = decide(working_team(announced={"i1": spot()}))
    assert states(decision) == {"i3": ("assigned", "a")}
    assert decision.actions == (SetDesired(group="group", desired_count=4),)


def test_advice_and_far_maintenance_interrupt_nobody() -> None:
    far = Notice(kind=NoticeKind.MAINTENANCE, message="next week", ends_at=NOW + 7 * 86400)
    for notice in (REBALANCE, far):
        assert decide(working_team(announced={"i1": notice})).records == ()


def test_recovering_jobs_come_before_those_that_have_to_leave_a_node() -> None:
    rows = [row("i1", NodeState.ASSIGNED, "a"), row("i2", NodeState.ASSIGNED, "b"), row("i3")]
    jobs = [job("a", JobState.RUNNING, 1), job("b", JobState.PREPARING, 2, created=5.0)]
    assert states(decide(seen(rows, jobs, announced={"i1": spot()}, working={"i1": RUNNING}))) == {
        "i3": ("assigned", "b")
    }


def test_a_node_that_aws_takes_is_given_to_nobody_and_one_that_it_would_like_back_comes_last() -> None:
    waiting = job("a", JobState.ALLOCATING, 1)
    decision = decide(seen([row("i1"), row("i2"), row("i3")], [waiting], announced={"i1": spot(), "i2": REBALANCE}))
    assert states(decision)["i3"] == ("assigned", "a")
    assert states(decision)["i1"] == ("draining", None)
    block = Notice(kind=NoticeKind.CAPACITY_BLOCK_END, message="over", ends_at=NOW + 600)
    assert decide(seen([row("i1"), row("i2"), row("i3")], [], announced={"i1": block})).records == ()
    assert decide(seen([row("i1")], [waiting], announced={"i1": block}, desired=2)).records == (), (
        "nothing is placed on it, even where all else is taken"
    )


def test_what_may_go_is_replaced_one_by_one_while_all_else_is_whole() -> None:
    rows, both = [row("i1"), row("i2"), row("i3")], {"i1": REBALANCE, "i2": REBALANCE}
    decision = decide(seen(rows, [], announced=both))
    assert states(decision) == {"i1": ("draining", None)}
    assert decision.actions == (
        TerminateMember(group="group", node_id=NodeId("i1"), decrement=False, reason=decision.records[0].reason),
    )
    for unrest in (
        seen([*rows[:2], row("i3", NodeState.JOINING)], [], announced=both, silent=("i3",)),
        seen(rows, [], announced=both, launch_failure="no p5", desired=4),
        seen(rows, [], announced=both, drift=("changed",)),
    ):
        assert decide(unrest, replace(SPEC, spare_count=unrest.group.desired_count - 2)).records == ()


def test_surplus_nodes_that_may_go_anyway_are_ended_first() -> None:
    decision = decide(
        seen(
            [row("i1"), row("i2"), row("i3"), row("i4")], [], desired=4, announced={"i2": REBALANCE}, launch_failure="x"
        )
    )
    assert states(decision) == {"i2": ("draining", None)}


def test_the_node_that_was_left_takes_the_extra_capacity_with_it() -> None:
    rows = [
        row("i1", NodeState.ASSIGNED, "a"),
        row("i2", NodeState.DRAINING, reason=Recorded(text="announced")),
        row("i3"),
        row("i4", NodeState.ASSIGNED, "a"),
    ]
    decision = decide(seen(rows, [job("a", JobState.RUNNING, 2)], desired=4, working={"i1": RUNNING, "i4": RUNNING}))
    assert decision.actions == (
        TerminateMember(group="group", node_id=NodeId("i2"), decrement=True, reason=Recorded(text="announced")),
    )


def test_a_node_that_is_needed_no_more_is_taken_back_unless_it_has_been_asked_for_a_promise() -> None:
    rows = [row("i1", NodeState.ASSIGNED, "a"), row("i2", NodeState.ASSIGNED, "a"), row("i3", NodeState.ASSIGNED, "a")]
    team = {"i1": RUNNING, "i2": RUNNING}
    assert states(decide(seen(rows, [job("a", JobState.RUNNING, 2)], working=team))) == {"i3": ("spare", None)}
    assert (
        decide(seen(rows, [job("a", JobState.RUNNING, 2)], working=team, announced={"i1": spot()}, desired=4)).records
        == ()
    )
    assert decide(seen(rows, [job("a", JobState.PREPARING, 2)], working=team)).records == ()
    assert decide(seen(rows, [job("a", JobState.RUNNING, 2)], working={**team, "i3": member_of("a")})).records == ()


def test_a_terminating_hook_is_completed_when_its_node_is_free_or_dead_and_held_while_a_step_is_saved() -> None:
    complete = CompleteTermination(group="group", hook="hook", node_id=NodeId("i1"))
    held = HoldTermination(group="group", hook="hook", node_id=NodeId("i1"), seconds=60.0)
    assert complete not in decide(working_team(awaiting=("i1",))).actions
    assert complete in decide(working_team(awaiting=("i1",), silent=("i1",), silent_seconds=100.0)).actions
    limit = POLICY.timeouts.coordinator_deadline_seconds
    assert complete not in decide(working_team(awaiting=("i1",), silent=("i1",), silent_seconds=limit)).actions
    move = replace(DEPARTURE, cause=Cause.NOTICE, asked_at=NOW - 10, ends_at=NOW + 50)
    moving = working_team(awaiting=("i1",))
    moving = replace(moving, jobs=(replace(moving.jobs[0], moves=(move,)),))
    assert held in decide(moving).actions
    late = replace(moving, jobs=(replace(moving.jobs[0], moves=(replace(move, asked_at=NOW - HOLD_SECONDS),)),))
    assert held not in decide(late).actions


# Launches that fail because AWS has no capacity


def short(failed_at: float, failing_since: float | None = None, **changes: Any) -> FleetObserved:
    since = failed_at if failing_since is None else failing_since
    return seen([row("i1"), row("i2")], [], launch_failure="no p5", failed_at=failed_at, failing_since=since, **changes)


def test_a_failed_launch_is_asked_for_again_after_a_while_and_ever_more_seldom() -> None:
    again = RetryLaunch(group="group", desired_count=3, failed_at=NOW - 30)
    assert decide(short(NOW - 29)).actions == ()
    assert decide(short(NOW - 30)).actions == (again,)
    assert "waits for 1 instance: no p5; Everstep retries at 00:16:40 UTC" in sentences(decide(short(NOW - 30)).reasons)
    # The second retry is due 90 s after the first failure. RetryLaunch contains the time of the newest failure.
    asked = replace(again, failed_at=NOW - 60)
    assert decide(short(NOW - 60, NOW - 90)).actions == (asked,)
    assert decide(short(NOW - 58, NOW - 89)).actions == ()


@pytest.mark.parametrize("apart", [1.0, 7.0, 100.0, 900.0])
def test_when_launches_are_asked_for_again_follows_from_the_time_and_not_from_how_often_aws_tries(apart: float) -> None:
    moments = [30.0, 90.0, 210.0, 450.0, 930.0, 1830.0, 2730.0]
    for number in range(int(2700 // apart) + 1):
        failed_at = number * apart
        group = short(NOW + failed_at, NOW).group
        assert capacity.retry_at(group) == NOW + min(at for at in moments if at > failed_at), failed_at
    assert capacity.retry_at(short(NOW + 900 * 1e6, NOW).group) == NOW + 930 + 900 * (1e6 - 1)
    assert capacity.retry_at(seen([], []).group) is None


def test_launches_fail_since_the_first_failure_also_when_aws_tells_of_it_no_more() -> None:
    before = short(failed_at=50.0, failing_since=10.0).group
    assert capacity.failing_since(None, 40.0) == 40.0
    assert capacity.failing_since(seen([], []).group, 40.0) == 40.0
    assert capacity.failing_since(before, 40.0) == 10.0, (
        "the newest failure of before is still told of, so none has succeeded"
    )
    assert capacity.failing_since(before, 50.0) == 10.0
    assert capacity.failing_since(before, 51.0) == 51.0, (
        "what had failed before is not told of: one has succeeded since"
    )
    assert capacity.failing_since(before, 5.0) == 5.0, "more is told of than before"


@pytest.mark.parametrize("drift", [(), ("The group has scaling policies.",)])
def test_members_in_service_without_protection_are_protected_also_in_a_frozen_fleet(drift: tuple[str, ...]) -> None:
    nodes = [row("i1"), row("i2"), row("i3")]
    decision = decide(seen(nodes, [], drift=drift, unprotected=(NodeId("i2"),)))
    assert decision.actions == (ProtectMembers(group="group", node_ids=(NodeId("i2"),)),)


def test_what_aws_suspended_is_lifted_and_what_a_user_suspended_is_named() -> None:
    by_aws = short(NOW - 30, launch_suspension="Administrative suspension", is_suspension_administrative=True)
    assert decide(by_aws).actions == (ResumeLaunch(group="group", reason="Administrative suspension"),)
    assert (
        decide(
            short(NOW - 29, launch_suspension="Administrative suspension", is_suspension_administrative=True)
        ).actions
        == ()
    )
    by_user = short(NOW - 30, launch_suspension="User suspended at 2026-01-01T00:00:00Z")
    assert decide(by_user).actions == ()
    assert "User suspended at 2026-01-01T00:00:00Z" in sentences(decide(by_user).reasons)
    assert (
        sentences(decide(seen([row("i1"), row("i2"), row("i3")], [], launch_suspension="User suspended")).reasons)
        == "keeps 3 nodes"
    )


XID = NodeFault(code="gpu_xid", message="words", is_permanent=False, xid=95)
LOST = NodeFault(code="gpu_lost", message="words", is_permanent=False)


def ended(decision: Any) -> list[str]:
    return [action.node_id for action in decision.actions if isinstance(action, TerminateMember)]


def test_a_spare_that_reports_a_fault_is_rebooted_or_replaced() -> None:
    rows = [row("i1"), row("i2"), row("i3")]
    decision = decide(seen(rows, [], faulty={"i1": XID, "i2": LOST}))
    assert states(decision) == {"i1": ("rebooting", None), "i2": ("draining", None)}
    assert ended(decision) == ["i2"]
    reboots = [action for action in decision.actions if isinstance(action, RebootMember)]
    assert [(action.node_id, action.since) for action in reboots] == [("i1", NOW)]
    assert {line.node_id: (line.what, line.remedy) for line in decision.implications} == {
        "i1": ("gpu_xid 95", Remedy.REBOOT),
        "i2": ("gpu_lost", Remedy.REPLACE),
    }


def test_a_rebooted_node_is_a_spare_again_replaced_with_its_fault_or_given_up() -> None:
    def rebooting(
        faulty: dict[str, NodeFault] | None = None,
        since: float = NOW - 60,
        connected: float = NOW - 5,
        taken: float | None = None,
        silent: float = 1e9,
    ):
        rows = [row("i1", NodeState.REBOOTING, since=since, connected_at=connected), row("i2"), row("i3")]
        observed = seen(rows, [], faulty=faulty, silent=("i1",) if connected < since else (), silent_seconds=silent)
        return decide(replace(observed, rebooted={NodeId("i1"): since if taken is None else taken}))

    assert states(rebooting()) == {"i1": ("spare", None)}
    assert states(rebooting({"i1": XID})) == {"i1": ("draining", None)}
    assert states(rebooting(connected=NOW - 100)) == {}, "its agent has not connected since"
    assert states(rebooting({"i1": XID}, taken=NOW - 4)) == {}, "its agent dialled in before EC2 was asked"
    assert states(rebooting({"i1": XID}, taken=NOW - 5)) == {}, "and at the same time"
    late = rebooting(since=NOW - REBOOT_SECONDS - 1, connected=NOW - 2000)
    assert states(late) == {"i1": ("draining", None)}
    assert ended(late) == ["i1"]
    assert states(rebooting(since=NOW - REBOOT_SECONDS - 1, connected=NOW - 2000, taken=NOW - REBOOT_SECONDS)) == {}, (
        "it is given its time from then"
    )
    assert states(rebooting(since=NOW - 3000, connected=NOW - 4000, silent=1.0)) == {}, (
        "nobody could hear it for most of that time"
    )


def test_a_reboot_is_asked_for_until_ec2_has_taken_it_whenever_the_agent_dialled_in() -> None:
    rows = [row("i1", NodeState.REBOOTING, since=NOW - 60, connected_at=NOW - 5, reason="words"), row("i2"), row("i3")]
    for silent in ((), ("i1",)):
        decision = decide(seen(rows, [], faulty={"i1": XID}, silent=silent))
        assert (states(decision), decision.actions[0]) == (
            {},
            RebootMember(group="group", node_id=NodeId("i1"), since=NOW - 60, reason=Recorded(text="words")),
        )
    rows[0] = replace(rows[0], since=NOW - REBOOT_SECONDS - 1)
    refused = decide(seen([replace(rows[0], connected_at=NOW - 2000), *rows[1:]], []))
    assert sentence(refused.records[0].reason) == "EC2 did not reboot it within 900 s: words"
    assert states(decide(seen(rows, []))) == {}, "the server was away and asks again"


def joining(*ages: float, silent_seconds: float = 1e9, **changes: Any) -> FleetObserved:
    """Return a fleet whose instances have these ages in seconds, and of which no agent has connected."""
    rows = [replace(row(f"i{place}", NodeState.JOINING), created_at=NOW - age) for place, age in enumerate(ages, 1)]
    observed = seen(
        rows, [], desired=len(rows), silent=tuple(record.node_id for record in rows), silent_seconds=silent_seconds
    )
    return replace(observed, **changes)


def test_an_instance_that_does_not_join_in_time_is_replaced_and_it_is_said_where_to_look() -> None:
    spec = replace(SPEC, min_node_count=1, spare_count=1)
    late = decide(joining(JOIN_SECONDS + 2, JOIN_SECONDS + 1), spec)
    assert states(late) == {"i1": ("draining", None)}, "one at a time"
    assert late.actions == (
        TerminateMember(group="group", node_id=NodeId("i1"), decrement=False, reason=late.records[0].reason),
    )
    assert "has not connected within 900 s: check the user data" in sentence(late.records[0].reason)
    assert late.events[0].reason == late.records[0].reason
    assert "for 1 instances in a row: check the user data" in sentences(late.reasons)
    assert states(decide(joining(JOIN_SECONDS, JOIN_SECONDS), spec)) == {}
    assert states(decide(joining(2000.0, 2000.0, silent_seconds=JOIN_SECONDS), spec)) == {}, (
        "this server could not hear it for as long"
    )


def test_instances_that_aws_still_prepares_or_knows_nothing_of_are_not_late() -> None:
    observed = joining(2000.0, 2000.0, 2000.0)
    first, *others = observed.group.members
    pending = replace(observed.group, members=(replace(first, lifecycle_state="Pending:Wait"), *others))
    assert states(decide(replace(observed, group=pending))) == {"i2": ("draining", None)}
    unknown = {node_id: replace(node, instance=InstanceCondition.UNKNOWN) for node_id, node in observed.nodes.items()}
    assert states(decide(replace(observed, nodes=unknown))) == {}
    frozen = replace(observed, group=replace(observed.group, drift=("words",)))
    assert states(decide(frozen)) == {}


def test_the_next_instance_that_does_not_join_is_given_twice_as_long() -> None:
    spec = replace(SPEC, min_node_count=1, spare_count=0)
    for count in range(4):
        limit = JOIN_SECONDS * 2**count
        assert states(decide(joining(limit, failed_join_count=count), spec)) == {}
        assert states(decide(joining(limit + 1, failed_join_count=count), spec)) == {"i1": ("draining", None)}
    going = decide(joining(JOIN_SECONDS + 2, JOIN_SECONDS + 1), replace(SPEC, min_node_count=1, spare_count=1)).records
    waiting = joining(JOIN_SECONDS + 1)
    both = replace(waiting, records=(*(replace(record, node_id=NodeId("i0")) for record in going), *waiting.records))
    assert states(decide(both, spec)) == {}, "the one before is still being ended"
    assert "for 1 instances in a row" in sentences(decide(both, spec).reasons)
    asked = replace(
        both,
        records=tuple(
            replace(record, reason=Recorded(text="a person asked") if record.node_id == "i0" else record.reason)
            for record in both.records
        ),
    )
    assert states(decide(asked, spec)) == {}, "whatever it is ended for"
    joined = replace(
        both,
        records=tuple(
            replace(record, connected_at=NOW) if record.node_id == "i0" else record for record in both.records
        ),
    )
    assert states(decide(joined, spec)) == {"i1": ("draining", None)}, "it has joined"


def test_a_group_whose_every_instance_fails_to_join_goes_through_few_of_them() -> None:
    """For a week, no agent of a new instance connects. The fleet launches at most 16 instances in this week.

    The fleet loop runs once a minute.
    """
    ages, count = [0.0] * 4, 0
    for _ in range(7 * 24 * 60):
        ages = [age + 60 for age in ages]
        gone = decide(joining(*ages, failed_join_count=count), replace(SPEC, min_node_count=4, spare_count=0)).records
        assert len(gone) <= 1
        for record in gone:
            ages[int(record.node_id[1:]) - 1] = 0.0
            count += 1
    assert 4 <= count <= 16


def test_a_person_replaces_an_instance_that_has_not_joined_at_once() -> None:
    asked = joining(1.0, 1.0, 1.0)
    first, *others = asked.records
    decision = decide(replace(asked, records=(replace(first, request=REQUESTED), *others)))
    assert states(decision) == {"i1": ("draining", None)}
    assert ended(decision) == ["i1"]


def test_a_spare_silent_for_t_max_is_held_and_its_place_filled_unless_most_are_silent() -> None:
    rows = [row("i1"), row("i2"), row("i3")]
    decision = decide(seen(rows, [], silent=("i1",), silent_seconds=61.0))
    assert states(decision) == {"i1": ("held", None)}
    assert decision.actions == (SetDesired(group="group", desired_count=4),)
    assert states(decide(seen(rows, [], silent=("i1",), silent_seconds=60.0))) == {}
    assert states(decide(seen(rows, [], silent=("i1", "i2"), silent_seconds=61.0))) == {}
    lifted = decide(seen(rows, [], silent=("i1", "i2"), silent_seconds=61.0), replace(SPEC, is_blindness_lifted=True))
    assert states(lifted) == {"i1": ("held", None), "i2": ("held", None)}
    assert lifted.is_blind, "a person's word is forgotten only when sight returns"
    assert not lifted.is_frozen


def test_no_more_are_replaced_within_an_hour_than_the_fleet_allows_and_it_says_so() -> None:
    rows = [row("i1", NodeState.DRAINING, reason="excluded by a: words"), row("i2"), row("i3")]
    limited = replace(SPEC, max_replacements_per_hour=2)
    held_up = decide(seen(rows, [], replaced=(NOW - 10, NOW - 3600)), limited)
    assert held_up.actions == ()
    assert "i1 not replaced: 2 replacements in the last hour, the limit is 2" in sentences(held_up.reasons)
    assert ended(decide(seen(rows, [], replaced=(NOW - 10, NOW - 3601)), limited)) == ["i1"]
    asked = [replace(rows[0], replaced_at=NOW - 10), *rows[1:]]
    assert ended(decide(seen(asked, [], replaced=(NOW - 10, NOW - 20)), limited)) == ["i1"], (
        "said again until it has gone"
    )


@pytest.mark.parametrize(("limit", "recent"), [(1, 0), (2, 0), (2, 1), (3, 0), (3, 3)])
def test_simultaneous_faults_share_one_hourly_limit(limit: int, recent: int) -> None:
    rows = [row(f"i{number}") for number in range(1, 8)]
    faulty = {f"i{number}": LOST for number in range(1, 4)}
    limited = replace(SPEC, min_node_count=7, spare_count=0, max_replacements_per_hour=limit)
    decision = decide(seen(rows, [], faulty=faulty, desired=7, replaced=(NOW - 10,) * recent), limited)
    assert len(ended(decision)) == limit - recent
    assert [row.node_id for row in decision.records if row.replaced_at == NOW] == ended(decision)


def test_the_limit_holds_for_held_nodes_too() -> None:
    rows = [row("i1", NodeState.HELD, hold=Hold.UNREACHABLE), row("i2"), row("i3")]
    decision = decide(seen(rows, [], silent=("i1",), replaced=(NOW - 10,)), replace(SPEC, max_replacements_per_hour=1))
    assert decision.actions == ()
    assert any(isinstance(reason, ReplacementLimit) for reason in decision.reasons)


def test_a_failed_instance_is_held_for_inspection_unless_it_takes_the_last_place() -> None:
    keeps = replace(SPEC, holds_failed_instances=True)
    rows = [row("i1"), row("i2"), row("i3")]
    held = decide(seen(rows, [], faulty={"i1": LOST}, max_size=4), keeps)
    assert states(held) == {"i1": ("held", None)}
    assert held.records[0].hold is Hold.INSPECTION
    assert SendKeepEvidence(node_id=NodeId("i1")) in held.actions
    refused = decide(seen(rows, [], faulty={"i1": LOST}, max_size=3), keeps)
    assert states(refused) == {"i1": ("draining", None)}
    two = [row("i1"), row("i2"), row("i3"), row("i4", NodeState.HELD, hold=Hold.PERSON)]
    full = decide(seen(two, [], faulty={"i1": LOST}, max_size=4), keeps)
    assert states(full)["i1"] == ("draining", None), "a held node and three others fill the group"
    assert states(decide(seen(two, [], faulty={"i1": LOST}, max_size=5), keeps))["i1"] == ("held", None)
    assert "the group has MaxSize 3, jobs and spares need 3, and 0 nodes are held already" in sentence(
        refused.records[0].reason
    )


def test_a_person_lets_a_held_node_work_again_or_ends_it_once_its_evidence_is_kept() -> None:
    def released(how: HoldRelease, **changes: Any):
        held = row("i1", NodeState.HELD, hold=Hold.INSPECTION, release=how, replaced_at=5.0, **changes)
        return decide(seen([held, row("i2"), row("i3"), row("i4")], [], desired=4))

    assert states(released(HoldRelease.RETURN))["i1"] == ("spare", None)
    assert states(released(HoldRelease.TERMINATE)) == {}, "it has something to tell and somebody to tell it"
    gone = released(HoldRelease.TERMINATE, evidence_at=6.0)
    assert states(gone) == {"i1": ("draining", None)}
    (action,) = [action for action in gone.actions if isinstance(action, TerminateMember)]
    assert (action.node_id, action.decrement) == ("i1", True), "another one has its place already"
    (ending,) = gone.records
    assert ending.replaced_at == 5.0, "a termination without another replacement counts against no limit"
    assert ending.release is HoldRelease.TERMINATE, "a person's termination stays known as such"


def test_a_job_that_is_to_leave_a_node_is_lent_another_and_a_spare_is_enough() -> None:
    moving = replace(job("a", JobState.RUNNING, 2), moves=(DEPARTURE,))
    rows = [row("i1", NodeState.ASSIGNED, "a"), row("i2", NodeState.ASSIGNED, "a"), row("i3")]
    decision = decide(seen(rows, [moving]))
    assert states(decision) == {"i3": ("assigned", "a")}
    assert decision.actions == (), "capacity does not flap for a move"
    lent = [rows[0], rows[1], replace(rows[2], state=NodeState.ASSIGNED, run=RunId("a"))]
    assert states(decide(seen(lent, [moving]))) == {}
    none = decide(seen(rows[:2], [moving], desired=2), replace(SPEC, spare_count=0))
    assert none.actions == (SetDesired(group="group", desired_count=3),)


def test_a_node_that_a_job_returns_needs_no_replacement() -> None:
    returned = replace(DEPARTURE, cause=Cause.RETURNED, remedy=Remedy.RELEASE, may_terminate=False)
    moving = replace(job("a", JobState.RUNNING, 2), moves=(returned,))
    rows = [row("i1", NodeState.ASSIGNED, "a"), row("i2", NodeState.ASSIGNED, "a"), row("i3")]
    assert states(decide(seen(rows, [moving]))) == {}
    none = decide(seen(rows[:2], [moving], desired=2), replace(SPEC, spare_count=0))
    assert none.actions == ()


def test_a_recovering_job_receives_a_node_before_an_older_job_that_only_grows_back() -> None:
    small = replace(job("small", JobState.RUNNING, 4), least_node_count=1, member_count=1)
    hurt = job("hurt", JobState.PREPARING, 2, created=1.0)
    rows = [row("i1", NodeState.ASSIGNED, "small"), row("i2", NodeState.ASSIGNED, "hurt"), row("i3")]
    assert states(decide(seen(rows, [small, hurt]))) == {"i3": ("assigned", "hurt")}


def test_a_patient_gang_receives_the_nodes_that_are_there() -> None:
    gang = replace(job("a", JobState.ALLOCATING, 4), least_node_count=2, smaller_from=NOW)
    rows = [row("i1"), row("i2"), row("i3")]
    decision = decide(seen(rows, [gang]))
    assert states(decision) == dict.fromkeys(("i1", "i2", "i3"), ("assigned", "a"))
    assert decide(seen(rows[:1], [gang])).records == ()
    assert decide(seen(rows, [replace(gang, smaller_from=NOW + 1)])).records == ()


def test_a_node_that_a_job_was_moved_away_from_is_given_to_it_last() -> None:
    hurt = replace(job("a", JobState.PREPARING, 1), avoided=(NodeId("i1"),))
    assert states(decide(seen([row("i1"), row("i2"), row("i3")], [hurt]))) == {"i2": ("assigned", "a")}
    assert states(decide(seen([row("i1")], [hurt], desired=3))) == {"i1": ("assigned", "a")}


def test_a_node_that_a_job_has_just_excluded_is_not_given_back_to_it_in_the_same_breath() -> None:
    exclusion = Exclusion(node_id=NodeId("i1"), evidence=Recorded(text="words"), may_terminate=False)
    rows = [row("i1", NodeState.ASSIGNED, "a"), row("i2", NodeState.ASSIGNED, "a"), row("i3", NodeState.DRAINING)]
    decision = decide(seen(rows, [job("a", JobState.PREPARING, 2, exclusions=(exclusion,))]))
    assert states(decision)["i1"] == ("spare", None), "it is heard and has let go of the job; another job may have it"
    gang = replace(job("a", JobState.ALLOCATING, 2), exclusions=(exclusion,))
    assert "i2" not in states(decide(seen([row("i1"), row("i2")], [gang]))), "a gang starts whole"


def test_no_remedy_ends_a_node_where_nothing_allows_that() -> None:
    for remedy, expected in (
        (Remedy.REPLACE, "held"),
        (Remedy.REBOOT, "held"),
        (Remedy.RETIRE, "held"),
        (Remedy.RELEASE, "spare"),
    ):
        exclusion = Exclusion(node_id=NodeId("i1"), evidence=Recorded(text="words"), may_terminate=False, remedy=remedy)
        rows = [row("i1", NodeState.ASSIGNED, "a"), row("i2", NodeState.ASSIGNED, "a"), row("i3")]
        decision = decide(
            seen(rows, [job("a", JobState.PREPARING, 2, exclusions=(exclusion,))], working={"i1": member_of("a")})
        )
        assert states(decision)["i1"] == (expected, None)
        assert not ended(decision)


def test_an_instance_comes_into_the_place_that_is_empty_for_the_longest() -> None:
    """A new instance replaces the member that was lost first. The replacement time starts at this loss.

    AWS had no capacity for minutes, so the replacement time is longer than the boot of the instance.
    """
    observed = replace(seen([row("i1"), row("i2")], [], desired=3), vacancies=())
    first = fleets.decide(NOW, SPEC, observed, POLICY)
    assert first.vacancies == ((NOW, 1),)
    later = fleets.decide(NOW + 300, SPEC, replace(observed, vacancies=first.vacancies), POLICY)
    assert later.vacancies == ((NOW, 1),)
    came = GroupMember(node_id=NodeId("i3"), is_leaving=False, awaits_termination=False)
    whole = replace(
        observed, group=replace(observed.group, members=(*observed.group.members, came)), vacancies=later.vacancies
    )
    last = fleets.decide(NOW + 400, SPEC, whole, POLICY)
    (added,) = (record for record in last.records if record.node_id == "i3")
    assert (added.state, added.created_at, added.wanted_at, last.vacancies) == (NodeState.JOINING, NOW + 400, NOW, ())


@pytest.mark.parametrize(
    ("before", "missing", "joined", "after", "filled"),
    [
        ((), 0, 0, (), ()),
        ((), 2, 0, ((9.0, 2),), ()),
        (((1.0, 2), (5.0, 1)), 3, 0, ((1.0, 2), (5.0, 1)), ()),
        (((1.0, 2), (5.0, 1)), 4, 0, ((1.0, 2), (5.0, 1), (9.0, 1)), ()),
        (((1.0, 2), (5.0, 1)), 1, 2, ((5.0, 1),), (1.0, 1.0)),
        (((1.0, 1),), 1, 1, ((9.0, 1),), (1.0,)),  # one instance came, another was lost, before one decision
        # One of two vacancies disappears without a new instance: the fleet no longer needs a replacement, or the agent
        # connected before the group listed its instance.
        (((1.0, 1), (5.0, 1)), 1, 0, ((5.0, 1),), ()),
        (((1.0, 1),), 0, 3, (), (1.0,)),  # two instances arrived before the same pass
    ],
)
def test_empty_places_are_followed(before, missing: int, joined: int, after, filled) -> None:
    assert capacity.vacancies(before, missing=missing, joined=joined, now=9.0) == (after, filled)


def test_a_silent_spare_whose_status_check_fails_is_no_spare() -> None:
    observed = seen([row("i1"), row("i2"), row("i3"), row("i4")], [], desired=4, silent=("i1", "i2"))
    ill = {
        node_id: replace(node, failed_status_check="EC2 reports its system status check as impaired")
        for node_id, node in observed.nodes.items()
    }
    decision = decide(replace(observed, nodes={**ill, NodeId("i2"): observed.nodes[NodeId("i2")]}))
    assert {record.node_id: record.hold for record in decision.records} == {"i1": Hold.UNREACHABLE}
    assert (
        sentence(decision.records[0].reason)
        == "unreachable: its agent is silent and EC2 reports its system status check as impaired"
    )


def source(name: str, size: int = 10) -> SourceArchive:
    return SourceArchive(object=ObjectReference(bucket="b", key=name), sha256=name, bytes=size)


def with_source(of: FleetJob, archive: SourceArchive) -> FleetJob:
    return replace(of, source=archive)


def told(decision) -> dict[str, tuple[str, ...]]:
    return {
        action.node_id: tuple(each.sha256 for each in action.message.sources)
        for action in decision.actions
        if isinstance(action, Send) and isinstance(action.message, KeepSources)
    }


def holding(observed: FleetObserved, *names: str) -> FleetObserved:
    return replace(
        observed, nodes={node_id: replace(node, sources=frozenset(names)) for node_id, node in observed.nodes.items()}
    )


def test_spares_hold_the_sources_of_the_fleets_jobs_ready() -> None:
    jobs = [
        with_source(job("waits", JobState.QUEUED, 9, created=1), source("b")),
        with_source(job("trains", JobState.RUNNING, 1, created=2), source("a")),
        with_source(job("twin", JobState.QUEUED, 9, created=3), source("a")),
    ]
    rows = [row("i1", NodeState.ASSIGNED, "trains"), row("i2"), row("i3"), row("i4")]
    observed = seen(rows, jobs, silent=("i4",), desired=4)
    assert told(decide(observed)) == {"i2": ("a", "b"), "i3": ("a", "b")}, (
        "who trains may lose a node any moment; who is silent hears nothing"
    )
    assert told(decide(holding(observed, "a", "b"))) == {}
    assert told(decide(holding(observed, "a", "b", "old"))) == {"i2": ("a", "b"), "i3": ("a", "b")}
    assert told(decide(holding(replace(observed, jobs=()), "a"))) == {"i1": (), "i2": (), "i3": ()}, (
        "of jobs that are over nothing is kept"
    )
    assert told(decide(seen([row("i1")], jobs, desired=1, working={"i1": member_of("old")}))) == {}, (
        "it gives back what it has first"
    )


def test_what_a_spare_holds_ready_has_a_limit() -> None:
    many = [
        with_source(job(f"j{number}", JobState.QUEUED, 9, created=number), source(f"{number:02}"))
        for number in range(20)
    ]
    assert told(decide(seen([row("i1")], many, desired=1))) == {
        "i1": tuple(f"{number:02}" for number in range(fleets.MOST_SOURCES))
    }
    exact = [with_source(each, source(each.job, fleets.MOST_SOURCE_BYTES // 2)) for each in many]
    assert told(decide(seen([row("i1")], exact, desired=1))) == {"i1": ("j0", "j1")}
    large = [with_source(each, source(each.job, fleets.MOST_SOURCE_BYTES // 3)) for each in many]
    assert told(decide(seen([row("i1")], large, desired=1))) == {"i1": ("j0", "j1", "j2")}


@pytest.mark.parametrize(
    "note",
    [
        "fan is noisy",
        "see ticket: AWS announced for i-7 the same fault",
        "surplus: the fleet needs 1 nodes",
        "the roll of the fleet replaces i1 (ann)",
    ],
)
def test_the_note_of_a_person_does_not_lift_the_hourly_limit(note: str) -> None:
    asked = row("i1", request=structs.replace(REQUESTED, note=note), created_at=1.0)
    limited = replace(SPEC, spare_count=0, max_replacements_per_hour=1)
    decision = decide(seen([asked, row("i2")], [], desired=2, replaced=(NOW - 10,)), limited)
    assert states(decision) == {"i1": ("draining", None)}
    assert ended(decision) == []
    assert any(isinstance(reason, ReplacementLimit) for reason in decision.reasons)


def test_a_node_that_its_job_left_for_a_notice_does_not_count_towards_the_hourly_limit() -> None:
    left = GivenUp(job="a", remedy=Remedy.TERMINATE, because=Recorded(text="any words"))
    rows = [row("i1", NodeState.DRAINING, reason=left), row("i2"), row("i3")]
    limited = replace(SPEC, max_replacements_per_hour=1)
    assert ended(decide(seen(rows, [], replaced=(NOW - 10,)), limited)) == ["i1"]


def test_new_members_are_protected_before_any_is_terminated() -> None:
    rows = [row(f"i{n}") for n in range(1, 6)]
    decision = decide(seen(rows, [], desired=5, unprotected=(NodeId("i2"),)))
    assert decision.actions[0] == ProtectMembers(group="group", node_ids=(NodeId("i2"),))
    assert len(ends(decision)) == 2


@pytest.mark.parametrize(
    ("ended", "deleting", "has_members", "is_empty"),
    [
        pytest.param(("i1", "i2"), True, False, True, id="all have ended"),
        pytest.param(("i1",), True, False, False, id="one has not ended"),
        pytest.param(("i1", "i2"), True, True, False, id="the group still lists them"),
        pytest.param(("i1", "i2"), False, False, False, id="it is not to be deleted"),
    ],
)
def test_a_deleted_fleet_is_empty_once_its_nodes_and_members_are_gone(
    ended: tuple[str, ...], deleting: bool, has_members: bool, is_empty: bool
) -> None:
    observed = seen([row("i1"), row("i2")], [], desired=0, ended=ended)
    if not has_members:
        observed = replace(observed, group=replace(observed.group, members=()))
    assert decide(observed, replace(SPEC, is_deleting=deleting)).is_empty is is_empty


def test_an_event_about_a_node_names_the_job_that_it_leaves_or_joins() -> None:
    left = decide(seen([row("i1", NodeState.ASSIGNED, "gpt"), row("i2"), row("i3")], [], ended=("i1",)))
    assert [event.run for event in left.events] == ["gpt"]
    joined = decide(seen([row("i1"), row("i2"), row("i3")], [job("gpt", JobState.ALLOCATING, 1)]))
    assert [event.run for event in joined.events] == ["gpt"]


@pytest.mark.parametrize(
    ("count", "is_own_word", "state"),
    [(LEMON_INCIDENTS - 1, True, None), (LEMON_INCIDENTS, True, "draining"), (LEMON_INCIDENTS, False, "held")],
)
def test_a_spare_of_too_many_incidents_is_taken_out(count: int, is_own_word: bool, state: str | None) -> None:
    observed = seen([row("i1"), row("i2"), row("i3")], [])
    lines = tuple(
        Implication(
            node_id=NodeId("i1"),
            incident_id=f"inc-{number}",
            at=NOW - 60,
            what="x",
            evidence=Recorded(text="words"),
            is_own_word=is_own_word,
            remedy=Remedy.RESTART,
        )
        for number in range(count)
    )
    nodes = {**observed.nodes, NodeId("i1"): replace(observed.nodes[NodeId("i1")], history=lines)}
    assert states(decide(replace(observed, nodes=nodes))) == ({} if state is None else {"i1": (state, None)})
