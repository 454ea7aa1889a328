"""Each rule reports the violation that its test builds, and no rule reports a violation on a correct day."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from tests.bad_day.facts import Boundary, Call, Day, Decision, Ended, Incident, Job, Start, Strike
from tests.bad_day.rules import COST_SECONDS, KINDS, MEAN_MINUTES, RULES, expected_ettr, has_begun, judge

RESULT = [{"tensors": {"w": "1"}}, {"tensors": {"w": "1"}}]
A, B, C, D = "i-a", "i-b", "i-c", "i-d"
SPENT = {"queue": 10.0, "train": 2970.0, "restore": 20.0}


def passed(job: str, generation: int, node: str, step: int, at: float, rank: int = 0) -> Boundary:
    return Boundary(
        job=job,
        generation=generation,
        rank=rank,
        pid=generation * 100 + rank,
        node=node,
        step=step,
        at=at,
        monotonic=at,
    )


def job(name: str, priority: int = 0, started_at: float = 10.0, **changes: Any) -> Job:
    whole = Job(
        name=name,
        status="Completed",
        nodes=2,
        priority=priority,
        created_at=0.0,
        started_at=started_at,
        ended_at=3000.0,
        accounted_until=3000.0,
        accounting_seconds=SPENT,
        ettr=0.99,
        checkpoint_every=50,
        result=RESULT,
        undisturbed=RESULT,
    )
    return replace(whole, **changes)


def start(name: str, node_count: int = 2, committed_step: int = 3, status: str = "InProgress") -> Start:
    return Start(
        job=name,
        waited_seconds=241.2,
        status=status,
        secondary="Starting",
        reason="2 nodes are to come",
        node_count=node_count,
        committed_step=committed_step,
    )


def never_begun(waits: Start) -> Day:
    """Return a day without strikes, because job "long" did not start.

    Job "early" trains. `waits` is the state of job "long" when the wait for its first committed step ended.
    """
    unfinished = {"status": "InProgress", "ended_at": None, "result": []}
    jobs = [job("early", **unfinished), job("long", **unfinished, accounting_seconds={}, accounted_until=None)]
    return replace(well(), is_temptation=True, strikes=[], jobs=jobs, starts=[start("early"), waits])


def well() -> Day:
    """Return a correct day of one minute, which has enough strikes and violates no rule."""
    strikes = [
        Strike(
            at=100.0 + place, kind=kind, targets=(A,) if kind == "instances" else (), did=f"{kind} struck", seen="gone"
        )
        for place, kind in enumerate(KINDS)
    ]
    strikes.append(Strike(at=102.4, kind="instances", targets=(D,), did="instances struck", seen="gone"))
    incident = Incident(
        id="inc-1",
        job="early",
        cause="instance_terminated",
        source="peer",
        from_step=4,
        lost_steps=1,
        generation_before=1,
        generation_after=2,
        instances=(A,),
        evidence=("EC2 says so",),
        failed_at=101.0,
        opened_at=102.5,
        closed_at=107.0,
        phase_seconds=(1.5, 2.0, 2.0, 0.5),
    )
    return Day(
        seed=1,
        minutes=1.0,
        boundaries=[
            *(
                passed("early", 1, node, step, 90.0 + step, rank)
                for rank, node in enumerate((A, B))
                for step in range(1, 6)
            ),
            *(passed("long", 1, D, step, 90.0 + step) for step in range(1, 6)),
            *(
                passed("early", 2, node, step, 103.0 + step, rank)
                for rank, node in enumerate((C, B))
                for step in range(4, 9)
            ),
        ],
        calls=[
            *orders((1.0, 3), (103.0, 4)),
            Call(at=200.0, action="TerminateInstanceInAutoScalingGroup", instance=C, is_decrement=True),
        ],
        ended=[Ended(instance=A, at=102.2), Ended(instance=C, at=201.0)],
        strikes=strikes,
        decisions=[Decision(at=199.0, instance=C, words="spare → draining: nobody needs it")],
        incidents=[incident],
        jobs=[
            job("early", ended_at=2000.0, accounted_until=2000.0, accounting_seconds={"train": 2000.0}),
            job("urgent", 10, 2001.0),
        ],
        has_links=True,
        starts=[start("early"), start("long")],
    )


def with_incident(**changes: Any) -> Callable[[Day], Day]:
    return lambda day: replace(day, incidents=[replace(day.incidents[0], **changes)])


def with_job(**changes: Any) -> Callable[[Day], Day]:
    return lambda day: replace(day, jobs=[replace(day.jobs[0], **changes), *day.jobs[1:]])


def orders(*given: tuple[float, int]) -> list[Call]:
    return [Call(at=at, action="SetDesiredCapacity", desired=desired) for at, desired in given]


def with_orders(*given: tuple[float, int]) -> Callable[[Day], Day]:
    return lambda day: replace(day, calls=orders(*given))


WRONG: dict[str, list[tuple[str, Callable[[Day], Day]]]] = {
    "one job per node": [
        (
            "another job's ranks",
            lambda day: replace(
                day, boundaries=[*day.boundaries, passed("urgent", 1, B, 1, 94.0), passed("urgent", 1, B, 2, 94.5)]
            ),
        ),
        (
            "ranks of the generation before",
            lambda day: replace(day, boundaries=[*day.boundaries, passed("early", 1, B, 6, 109.0, 1)]),
        ),
    ],
    "decided before it ended": [
        ("nobody asked", lambda day: replace(day, calls=[])),
        ("AWS refused", lambda day: replace(day, calls=[replace(call, status=503) for call in day.calls])),
        ("nobody had decided", lambda day: replace(day, decisions=[])),
        ("decided afterwards", lambda day: replace(day, decisions=[replace(day.decisions[0], at=200.5)])),
    ],
    "evidence": [
        (
            "given up while it made steps",
            lambda day: with_incident(cause="node_unreachable", instances=(B,))(
                replace(
                    day,
                    boundaries=[*day.boundaries, *(passed("early", 1, B, 6 + n, 101.2 + n / 10, 1) for n in range(3))],
                )
            ),
        ),
        (
            "given up while it made steps, and used again",
            lambda day: with_incident(cause="node_unreachable", instances=(), faulted=(B,))(
                replace(
                    day,
                    boundaries=[*day.boundaries, *(passed("early", 1, B, 6 + n, 101.2 + n / 10, 1) for n in range(3))],
                )
            ),
        ),
    ],
    "steady capacity": [
        ("up, down and up", with_orders((190, 3), (195, 4), (200, 3), (205, 4))),
        ("for a job", with_orders((2000, 3), (2001, 4), (2004, 3))),
    ],
    "bit-identical": [
        ("another weight", with_job(result=[RESULT[0], {"tensors": {"w": "2"}}])),
        ("no result", with_job(result=[])),
        ("nothing to compare with", with_job(result=[], undisturbed=[])),
    ],
    "ledgers": [
        ("none is there", with_job(accounted_until=None)),
        ("a second is missing", with_job(accounting_seconds={"train": 1999.0})),
        ("it goes on", with_job(accounted_until=2001.0, accounting_seconds={"train": 2001.0})),
        ("never closed", with_incident(closed_at=None)),
        ("phases", with_incident(phase_seconds=(1.5, 2.0, 2.0, 1.0))),
        ("lost steps", with_incident(lost_steps=0)),
        ("lost steps unsaid", with_incident(lost_steps=None)),
        ("more lost steps than were made", with_incident(lost_steps=3)),
    ],
    "enough": [
        ("one kind less", lambda day: replace(day, strikes=day.strikes[1:])),
        ("no effect", lambda day: replace(day, strikes=[*day.strikes, replace(day.strikes[0], seen="")])),
        ("none in a recovery", with_incident(failed_at=300.0, opened_at=301.5, closed_at=306.0)),
        ("too few", lambda day: replace(day, minutes=3.0)),
        (
            "not in the same second",
            lambda day: replace(day, strikes=[*day.strikes[:-1], replace(day.strikes[-1], at=103.1)]),
        ),
        (
            "of one job only",
            lambda day: replace(day, strikes=[*day.strikes[:-1], replace(day.strikes[-1], targets=(B,))]),
        ),
        ("no server was hit", lambda day: replace(day, has_servers=True)),
        ("nothing was done", lambda day: replace(day, strikes=[], is_temptation=True)),
    ],
    "lost steps": [("four from memory", with_incident(lost_steps=4))],
    "one server": [
        (
            "two in turn",
            lambda day: replace(
                day,
                calls=[
                    *(replace(call, server="first") for call in day.calls),
                    *(
                        Call(at=300.0 + at, action="SetDesiredCapacity", server=server)
                        for at, server in enumerate(("second", "first"))
                    ),
                ],
            ),
        )
    ],
    "caused": [
        ("before any strike", with_incident(opened_at=99.0)),
        (
            "two for one strike",
            lambda day: replace(
                day,
                strikes=[day.strikes[KINDS.index("instances")]],
                incidents=[*day.incidents, replace(day.incidents[0], id="inc-2", opened_at=150.0)],
            ),
        ),
        ("a strike on another job", lambda day: replace(day, strikes=[replace(day.strikes[0], targets=(D,))])),
    ],
    "ettr": [
        (
            "half of the time",
            lambda day: replace(
                with_job(accounting_seconds={"train": 1000.0, "restore": 1000.0})(day), minutes=MEAN_MINUTES
            ),
        )
    ],
    "ended well": [
        ("failed", with_job(status="Failed")),
        ("no nodes", lambda day: replace(day, starts=[start("early"), start("long", node_count=0, committed_step=-1)])),
        ("no step", lambda day: replace(day, starts=[start("early", committed_step=0), start("long")])),
        ("did not wait", lambda day: replace(day, jobs=[day.jobs[0], replace(day.jobs[1], started_at=10.0)])),
    ],
    "orphans": [("an object", lambda day: replace(day, orphans=("a belongs to no run",)))],
    "well-formed calls": [
        ("an unknown filter", lambda day: replace(day, wrong_calls=("DescribeInstanceStatus: no filter instance-id",)))
    ],
}


def test_nothing_is_wrong_with_a_day_on_which_all_was_well() -> None:
    assert judge(well()) == []


def test_every_rule_is_tried() -> None:
    assert WRONG.keys() == RULES.keys()


@pytest.mark.parametrize(
    ("rule", "change"),
    [pytest.param(rule, change, id=f"{rule}: {what}") for rule, some in WRONG.items() for what, change in some],
)
def test_a_rule_finds_what_it_is_for(rule: str, change: Callable[[Day], Day]) -> None:
    assert rule in {violation.rule for violation in judge(change(well()))}


def test_a_day_on_which_a_job_never_began_is_judged_by_what_was_seen() -> None:
    no_nodes = never_begun(start("long", node_count=0, committed_step=-1, status="Pending"))
    assert not has_begun(no_nodes.starts)
    words = RULES["ended well"](no_nodes)
    assert (
        words[0]
        == "long never began: 241 s after it was submitted it had no nodes (Pending, Starting: 2 nodes are to come)"
    )
    assert words[1:] == ["early did not end: it was InProgress", "long did not end: it was InProgress"]
    assert not RULES["enough"](no_nodes)  # no strike was possible, because the day injects none before both jobs train
    assert "long has no ledger" in RULES["ledgers"](no_nodes)
    assert "ended well" in {violation.rule for violation in judge(no_nodes)}
    (words_of_nodes, *_) = RULES["ended well"](never_begun(start("long", committed_step=0)))
    assert "it had 2 nodes and had committed no step" in words_of_nodes


def test_a_second_rank_of_the_same_generation_on_a_node_is_well() -> None:
    day = well()
    more = [passed("early", 1, B, step, 90.2 + step, rank=2) for step in range(1, 6)]
    assert not RULES["one job per node"](replace(day, boundaries=[*day.boundaries, *more]))


def test_a_node_that_falls_silent_may_be_given_up_once_another_rank_was_killed() -> None:
    day = with_incident(cause="node_unreachable", instances=(B,))(well())
    day = replace(
        day, boundaries=[*day.boundaries, *(passed("early", 1, B, 6 + n, 101.2 + n / 10, 1) for n in range(3))]
    )
    killed = Strike(at=101.45, kind="ranks", targets=(A,), did="rank 0 was killed", seen="gone")
    assert RULES["evidence"](day)
    assert not RULES["evidence"](replace(day, strikes=[*day.strikes, killed]))
    assert RULES["evidence"](replace(day, strikes=[*day.strikes, replace(killed, seen="")]))
    # The silent node finished more steps after the kill, so the kill does not explain that training stopped.
    assert RULES["evidence"](replace(day, strikes=[*day.strikes, replace(killed, at=101.15)]))
    # The killed rank belongs to another job, so its end does not explain the silence.
    assert RULES["evidence"](replace(day, strikes=[*day.strikes, replace(killed, targets=(C,))]))


def test_a_node_whose_rank_ended_is_not_given_up_as_silent_with_another_node() -> None:
    day = with_incident(cause="node_unreachable", instances=(A,), faulted=(B, A))(well())
    steps = [passed("early", 1, B, 6 + n, 101.2 + n / 10, 1) for n in range(3)]
    day = replace(day, boundaries=[*day.boundaries, *steps])
    (incident,) = [each for each in day.incidents if B in each.faulted]
    ended, lost = f"rank 1 on {B} ended: error, code 1", f"{A} did not prepare within 6 s and is silent"

    def is_wrong(*evidence: str) -> bool:
        return bool(RULES["evidence"](replace(day, incidents=[replace(incident, evidence=evidence)])))

    assert not is_wrong(ended, lost)
    assert is_wrong(lost)
    assert is_wrong(ended, lost, f"the agent of {B} was silent for 3.1 s")
    assert is_wrong(f"rank 0 on {A} reported that {B} is silent", lost)


def test_a_node_may_train_from_its_last_report_until_its_link_is_cut() -> None:
    day = with_incident(cause="node_unreachable", instances=(B,))(well())
    steps = [passed("early", 1, B, 6 + n, 101.2 + n / 10, 1) for n in range(3)]
    day = replace(day, boundaries=[*day.boundaries, *steps])
    (incident,) = [each for each in day.incidents if B in each.instances]
    cut = Strike(at=101.35, kind="links", targets=(B,), did="its link was cut", seen="packets were dropped")

    def is_wrong(strike: Strike, failed_at: float) -> bool:
        return bool(
            RULES["evidence"](replace(day, strikes=[strike], incidents=[replace(incident, failed_at=failed_at)]))
        )

    assert not is_wrong(cut, 101.0)
    assert is_wrong(replace(cut, seen=""), 101.0)
    assert is_wrong(replace(cut, targets=(C,)), 101.0)
    # Three steps after the cut prove that the node was alive. A cut after the next report was due does not explain why
    # this report is missing.
    assert is_wrong(replace(cut, at=101.15), 101.0)
    assert is_wrong(cut, 100.3)


def test_a_rank_may_end_before_it_has_written_its_last_step_down() -> None:
    told = [with_incident(lost_steps=steps)(well()) for steps in range(4)]
    # The traces show that one step was repeated. A second step may be missing from the traces.
    assert [bool(RULES["ledgers"](day)) for day in told] == [
        True,
        False,
        False,
        True,
    ]


def test_desired_capacity_may_turn_round_once_for_each_node_that_was_taken_out_of_use() -> None:
    assert not RULES["steady capacity"](with_orders((190, 3), (200, 4), (210, 3))(well()))
    # These changes are minutes apart, so they do not count as flapping and need no excuse.
    assert not RULES["steady capacity"](with_orders((1090, 3), (1403, 4), (1610, 3))(well()))
    ended = Call(at=204.0, action="TerminateInstanceInAutoScalingGroup", instance=C, is_decrement=True)
    surplus = Decision(at=199.0, instance=C, words="spare → draining: surplus: the fleet needs 3 nodes")
    assert RULES["steady capacity"](replace(with_orders((190, 3), (200, 4), (210, 3))(well()), decisions=[surplus]))
    # Each turn needs a cause of its own: a node was given up, and returned seconds later.
    held = Decision(at=199.5, instance=C, words="assigned → held: unreachable")
    back = Decision(at=203.0, instance=C, words="held → spare: its agent reports again and has no job")
    turns = replace(with_orders((190, 4), (195, 3), (200, 4), (204, 3))(well()), decisions=[held])
    assert len(RULES["steady capacity"](turns)) == 2
    assert len(RULES["steady capacity"](replace(turns, returned=(back,)))) == 1
    down = replace(well(), decisions=[], calls=[*orders((190, 3), (200, 4)), ended])
    assert RULES["steady capacity"](down)
    assert not RULES["steady capacity"](replace(down, calls=[*orders((190, 3), (200, 4)), replace(ended, status=400)]))


def test_an_interval_may_be_lost_where_only_s3_was_left() -> None:
    assert not RULES["lost steps"](with_incident(lost_steps=50, source="s3")(well()))
    assert RULES["lost steps"](with_incident(lost_steps=51, source="s3")(well()))
    assert not RULES["lost steps"](with_incident(lost_steps=50, source=None)(well()))


def test_two_intervals_may_be_lost_where_the_control_plane_was_away_when_a_checkpoint_was_due() -> None:
    (struck,) = (strike.at for strike in well().strikes if strike.kind == "control plane")
    for failed_at, allowed in ((struck - 1, 50), (struck, 100), (struck + 10, 100), (struck + 20, 50)):
        for lost in (allowed, allowed + 1):
            day = with_incident(lost_steps=lost, source="s3", failed_at=failed_at)(well())
            assert bool(RULES["lost steps"](day)) is (lost > allowed), (failed_at, lost)


def test_the_least_ettr_follows_from_the_strikes() -> None:
    strikes = well().strikes
    cost = sum(COST_SECONDS[strike.kind] for strike in strikes) + 3 * COST_SECONDS["instances"]
    assert expected_ettr(strikes, 1000.0) == pytest.approx(1 - cost / 1000)
    assert expected_ettr(strikes, 1.0) == 0.0


def test_servers_may_take_turns_after_a_strike_and_in_answers_to_requests() -> None:
    def turns(day: Day, action: str) -> Day:
        servers = ("first", "second", "first")
        return replace(day, calls=[Call(at=300.0 + at, action=action, server=name) for at, name in enumerate(servers)])

    day = replace(well(), strikes=[])
    assert RULES["one server"](turns(day, "SetDesiredCapacity"))
    assert not RULES["one server"](turns(day, "PutLifecycleHook"))
    frozen = Strike(at=200.0, kind="freeze", targets=(), did="a server stood still", seen="its process is stopped")
    assert not RULES["one server"](turns(replace(day, strikes=[frozen]), "SetDesiredCapacity"))


def test_a_short_day_beside_other_tests_is_not_judged_by_its_seconds() -> None:
    slow = with_job(accounting_seconds={"train": 1000.0, "restore": 1000.0})(well())
    assert not RULES["ettr"](replace(slow, minutes=MEAN_MINUTES - 1))
    assert RULES["ettr"](replace(slow, minutes=MEAN_MINUTES))


def test_the_last_step_of_a_node_that_was_lost_may_be_known_to_nobody() -> None:
    day = well()
    last = passed("early", 1, A, 7, 98.0)
    of_survivor = passed("early", 1, B, 7, 98.0, rank=1)
    assert not RULES["ledgers"](replace(day, boundaries=[*day.boundaries, last]))
    assert RULES["ledgers"](replace(day, boundaries=[*day.boundaries, of_survivor]))
