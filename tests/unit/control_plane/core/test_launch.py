"""A launch resumes from the newest committed step in the job's record or in any node's report.

Only steps of the newest started generation and of its ancestors count.
"""

from __future__ import annotations

import pytest

from control_plane.accounts.jobs import reason
from control_plane.core import launch
from control_plane.core.observed.jobs import JobObserved, JobRecord
from control_plane.core.observed.nodes import NodeObserved
from control_plane.core.observed.steps import GenerationRecord
from control_plane.core.states import JobState
from everstep.protocol.agent_messages import (
    MemberPhase,
    MemberReport,
    PageCommit,
    RankStatus,
    RoundStatus,
    ShardProtection,
)
from everstep.protocol.ids import Generation, NodeId, Rank, RunId, Step
from tests.properties.control_plane.simulated import spec_of
from tests.unit.worker.rank_plans import rank_plan

SPEC = spec_of("gpt", "a", 4, 2)


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
    return launch.committed_of(SPEC, seen, record)


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
        ((("start", 12.7), ("restore", 1.0)), "preparing Python on i-0 (10 s)"),
        ((("start", 3.0), ("start", 9.9)), "preparing Python on i-0, i-1"),
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
