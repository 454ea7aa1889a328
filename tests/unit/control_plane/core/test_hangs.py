"""Tests hang detection: the time limit of each phase, the samples of ranks' stacks, and what proves a hang."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import msgspec
import pytest

from control_plane.accounts.facts import sentence
from control_plane.accounts.jobs import reason, reason_now
from control_plane.accounts.responses import repeated
from control_plane.core import breakers, hangs
from control_plane.core.breakers import BreakerCourse
from control_plane.core.observed.facts import Oddity, SameStack
from control_plane.core.observed.incidents import FailureRecord
from control_plane.core.observed.jobs import Pace, Suspicion
from control_plane.core.observed.nodes import Cause
from control_plane.core.observed.reasons import HangFound, JobFact, JobNote, StandsStill
from control_plane.core.timeouts import ladder
from everstep.protocol.agent_messages import ExitClass, MemberPhase, MemberReport, RankExit, RankStacks, RankStatus
from everstep.protocol.ids import NO_STEP, Generation, JobName, NodeId, Rank, RunId, Step
from everstep.protocol.plan import GenerationPlan
from tests.unit.control_plane.core.cluster import fresh, spec_of

TIMEOUTS = ladder(3.0)
PACE = Pace(world_size=4, longest={"train": 2.0, "eval": 40.0, "start": 5.0, "first_step": 9.0})
WAITS = "MainThread\n    all_reduce (distributed.py:7)\n    main (train.py:3)\nwriter\n    wait (threading.py:1)"
STUCK = "MainThread\n    read (data.py:40)\n    main (train.py:3)"
NOW = 10_000.0


def status(
    rank: int, *, still: float, phase: str = "train", boundary: int = 7, is_ended: bool = False, limit: float = 0.0
) -> RankStatus:
    ended = (
        RankExit(exit_class=ExitClass.SUCCESS, code=0, at_seconds=NOW, boundary=Step(boundary)) if is_ended else None
    )
    return RankStatus(
        rank=Rank(rank), boundary=Step(boundary), phase=phase, still_seconds=still, exit=ended, limit_seconds=limit
    )


def look(rank: int, number: int = 2, **changes: object) -> RankStacks:
    made = RankStacks(
        rank=Rank(rank), number=number, text=WAITS, same_seconds=60.0 if number > 1 else 0.0, cpu_seconds=0.1
    )
    return msgspec.structs.replace(made, **changes)


def reports(*statuses: RankStatus, looks: tuple[RankStacks, ...] = ()) -> dict[NodeId, MemberReport]:
    """Return one report per node, with one rank per node."""
    return {
        NodeId(f"i-{each.rank}"): MemberReport(
            job=JobName("gpt"),
            run=RunId("r"),
            generation=Generation(1),
            phase=MemberPhase.RUNNING,
            ranks=(each,),
            stacks=tuple(taken for taken in looks if taken.rank == each.rank),
        )
        for each in statuses
    }


def watch(
    seen: Mapping[NodeId, MemberReport],
    suspicion: Suspicion | None = None,
    *,
    has_all_reports: bool = True,
    now: float = NOW,
) -> hangs.Watched:
    return hangs.watch(now, seen, PACE, suspicion, TIMEOUTS, has_all_reports=has_all_reports)


def second(still: float = 95.0) -> Suspicion:
    return Suspicion(since=NOW - still, began_at=NOW - still + 31, number=2, asked_at=NOW, limit_seconds=90.0)


FOUR = tuple(status(rank, still=95.0) for rank in range(4))


def words_of(watched: hangs.Watched) -> str:
    assert watched.still is not None
    return reason(watched.still)


@pytest.mark.parametrize(
    ("phase", "expected"),
    [
        # a step takes 2 s, and five times as long is less than the minimum limit of 30 s
        ("train", hangs.HangLimits(first=30.0, second=90.0, last=600.0)),
        # five times 40 s, the duration that the job has learned for an evaluation
        ("eval", hangs.HangLimits(first=200.0, second=300.0, last=600.0)),
        (
            "checkpoint",
            hangs.HangLimits(first=600.0, second=900.0, last=1800.0),
        ),  # the job has not learned a duration yet
        # The job has learned a duration for the start. A start with cold caches takes longer, so the general limit
        # applies.
        ("start", hangs.HangLimits(first=600.0, second=900.0, last=1800.0)),
        # five times 9 s, the duration that an earlier generation learned
        ("first_step", hangs.HangLimits(first=45.0, second=90.0, last=600.0)),
    ],
)
def test_limits_are_learned_above_a_floor(phase: str, expected: hangs.HangLimits) -> None:
    assert hangs.limits(phase, PACE, TIMEOUTS) == expected


def test_a_first_step_that_hangs_again_is_restarted_after_the_time_of_a_step() -> None:
    """A first step that hangs again is restarted after the limit that the job has learned for a first step.

    The resumed generation hangs at the same step as the generation before. Without a learned duration, the limit of a
    first step would be 900 s.
    """
    suspicion = Suspicion(since=NOW - 95, began_at=NOW - 50, number=1, asked_at=NOW - 50, is_answered=True)
    four = tuple(status(rank, still=95.0, phase="first_step") for rank in range(4))
    asked = watch(reports(*four, looks=tuple(look(rank, 1) for rank in range(4))), suspicion)
    assert asked.suspicion is not None
    assert asked.suspicion.number == 2
    watched = watch(reports(*four, looks=tuple(look(rank) for rank in range(4))), asked.suspicion)
    assert {fault.cause for fault in watched.faults} == {Cause.HANG}


def test_a_first_step_takes_at_least_as_long_as_a_start_and_a_step() -> None:
    slow = Pace(world_size=4, longest={"train": 50.0, "start": 20.0, "first_step": 9.0})
    assert hangs.limits("first_step", slow, TIMEOUTS).first == 250.0
    assert hangs.limits("first_step", Pace(world_size=4, longest={"train": 50.0}), TIMEOUTS).first == 600.0, (
        "none was ever made"
    )


def test_the_pace_is_the_longest_of_all_and_belongs_to_a_world_size() -> None:
    seen = {
        NodeId(name): msgspec.structs.replace(next(iter(reports(status(0, still=0)).values())), longest={"train": s})
        for name, s in (("a", 3.0), ("b", 1.0))
    }
    assert hangs.learned(PACE, 4, seen).longest == {**PACE.longest, "train": 3.0}
    assert hangs.learned(PACE, 8, seen) == Pace(world_size=8, longest={"train": 3.0})
    quick = {node: msgspec.structs.replace(report, longest={"eval": 0.5}) for node, report in seen.items()}
    assert hangs.learned(PACE, 8, quick) == Pace(world_size=8, longest={"eval": 0.5})


def test_the_limits_of_a_quick_job_follow_from_its_own_times() -> None:
    quick = msgspec.structs.replace(TIMEOUTS, stall_seconds=1.0)
    pace = Pace(world_size=4, longest={"first_step": 0.5, "train": 0.0})
    assert hangs.limits("first_step", pace, quick).first == 2.5
    assert hangs.limits("train", pace, quick).first == 1.0


def test_of_several_phases_each_longest_limit_counts() -> None:
    """The limits are 600 s, 900 s and 1,800 s for a start, and 200 s, 300 s and 600 s for an evaluation."""

    def both(still: float) -> dict[NodeId, MemberReport]:
        phases = (status(0, still=still, phase="start"), status(1, still=still, phase="eval"))
        return reports(*phases, looks=tuple(look(rank, cpu_seconds=60.0) for rank in (0, 1)))

    assert watch(both(600.0)).suspicion is None
    suspicion = watch(both(601.0)).suspicion
    assert suspicion is not None
    assert suspicion.limit_seconds == 900.0
    assert not watch(both(1_800.0), second(1_800.0)).faults
    assert watch(both(1_801.0), second(1_801.0)).faults


def test_a_suspected_hang_is_shown_with_its_age_and_its_limit() -> None:
    watched = watch(reports(*(status(rank, still=31.0) for rank in range(4))))
    assert watched.still is not None
    shown = "no progress for 42 s (limit 90 s): all 4 ranks made no progress in train for longer than 30 s"
    assert reason_now(watched.still, watched.suspicion, NOW + 11.0) == f"{shown}; the stacks are in the job's events"
    assert reason_now("trains from step 3", None, NOW) == "trains from step 3"


def test_below_the_limit_nothing_is_asked() -> None:
    assert watch(reports(*(status(rank, still=30.0) for rank in range(4)))) == hangs.Watched(suspicion=None)


def test_beyond_the_limit_every_living_rank_is_looked_at() -> None:
    seen = reports(*(status(rank, still=31.0) for rank in range(3)), status(3, still=500.0, is_ended=True))
    watched = watch(seen)
    assert watched.suspicion == Suspicion(since=NOW - 31.0, began_at=NOW, number=1, asked_at=NOW, limit_seconds=90.0)
    assert watched.ask == ("i-0", "i-1", "i-2")
    assert not watched.faults
    assert not watched.events


def test_who_has_answered_is_not_asked_again_and_who_does_not_answer_is_not_waited_for_for_ever() -> None:
    suspicion = Suspicion(since=NOW - 31, began_at=NOW, number=1, asked_at=NOW, limit_seconds=90.0)
    seen = reports(*(status(rank, still=33.0) for rank in range(4)), looks=(look(0, 1), look(1, 1), look(2, 1)))
    assert watch(seen, suspicion, now=NOW + 6.0).ask == ("i-3",)
    late = watch(seen, suspicion, now=NOW + 6.1)
    assert late.suspicion == replace(suspicion, is_answered=True)
    assert [event.type for event in late.events] == ["RanksStandStill"]


def test_the_first_look_warns_with_stacks_and_harms_nobody() -> None:
    looks = (look(0, 1), look(1, 1, text=STUCK, is_stopped=True), look(2, 1), look(3, 1))
    suspicion = Suspicion(since=NOW - 31, began_at=NOW, number=1, asked_at=NOW, limit_seconds=90.0)
    watched = watch(reports(*(status(rank, still=31.0) for rank in range(4)), looks=looks), suspicion)
    assert not watched.faults
    (event,) = watched.events
    assert event.detail == {"stacks": [{"ranks": [0, 2, 3], "text": WAITS}, {"ranks": [1], "text": STUCK}]}
    assert event.node_id == "i-1"
    assert (
        words_of(watched)
        == "trains; all 4 ranks made no progress in train for longer than 30 s; the stacks are in the job's events"
    )
    assert watched.suspicion is not None
    again = watch(reports(*(status(rank, still=32.0) for rank in range(4))), watched.suspicion)
    assert (again.events, again.ask) == ((), ()), "told once"


def test_the_second_look_comes_at_the_second_limit_and_others_after_it() -> None:
    answered = Suspicion(
        since=NOW - 90, began_at=NOW - 60, number=1, asked_at=NOW - 60, is_answered=True, limit_seconds=90.0
    )
    assert watch(reports(*(status(rank, still=90.0) for rank in range(4))), answered).suspicion == answered
    due = watch(reports(*FOUR), answered)
    assert due.suspicion == replace(answered, number=2, asked_at=NOW, is_answered=False)
    assert len(due.ask) == 4
    second_answered = replace(answered, number=2, asked_at=NOW - 30)
    assert watch(reports(*FOUR), second_answered).suspicion == second_answered
    assert watch(reports(*FOUR), replace(second_answered, asked_at=NOW - 31)).suspicion == replace(
        second_answered, number=3, asked_at=NOW, is_answered=False
    )


def test_all_asleep_is_a_hang_and_the_node_that_stands_elsewhere_is_named() -> None:
    watched = watch(reports(*FOUR, looks=(look(0), look(1), look(2, text=STUCK), look(3))), second())
    assert [fault.cause for fault in watched.faults] == [Cause.HANG] * 4
    assert {(fault.at, fault.node_id) for fault in watched.faults} == {(NOW - 95.0, None)}, (
        "restart in place: no node is lost"
    )
    first, odd, *places = [sentence(fault.evidence) for fault in watched.faults]
    assert first.startswith("hang: all 4 ranks made no progress in train for 95 s, the limit is 30 s: no stack changed")
    assert odd == "i-2 alone is stuck: its rank 2 is at another place in the code than the other ranks"
    assert places == [
        "ranks 0, 1, 3: all_reduce (distributed.py:7) < main (train.py:3)",
        "rank 2: read (data.py:40) < main (train.py:3)",
    ]
    (event,) = watched.events
    assert (event.type, event.node_id) == ("RanksHang", "i-2")


@pytest.mark.parametrize(
    "busy",
    [
        look(1, cpu_seconds=1.3),  # more than two percent of a minute, so the ranks count as working
        look(1, gpu_percent=40.0),
        look(1, same_seconds=0.0),  # the stacks have changed since the previous sample
        look(1, same_seconds=0.0, cpu_seconds=0.0),
        look(1, text="", error="py-spy is not installed"),
    ],
    ids=["cpu", "gpu", "moved", "moved idle", "unread"],
)
def test_a_rank_that_may_be_at_work_spares_all(busy: RankStacks) -> None:
    seen = reports(*FOUR, looks=(look(0), busy, look(2), look(3)))
    watched = watch(seen, second())
    assert not watched.faults
    assert watched.suspicion == replace(second(), is_answered=True)


@pytest.mark.parametrize(
    "idle", [look(1, cpu_seconds=1.2), look(1, same_seconds=0.5, cpu_seconds=0.0)], ids=["two percent", "half a second"]
)
def test_an_idle_rank_spares_nobody(idle: RankStacks) -> None:
    assert watch(reports(*FOUR, looks=(look(0), idle, look(2), look(3))), second()).faults


def test_a_rank_that_was_not_looked_at_spares_all() -> None:
    late = replace(second(), asked_at=NOW - 7)
    assert not watch(reports(*FOUR, looks=(look(0), look(1), look(2))), late).faults


def test_a_stopped_rank_is_a_hang_whatever_the_others_burn() -> None:
    spins = [look(rank, cpu_seconds=59.0) for rank in (0, 1, 3)]
    watched = watch(reports(*FOUR, looks=(*spins, look(2, is_stopped=True))), second())
    assert "rank 2 on i-2 stopped by a signal" in sentence(watched.faults[0].evidence)
    assert sentence(watched.faults[1].evidence) == "i-2 alone is stuck: its rank 2 is stopped"


def test_a_rank_left_behind_is_a_hang_although_others_move() -> None:
    moving = [status(rank, still=0.5, boundary=9) for rank in (0, 1, 3)]
    seen = reports(
        *moving, status(2, still=95.0), looks=(*(look(rank, same_seconds=0.0) for rank in (0, 1, 3)), look(2))
    )
    assert "while other ranks reached step 9" in sentence(watch(seen, second()).faults[0].evidence)
    nearly = [msgspec.structs.replace(each, boundary=8) for each in moving]
    seen = reports(
        *nearly, status(2, still=95.0), looks=(*(look(rank, same_seconds=0.0) for rank in (0, 1, 3)), look(2))
    )
    assert not watch(seen, second()).faults


def test_busy_waiting_is_a_hang_only_after_the_last_limit() -> None:
    looks = tuple(look(rank, cpu_seconds=60.0, gpu_percent=100.0) for rank in range(4))
    assert not watch(reports(*(status(rank, still=600.0) for rank in range(4)), looks=looks), second(600.0)).faults
    found = watch(reports(*(status(rank, still=601.0) for rank in range(4)), looks=looks), second(601.0))
    assert "although ranks use CPU or GPU" in sentence(found.faults[0].evidence)
    changing = (*looks[:3], look(3, same_seconds=0.0))
    assert not watch(reports(*(status(rank, still=601.0) for rank in range(4)), looks=changing), second(601.0)).faults


def test_who_waits_for_an_evaluation_has_the_time_of_an_evaluation() -> None:
    evaluates = status(0, still=150.0, phase="eval")
    assert watch(reports(evaluates, *(status(rank, still=150.0) for rank in (1, 2, 3)))).suspicion is None
    assert watch(reports(evaluates, *(status(rank, still=201.0) for rank in (1, 2, 3)))).suspicion is not None


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        # the script declares a limit, which is used without a factor
        (3600.0, hangs.HangLimits(first=3600.0, second=3690.0, last=4200.0)),
        # the general minimum limit is longer than the declared limit
        (5.0, hangs.HangLimits(first=30.0, second=120.0, last=630.0)),
    ],
)
def test_a_limit_that_the_script_tells_stands_in_place_of_what_was_learned(
    told: float, expected: hangs.HangLimits
) -> None:
    assert hangs.limits("wait", PACE, TIMEOUTS, told) == hangs.limits("eval", PACE, TIMEOUTS, told) == expected


def test_who_waits_on_purpose_is_let_be_as_long_as_the_script_says_and_so_are_those_who_wait_for_it() -> None:
    gate = status(0, still=590.0, phase="wait", limit=600.0)
    waits = watch(reports(gate, *(status(rank, still=590.0) for rank in (1, 2, 3))))
    assert (waits.suspicion, waits.ask, waits.events) == (None, (), ())
    assert words_of(waits) == "trains; rank 0 on i-0 waits deliberately (phase wait), for at most 600 s"
    assert watch(reports(status(0, still=30.0, phase="wait", limit=600.0))).still is None, (
        "no longer than a step may take"
    )
    over = watch(reports(*(status(rank, still=601.0, phase="wait", limit=600.0) for rank in range(4))))
    assert over.suspicion is not None
    assert (
        words_of(over)
        == "trains; all 4 ranks made no progress in wait for longer than 600 s; the stacks are in the job's events"
    )


def test_a_wait_that_outlasts_its_word_is_a_hang() -> None:
    waits = tuple(status(rank, still=691.0, phase="wait", limit=600.0) for rank in range(4))
    watched = watch(reports(*waits, looks=tuple(look(rank) for rank in range(4))), second(691.0))
    assert sentence(watched.faults[0].evidence).startswith(
        "hang: all 4 ranks made no progress in wait for 691 s, the limit is 600 s: "
    )
    assert watched.faults[0].at == NOW - 91.0, "the time that it was given is no time lost"
    assert hangs.promised_seconds(reports(*waits)) == 600
    assert hangs.promised_seconds(reports(*FOUR)) == hangs.promised_seconds({}) == 0


def test_the_longest_declared_wait_of_the_ranks_that_stand_still_is_no_time_lost() -> None:
    waits = [status(rank, still=691.0, phase="wait", limit=limit) for rank, limit in ((0, 600.0), (1, 500.0))]
    watched = watch(reports(*waits, looks=(look(0), look(1))), second(691.0))
    assert {fault.at for fault in watched.faults} == {NOW - 91.0}
    at_gate = watch(reports(*(msgspec.structs.replace(each, still_seconds=400.0) for each in waits)))
    assert words_of(at_gate).endswith("for at most 600 s")


@pytest.mark.parametrize(
    ("statuses", "stands"),
    [
        pytest.param((status(0, still=30.0), status(1, still=0.0)), False, id="at the first limit"),
        pytest.param((status(0, still=31.0), status(1, still=0.0)), True, id="one rank after the first limit"),
        pytest.param((status(0, still=31.0, is_ended=True), status(1, still=0.0)), False, id="a rank that has ended"),
        pytest.param((status(0, still=1e6, phase="close"), status(1, still=0.0)), False, id="a rank that closes"),
        pytest.param((), False, id="no rank"),
    ],
)
def test_which_ranks_stand_still(statuses: tuple[RankStatus, ...], stands: bool) -> None:
    assert hangs.stands_still(reports(*statuses), PACE, TIMEOUTS) is stands


def test_a_wait_without_a_limit_has_that_of_a_phase_never_seen() -> None:
    assert watch(reports(status(0, still=600.0, phase="wait"))).suspicion is None
    assert watch(reports(status(0, still=601.0, phase="wait"))).suspicion is not None


def test_a_rank_that_closes_waits_for_the_others_as_long_as_they_train() -> None:
    closing = status(0, still=5000.0, phase="close")
    assert watch(reports(closing, status(1, still=1.0))).suspicion is None
    assert watch(reports(closing, status(1, still=5000.0, phase="close"))).suspicion is not None


def test_nothing_is_judged_while_a_node_is_silent() -> None:
    looks = tuple(look(rank) for rank in range(4))
    assert watch(reports(*FOUR, looks=looks), second(), has_all_reports=False) == hangs.Watched(suspicion=second())


def test_ranks_that_move_again_end_the_suspicion() -> None:
    watched = watch(reports(*(status(rank, still=0.3) for rank in range(4))), second())
    assert watched.suspicion is None
    (event,) = watched.events
    assert (event.type, event.message) == ("RanksMoveAgain", JobNote(what=JobFact.PROGRESSES_AGAIN, seconds=95.0))


def test_a_suspicion_begins_with_the_rank_that_stands_still_for_the_longest_time() -> None:
    suspicion = watch(reports(status(0, still=31.0), status(1, still=50.0), status(2, still=1.0))).suspicion
    assert suspicion is not None
    assert suspicion.since == NOW - 50.0


@pytest.mark.parametrize(
    ("count", "still", "are_all"), [(1, (0,), False), (2, (0, 1), True), (3, (0, 1), False), (3, (0, 1, 2), True)]
)
def test_all_ranks_are_more_than_one(count: int, still: tuple[int, ...], are_all: bool) -> None:
    watched = watch(reports(*(status(rank, still=31.0 if rank in still else 1.0) for rank in range(count))))
    assert isinstance(watched.still, StandsStill)
    assert (watched.still.stuck.ranks, watched.still.stuck.are_all) == (still, are_all)


@pytest.mark.parametrize(
    ("boundaries", "odd", "alone"),
    [
        pytest.param((7, 7, 6, 7), {}, (2, Oddity.BEHIND), id="behind"),
        pytest.param((7, 6, 6, 7), {}, None, id="two behind"),
        pytest.param((7, 7, 7, 7), {1: {"text": STUCK}}, (1, Oddity.ELSEWHERE), id="elsewhere"),
        pytest.param((7, 7), {1: {"text": STUCK}}, None, id="each elsewhere"),
        pytest.param((7, 7), {1: {"is_stopped": True}}, (1, Oddity.STOPPED), id="stopped"),
        pytest.param((7,), {0: {"is_stopped": True}}, None, id="the only rank"),
        pytest.param((7, 7, 7, 7), {}, None, id="all alike"),
    ],
)
def test_a_node_that_alone_is_stuck(
    boundaries: tuple[int, ...], odd: dict[int, dict[str, object]], alone: tuple[int, Oddity] | None
) -> None:
    looks = tuple(look(rank, 1, **odd.get(rank, {})) for rank in range(len(boundaries)))
    statuses = (status(rank, still=31.0, boundary=boundary) for rank, boundary in enumerate(boundaries))
    first = Suspicion(since=NOW - 31, began_at=NOW, number=1, asked_at=NOW)
    (event,) = watch(reports(*statuses, looks=looks), first).events
    assert isinstance(event.message, HangFound)
    found = event.message.alone
    assert (None if found is None else (found.ranks, found.how)) == (None if alone is None else ((alone[0],), alone[1]))


@pytest.mark.parametrize(("stuck", "first"), [((0, 1, 3), "0, 1, 3"), ((0, 1), "0, 1")])
def test_the_largest_group_of_equal_stacks_comes_first_and_then_the_lowest_ranks(
    stuck: tuple[int, ...], first: str
) -> None:
    looks = tuple(look(rank, text=STUCK if rank in stuck else WAITS) for rank in range(4))
    watched = watch(reports(*FOUR, looks=looks), second())
    places = [sentence(fault.evidence) for fault in watched.faults if isinstance(fault.evidence, SameStack)]
    assert places[0] == f"ranks {first}: read (data.py:40) < main (train.py:3)"
    stacks = watched.events[0].detail["stacks"]
    assert isinstance(stacks, list)
    assert stacks[0] == {"ranks": [*stuck], "text": STUCK}


def plan() -> GenerationPlan:
    planned = fresh().jobs[0].plan
    assert planned is not None
    return planned


def test_a_hang_is_remembered_where_the_slowest_rank_stood_and_with_the_node_that_alone_was_stuck() -> None:
    seen = reports(status(0, still=1, boundary=9), status(1, still=1, boundary=7))
    remembered = hangs.failure(plan(), seen, Step(9), NOW, stuck=NodeId("i-0"))
    assert (remembered.step, remembered.is_hang, remembered.exit_class) == (7, True, None)
    assert (remembered.node_id, remembered.base_step, remembered.code) == ("i-0", 0, 0)
    assert hangs.failure(plan(), {}, Step(9), NOW).step == NO_STEP


def test_a_script_that_hangs_at_the_same_step_again_and_again_is_given_up() -> None:
    spec = replace(spec_of("gpt", "a", 1, 1), max_attempts=2)
    hung = hangs.failure(plan(), reports(status(0, still=1)), Step(9), NOW)

    def rule(*failures: FailureRecord) -> breakers.Ruling:
        return breakers.rule(failures, (), spec, has_spare=True, older_base=Step(0))

    assert rule(hung).course is BreakerCourse.AGAIN
    why = rule(hung, hung).why
    assert why is not None
    assert repeated(why) == "the same failure occurred 2 times after step 7: its ranks were hung"
    assert rule(replace(hung, is_hang=False), hung).course is BreakerCourse.AGAIN
    alone = replace(hung, node_id=NodeId("i-0"))
    assert rule(alone, alone).course is BreakerCourse.OTHER_NODE, "it may be the node"
