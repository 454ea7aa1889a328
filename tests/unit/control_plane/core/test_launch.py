"""A launch resumes from the newest committed step in the job's record or in any node's report.

Only steps of the newest started generation and of its ancestors count.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from control_plane.accounts.jobs import reason
from control_plane.core import launch
from control_plane.core.observed.facts import NOTHING
from control_plane.core.observed.incidents import IncidentRecord, RestartsRanks
from control_plane.core.observed.jobs import JobObserved, JobRecord
from control_plane.core.observed.nodes import Cause, NodeObserved
from control_plane.core.observed.specs import Policy
from control_plane.core.observed.steps import GenerationRecord
from control_plane.core.states import IncidentState, JobState
from control_plane.core.timeouts import ladder
from everstep.protocol.agent_messages import (
    ExitClass,
    MemberPhase,
    MemberReport,
    PageCommit,
    RankExit,
    RankStatus,
    RoundStatus,
    ShardProtection,
)
from everstep.protocol.ids import Generation, NodeId, Rank, RunId, Step
from tests.unit.control_plane.core.cluster import spec_of
from tests.unit.worker.rank_plans import rank_plan

SPEC = spec_of("gpt", "a", 4, 2)
NOW = 100.0
POLICY = Policy(timeouts=ladder(3.0))


def link(generation: int, parent: int, base: int, *, started: bool = True) -> GenerationRecord:
    return GenerationRecord(
        generation=Generation(generation),
        parent=Generation(parent),
        base_step=Step(base),
        world_size=SPEC.world_size,
        was_started=started,
    )


LINEAGE = (link(1, 0, 0), link(2, 1, 10), link(3, 2, 12, started=False))
"""Generation 2 resumed from step 10 of generation 1 and is the newest started generation."""


def promised(*commits: tuple[int, int], run: RunId = SPEC.run) -> MemberReport:
    found = tuple(PageCommit(generation=Generation(generation), step=Step(step)) for generation, step in commits)
    return MemberReport(job=SPEC.job, run=run, generation=Generation(4), phase=MemberPhase.PROMISED, commits=found)


def training(generation: int, *, shard: int = -1, rounds: int = -1) -> MemberReport:
    protection = ShardProtection(rank=Rank(0), holders=(), in_view=(), committed=Step(shard), payload_bytes=0)
    status = RoundStatus(committed=Step(rounds), proposed=Step(-1), boundary=Step(0), committed_at_seconds=0.0)
    return MemberReport(
        job=SPEC.job,
        run=SPEC.run,
        generation=Generation(generation),
        phase=MemberPhase.RUNNING,
        protection=(protection,),
        round=status if rounds >= 0 else None,
    )


def committed(recorded: int, *reports: MemberReport) -> int:
    record = JobRecord(state=JobState.PREPARING, reason="", created_at=0.0, state_since=0.0, committed=Step(recorded))
    nodes = {
        NodeId(f"{number}"): NodeObserved(node_id=NodeId(f"{number}"), member=report)
        for number, report in enumerate(reports)
    }
    seen = JobObserved(
        record=record, plan=None, lineage=LINEAGE, checkpoints=(), assigned=(), nodes=nodes, is_admitted=True
    )
    return launch.committed_of(SPEC, seen, record, NOW)


@pytest.mark.parametrize(
    ("recorded", "reports", "expected"),
    [
        (11, (), 11),
        (11, (promised((2, 14)), promised((2, 15))), 15),
        (11, (promised(), promised((2, 13))), 13),
        (16, (promised((2, 14)),), 16),
        (-1, (promised((1, 10)),), 10),
        (11, (promised((1, 14)),), 11),
        (11, (promised((1, 14), (2, 12)),), 12),
        (11, (promised((3, 14)),), 11),
        (11, (promised((2, 14), run=RunId("b" * 32)),), 11),
        (11, (training(2, shard=13),), 13),
        (11, (training(2, rounds=14), training(2, shard=13)), 14),
        (11, (training(1, shard=13),), 11),
    ],
    ids=[
        "no report",
        "the newest page",
        "one node has no page",
        "the record is newer",
        "before the branch",
        "an abandoned branch",
        "pages of two generations",
        "a generation that never ran",
        "another run",
        "a live shard",
        "the coordinator",
        "a late report of an abandoned branch",
    ],
)
def test_the_newest_commit_on_the_path_counts(recorded: int, reports: tuple[MemberReport, ...], expected: int) -> None:
    assert committed(recorded, *reports) == expected


@pytest.mark.parametrize(
    ("phases", "words"),
    [
        ((("start", 12.7), ("restore", 1.0)), "running the script up to everstep.training.init on i-0 (10 s)"),
        ((("start", 3.0), ("start", 9.9)), "running the script up to everstep.training.init on i-0, i-1"),
        ((("restore", 31.0), ("first_step", 40.0)), "restoring the state on i-0 (30 s)"),
        ((("train", 1.0), ("first_step", 1.0)), "making the first step on i-1"),
        ((("train", 1.0), ("train", 70.0)), ""),
        ((), ""),
    ],
)
def test_a_launch_says_what_its_ranks_do_before_their_first_new_step(
    phases: tuple[tuple[str, float], ...], words: str
) -> None:
    plan = rank_plan(addresses=("127.0.0.1", "127.0.0.2"))
    reports = {}
    for rank, (phase, seconds) in enumerate(phases):
        status = RankStatus(
            rank=Rank(rank), boundary=Step(1 if phase == "train" else 0), phase=phase, still_seconds=seconds
        )
        reports[NodeId(f"i-{rank}")] = MemberReport(
            job=plan.job, run=plan.run, generation=plan.generation, phase=MemberPhase.RUNNING, ranks=(status,)
        )
    starting = launch.starting(plan, reports)
    assert ("" if starting is None else reason(starting)) == words


def test_a_generation_number_that_was_never_issued_is_ignored() -> None:
    """No number above the Unix time is issued. One agent that reports a higher one uses up no numbers."""
    now = 1_800_000_000.0
    nodes = {
        NodeId(f"i-{number}"): NodeObserved(node_id=NodeId(f"i-{number}"), member=training(number))
        for number in (3, 2**32 - 1)
    }
    record = JobRecord(state=JobState.RUNNING, reason="", created_at=0.0, state_since=0.0)
    seen = JobObserved(record=record, nodes=nodes, plan=None, lineage=(), checkpoints=(), assigned=())
    assert launch.highest_seen(seen, SPEC.run, now) == 3
    limit = 3 - launch.CLOCK_ERROR_SECONDS
    assert [launch.highest_seen(seen, SPEC.run, at) for at in (limit, limit - 1)] == [3, 0]
    assert launch.highest_seen(seen, RunId("b" * 32), now) == 0


def test_the_highest_generation_of_all_reports_counts() -> None:
    nodes = {NodeId(f"{number}"): NodeObserved(node_id=NodeId("i"), member=training(number)) for number in (3, 5, 4)}
    record = JobRecord(state=JobState.RUNNING, reason="", created_at=0.0, state_since=0.0)
    seen = JobObserved(record=record, nodes=nodes, plan=None, lineage=(), checkpoints=(), assigned=())
    assert launch.highest_seen(seen, SPEC.run, 100.0) == 5


def ready(**changes: Any) -> tuple[JobObserved, JobRecord]:
    """Return a job that has never run, and whose four nodes have promised to join generation 4."""
    names = [NodeId(f"i-{number}") for number in range(4)]
    record = JobRecord(
        **{
            "state": JobState.PREPARING,
            "created_at": 0.0,
            "state_since": 0.0,
            "issued_generation": Generation(4),
            **changes,
        }
    )
    nodes = {name: NodeObserved(node_id=name, is_connected=True, member=promised()) for name in names}
    return (
        JobObserved(record=record, plan=None, lineage=(), checkpoints=(), assigned=tuple(names), nodes=nodes),
        record,
    )


@pytest.mark.parametrize(
    ("spec", "record", "expected"),
    [
        pytest.param({}, {}, (0.0, 0.0, 0.0, 0.0, 0.0), id="nothing set"),
        pytest.param({"checkpoint_interval_seconds": 60}, {}, (60, 0.0, 0.0, 0.0, 0.0), id="interval"),
        pytest.param({"checkpoint_max_overhead": 0.01}, {}, (0.0, 0.01, 0.0, 0.0, 0.0), id="overhead"),
        pytest.param({"checkpoint_max_bytes_per_second": 7}, {}, (0.0, 0.0, 7, 0.0, 0.0), id="rate"),
        pytest.param({}, {"started_at": 50.0}, (0.0, 0.0, 0.0, 50.0, 0.0), id="started before"),
        pytest.param({}, {"upload_seconds": 9.0}, (0.0, 0.0, 0.0, 0.0, 9.0), id="uploaded before"),
    ],
)
def test_a_plan_has_the_settings_of_checkpoints_and_0_for_those_that_are_not_set(
    spec: dict[str, Any], record: dict[str, Any], expected: tuple[float, ...]
) -> None:
    seen, known = ready(**record)
    roll = launch.call_roll(SPEC, seen, known, POLICY)
    assert (roll.is_complete, roll.vacancy_count) == (True, 0)
    plan, _ = launch.make_plan(replace(SPEC, **spec), seen, known, roll, POLICY, NOW)
    made = plan.checkpoint
    assert (
        made.interval_seconds,
        made.max_overhead,
        made.max_bytes_per_second,
        made.stored_at_seconds,
        made.upload_seconds,
    ) == expected
    assert (made.stored_step, plan.base_step, plan.parent, plan.is_elastic) == (0, 0, 0, False)


@pytest.mark.parametrize(("least", "most", "is_elastic"), [(4, 4, False), (3, 4, True), (4, 5, True)])
def test_a_plan_of_a_job_with_several_sizes_is_elastic(least: int, most: int, is_elastic: bool) -> None:
    seen, known = ready()
    spec = replace(SPEC, min_node_count=least, max_node_count=most)
    plan, _ = launch.make_plan(spec, seen, known, launch.call_roll(SPEC, seen, known, POLICY), POLICY, NOW)
    assert plan.is_elastic is is_elastic


def test_the_port_of_a_launch_follows_from_its_run_and_generation() -> None:
    ports = []
    for run, generation in (("0" * 32, 0), ("0" * 32, 1), ("0" * 6 + "10" + "0" * 24, 0), ("0" * 8 + "1" * 24, 0)):
        seen, known = ready(issued_generation=Generation(generation))
        nodes = {
            name: replace(each, member=structs.replace(promised(run=RunId(run)), generation=Generation(generation)))
            for name, each in seen.nodes.items()
        }
        seen, spec = replace(seen, nodes=nodes), replace(SPEC, run=RunId(run))
        plan, _ = launch.make_plan(spec, seen, known, launch.call_roll(spec, seen, known, POLICY), POLICY, NOW)
        ports.append(plan.master_port)
    first = launch.MASTER_PORTS[0]
    assert ports == [first, first + 1, first + 16, first]


@pytest.mark.parametrize(
    ("cause", "coordinator"),
    [
        (None, "i-0"),
        (Cause.RANK_EXIT, "i-0"),
        (Cause.AGENT_LOST, "i-1"),
        (Cause.NODE_UNREACHABLE, "i-1"),
    ],
)
def test_a_coordinator_whose_agent_was_lost_is_not_chosen_again(cause: Cause | None, coordinator: str) -> None:
    seen, known = ready()
    if cause is not None:
        incident = IncidentRecord(
            id="inc-1",
            state=IncidentState.REPLACING,
            cause=cause,
            evidence=(NOTHING,),
            decision=RestartsRanks(),
            generation_before=Generation(1),
            failed_at=1.0,
            opened_at=2.0,
            reached_step=Step(7),
        )
        known = replace(known, incident=incident)
    roll = launch.call_roll(SPEC, seen, known, POLICY)
    first, _ = launch.make_plan(SPEC, seen, known, roll, POLICY, NOW)
    assert first.coordinator == "i-0", "there was none before"
    again, _ = launch.make_plan(SPEC, replace(seen, plan=first), known, roll, POLICY, NOW)
    assert again.coordinator == coordinator
    alone = spec_of("gpt", "a", 1, 1)
    few = replace(seen, plan=first, assigned=seen.assigned[:1])
    only, _ = launch.make_plan(alone, few, known, launch.call_roll(alone, few, known, POLICY), POLICY, NOW)
    assert only.coordinator == "i-0", "it has no other member"


@pytest.mark.parametrize(("count", "named", "others"), [(2, 2, 0), (3, 3, 0), (5, 3, 2)])
def test_a_launch_names_at_most_three_nodes_and_counts_the_others(count: int, named: int, others: int) -> None:
    plan = rank_plan(addresses=("127.0.0.1",) * count)
    reports = {
        node.node_id: MemberReport(
            job=plan.job,
            run=plan.run,
            generation=plan.generation,
            phase=MemberPhase.RUNNING,
            ranks=(RankStatus(rank=rank, boundary=Step(0), phase="start", still_seconds=10.0 * rank),),
        )
        for node in plan.nodes
        for rank in node.ranks
    }
    starting = launch.starting(plan, reports)
    assert starting is not None
    assert (len(starting.node_ids), starting.other_count, starting.seconds) == (named, others, 10 * (count - 1))


def test_a_roll_is_complete_once_every_place_has_promised() -> None:
    names = NodeId("i-0"), NodeId("i-1")
    roll = launch.Roll(places=names, promised={names[0]: promised()}, late=(names[1],), unreachable=())
    assert not roll.is_complete
    assert replace(roll, promised={name: promised() for name in names}).is_complete
    assert not replace(roll, places=(names[0], None)).is_complete


@pytest.mark.parametrize(("silent", "count"), [(0, 4), (1, 3), (2, 3)])
def test_a_job_grows_by_the_nodes_whose_agents_report(silent: int, count: int) -> None:
    seen, known = ready()
    nodes = {
        name: replace(each, silent_seconds=1e6 if place < silent else 0.0)
        for place, (name, each) in enumerate(seen.nodes.items())
    }
    spec = replace(SPEC, node_count=3, max_node_count=4)
    assert len(launch.call_roll(spec, replace(seen, nodes=nodes), known, POLICY).places) == count


@pytest.mark.parametrize(("recorded", "floor"), [(-1, 10), (9, 10), (11, 11)])
def test_no_step_before_the_newest_restore_is_lost(recorded: int, floor: int) -> None:
    seen, known = ready(committed=Step(recorded))
    assert launch.floor_of(SPEC, replace(seen, lineage=LINEAGE), known, NOW) == floor
    assert launch.floor_of(SPEC, seen, known, NOW) == 0, "no generation has started"


def test_copies_are_in_different_domains_and_rank_0_is_on_the_first_node() -> None:
    seen, known = ready()
    nodes = {
        name: replace(each, domain="ab"[place // 2], address=f"10.0.0.{place}")
        for place, (name, each) in enumerate(seen.nodes.items())
    }
    seen = replace(seen, nodes=nodes)
    plan, _ = launch.make_plan(SPEC, seen, known, launch.call_roll(SPEC, seen, known, POLICY), POLICY, NOW)
    assert all(nodes[rank.holders[0]].domain != nodes[rank.holders[1]].domain for rank in plan.ranks)
    assert plan.master_address == nodes[plan.nodes[0].node_id].address


def test_a_rank_that_has_ended_is_not_starting() -> None:
    plan = rank_plan()
    ended = RankExit(exit_class=ExitClass.ERROR, code=1, at_seconds=1.0, boundary=Step(0))
    status = RankStatus(rank=Rank(0), boundary=Step(0), phase="start", exit=ended)
    report = MemberReport(
        job=plan.job, run=plan.run, generation=plan.generation, phase=MemberPhase.EXITED, ranks=(status,)
    )
    assert launch.starting(plan, {NodeId("i-0"): report}) is None
