"""Tests when a running job no longer keeps its steps, and which commit it awaits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from control_plane.core import protection
from control_plane.core.observed.jobs import AwaitedCommit, JobRecord
from control_plane.core.observed.steps import CheckpointUpload, Lapse
from control_plane.core.states import JobState
from control_plane.core.timeouts import ladder
from everstep.protocol.agent_messages import MemberPhase, MemberReport, RunningUpload, ShardProtection
from everstep.protocol.ids import FIRST_STEP, NO_STEP, Generation, NodeId, Rank, Step
from everstep.protocol.limits import MAX_STEP
from everstep.protocol.rank_messages import UnkeptCause
from tests.unit.worker.rank_plans import RUN, rank_plan

NOW, PASSED_AT, GENERATION = 10_000.0, 9_000.0, Generation(2)
TIMEOUTS = ladder(3.0)
LIMIT = TIMEOUTS.exclude_seconds
AWAITED = AwaitedCommit(generation=GENERATION, kept=Step(5), step=Step(6), passed_at=PASSED_AT)
LAPSE = Lapse(cause=UnkeptCause.UNCONFIRMED, generation=GENERATION, kept=Step(5), since=8_000.0)
UPLOAD = CheckpointUpload(
    generation=GENERATION,
    step=Step(5),
    stored_bytes=1,
    total_bytes=2,
    slowest=RunningUpload(rank=Rank(0), step=Step(5), object_name="", stored_bytes=1, object_bytes=2),
)


def record(**changes: Any) -> JobRecord:
    """Return the record of a job that keeps step 5, and whose ranks passed the proposed step 6 long ago."""
    values = {
        "state": JobState.RUNNING,
        "created_at": 0.0,
        "state_since": 0.0,
        "stepped_at": 7_000.0,
        "generation": GENERATION,
        "committed": Step(5),
        "committed_at": 8_000.0,
        "proposed": Step(6),
        "boundary": Step(9),
        "awaited": AWAITED,
        **changes,
    }
    return JobRecord(**values)


def shard(rank: int, cause: UnkeptCause | None, *, lasts: bool, committed: int = 5) -> ShardProtection:
    return ShardProtection(
        rank=Rank(rank),
        holders=(),
        in_view=(),
        committed=Step(committed),
        payload_bytes=1,
        reason=f"of rank {rank}",
        unkept=cause,
        lasts=lasts,
    )


def watched(
    before: JobRecord, *shards: ShardProtection, now: float = NOW, silent: tuple[str, ...] = (), is_looking: bool = True
) -> JobRecord:
    told = {
        NodeId(f"i-{each.rank}"): MemberReport(
            job=rank_plan().job, run=RUN, generation=GENERATION, phase=MemberPhase.RUNNING, protection=(each,)
        )
        for each in shards
    }
    return protection.with_watch(
        now,
        before,
        told,
        silent=frozenset(NodeId(each) for each in silent),
        is_looking=is_looking,
        timeouts=TIMEOUTS,
    )


@pytest.mark.parametrize(
    ("changes", "seconds", "has_lapsed"),
    [
        pytest.param({}, LIMIT, False, id="at the limit"),
        pytest.param({}, LIMIT + 1, True, id="after the limit"),
        pytest.param({"boundary": Step(8)}, LIMIT + 1, False, id="two steps after the overdue one"),
        pytest.param({"commit_seconds": LIMIT}, 3 * LIMIT, False, id="three times a long commit"),
        pytest.param({"commit_seconds": LIMIT}, 3 * LIMIT + 1, True, id="more than three times a long commit"),
        pytest.param({"uploading": UPLOAD}, 10 * LIMIT, False, id="ten times the limit during an upload"),
        pytest.param({"uploading": UPLOAD}, 10 * LIMIT + 1, True, id="more than ten times during an upload"),
        pytest.param({"unwatched": (0.0, PASSED_AT + 10)}, LIMIT + 10, False, id="the unwatched time does not count"),
        pytest.param({"unwatched": (0.0, PASSED_AT + 10)}, LIMIT + 11, True, id="the watched time is over the limit"),
        pytest.param({"unwatched": (0.0, PASSED_AT - 10)}, LIMIT + 1, True, id="unwatched before the step"),
        pytest.param({"awaited": replace(AWAITED, passed_at=None, step=Step(10))}, 1e6, False, id="not yet passed"),
        pytest.param({"lapse": replace(LAPSE, generation=Generation(1))}, LIMIT, False, id="of another generation"),
        pytest.param({"lapse": replace(LAPSE, kept=Step(4))}, LIMIT, False, id="ended by a commit"),
    ],
)
def test_a_commit_is_overdue_only_after_its_limit(changes: dict[str, Any], seconds: float, has_lapsed: bool) -> None:
    found = watched(record(**changes), now=PASSED_AT + seconds)
    assert (found.lapse is not None) is has_lapsed
    assert watched(record(**changes), now=PASSED_AT + seconds, is_looking=False).lapse is None


@pytest.mark.parametrize(
    ("changes", "awaited"),
    [
        pytest.param({}, AwaitedCommit(generation=GENERATION, kept=Step(5), step=Step(6), passed_at=NOW), id="passed"),
        pytest.param(
            {"proposed": Step(9)},
            AwaitedCommit(generation=GENERATION, kept=Step(5), step=Step(9), passed_at=NOW),
            id="passed at its boundary",
        ),
        pytest.param(
            {"proposed": Step(10)},
            AwaitedCommit(generation=GENERATION, kept=Step(5), step=Step(10)),
            id="not yet passed",
        ),
        pytest.param(
            {"proposed": Step(5)},
            AwaitedCommit(generation=GENERATION, kept=Step(5), step=Step(10)),
            id="without a proposal the next step of training",
        ),
        pytest.param({"proposed": Step(5), "boundary": Step(4)}, None, id="training has not reached the kept step"),
        pytest.param(
            {"proposed": Step(5), "boundary": Step(5)},
            AwaitedCommit(generation=GENERATION, kept=Step(5), step=Step(6)),
            id="training has just reached the kept step",
        ),
        pytest.param(
            {"committed": NO_STEP, "base_step": Step(4)},
            AwaitedCommit(generation=GENERATION, kept=Step(4), step=Step(6), passed_at=NOW),
            id="the base is kept",
        ),
        pytest.param({"proposed": Step(5), "boundary": Step(MAX_STEP)}, None, id="no step can follow the largest"),
    ],
)
def test_a_job_awaits_the_first_step_that_it_does_not_keep(
    changes: dict[str, Any], awaited: AwaitedCommit | None
) -> None:
    assert watched(record(**{"awaited": None, **changes})).awaited == awaited


@pytest.mark.parametrize(
    ("awaited", "seconds"),
    [
        pytest.param(replace(AWAITED, kept=Step(4), step=Step(5)), NOW - PASSED_AT, id="a commit"),
        pytest.param(replace(AWAITED, kept=Step(4), passed_at=None), 7.0, id="committed before a report of its end"),
        pytest.param(replace(AWAITED, generation=Generation(1), kept=Step(4)), 7.0, id="another generation"),
        pytest.param(AWAITED, 7.0, id="no commit"),
    ],
)
def test_the_time_of_a_commit_counts_from_the_end_of_its_step(awaited: AwaitedCommit, seconds: float) -> None:
    assert watched(record(awaited=awaited, commit_seconds=7.0)).commit_seconds == seconds


LASTING, PASSING = UnkeptCause.STATE, UnkeptCause.LATE


@pytest.mark.parametrize(
    ("shards", "seconds", "found"),
    [
        pytest.param((shard(0, PASSING, lasts=False),), 0.0, None, id="a passing cause waits for the limit"),
        pytest.param((shard(0, LASTING, lasts=True),), 0.0, (LASTING, 0), id="a lasting cause at once"),
        pytest.param((shard(0, LASTING, lasts=True, committed=4),), 0.0, None, id="of the time before the last commit"),
        pytest.param(
            (shard(0, LASTING, lasts=True, committed=4),), LIMIT + 1, (UnkeptCause.UNCONFIRMED, None), id="an old cause"
        ),
        pytest.param(
            (shard(1, PASSING, lasts=False), shard(0, None, lasts=False)), LIMIT + 1, (PASSING, 1), id="the overdue one"
        ),
        pytest.param(
            (shard(1, LASTING, lasts=True), shard(0, PASSING, lasts=False)),
            LIMIT + 1,
            (LASTING, 1),
            id="the lasting one",
        ),
        pytest.param(
            (shard(1, LASTING, lasts=True), shard(0, LASTING, lasts=True)), 0.0, (LASTING, 0), id="the lowest rank"
        ),
        pytest.param((), LIMIT + 1, (UnkeptCause.SILENT_AGENT, None), id="a silent agent without another cause"),
    ],
)
def test_a_lapse_names_its_cause_and_the_lowest_rank_that_reports_it(
    shards: tuple[ShardProtection, ...], seconds: float, found: tuple[UnkeptCause, int | None] | None
) -> None:
    silent = () if shards else ("i-8", "i-7")
    lapse = watched(record(), *shards, now=PASSED_AT + seconds, silent=silent).lapse
    assert (None if lapse is None else (lapse.cause, lapse.rank)) == found
    if lapse is not None:
        assert lapse.detail == ("" if lapse.rank is None else f"of rank {lapse.rank}")
        expected = "i-7" if silent else None if lapse.rank is None else f"i-{lapse.rank}"
        assert (lapse.node_id, lapse.kept, lapse.generation) == (expected, 5, GENERATION)


@pytest.mark.parametrize(
    ("changes", "since"),
    [
        pytest.param({}, 8_000.0, id="the newest commit"),
        pytest.param({"base_step": Step(5)}, 7_000.0, id="the first step, without a commit of this generation"),
        pytest.param({"committed_at": None}, PASSED_AT + LIMIT + 1, id="an unknown time"),
    ],
)
def test_a_lapse_begins_with_the_step_that_the_job_still_keeps(changes: dict[str, Any], since: float) -> None:
    lapse = watched(record(**changes), now=PASSED_AT + LIMIT + 1).lapse
    assert lapse is not None
    assert lapse.since == since


@pytest.mark.parametrize(("committed", "base"), [(NO_STEP, FIRST_STEP), (Step(5), Step(5))])
def test_a_cause_counts_before_the_first_commit_of_a_generation(committed: Step, base: Step) -> None:
    begun = record(committed=committed, base_step=base, awaited=None)
    lapse = watched(begun, shard(0, LASTING, lasts=True, committed=-1)).lapse
    assert lapse is not None
    assert (lapse.cause, lapse.kept) == (LASTING, base)


def test_a_lapse_stays_as_it_began_until_the_next_commit() -> None:
    lapsed = record(lapse=LAPSE)
    assert watched(lapsed, shard(0, LASTING, lasts=True)).lapse == LAPSE
    assert watched(replace(lapsed, committed=Step(6))).lapse is None
    assert watched(replace(lapsed, generation=Generation(3))).lapse is None


def test_the_begin_and_the_end_of_a_lapse_are_events() -> None:
    kept, lapsed = record(), record(lapse=replace(LAPSE, node_id=NodeId("i-1")))
    assert protection.events(kept, kept) == protection.events(lapsed, lapsed) == ()
    (lost,), (restored,) = protection.events(kept, lapsed), protection.events(lapsed, kept)
    assert (lost.type, lost.node_id) == ("ProtectionLost", "i-1")
    assert lost.detail == {
        "cause": UnkeptCause.UNCONFIRMED,
        "generation": 2,
        "kept": 5,
        "since": 8_000.0,
        "node_id": "i-1",
        "detail": "",
    }
    assert restored.type == "ProtectionRestored"
