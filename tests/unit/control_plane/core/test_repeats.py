"""Tests how much training a job would repeat, and whether a person must consent to it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from control_plane.core import repeats
from control_plane.core.observed.facts import NOTHING
from control_plane.core.observed.jobs import Exclusion, JobObserved, JobRecord
from control_plane.core.observed.nodes import InstanceCondition, NodeObserved
from control_plane.core.observed.spans import Bucket
from control_plane.core.observed.specs import OnTotalLoss, Policy
from control_plane.core.observed.steps import (
    CheckpointRecord,
    GenerationRecord,
    HolderState,
    LostHolder,
    RepeatedWork,
    StoreListing,
    initial_generation,
)
from control_plane.core.states import JobState
from control_plane.core.timeouts import ladder
from everstep.protocol.agent_messages import Obstacle
from everstep.protocol.ids import FIRST_STEP, NO_STEP, Generation, NodeId, Step
from tests.unit.control_plane.core.cluster import spec_of
from tests.unit.worker.rank_plans import RUN, rank_plan

NOW = 10_000.0
POLICY = Policy(timeouts=ladder(3.0))
SPEC = replace(spec_of("job", "ab", 2, 2), run=RUN, max_repeated_minutes=3)
FIRST = GenerationRecord(
    generation=Generation(1), parent=Generation(0), base_step=FIRST_STEP, world_size=2, was_started=True
)


def minutes(count: float) -> dict[str, int]:
    return {Bucket.TRAIN.value: round(count * 60_000_000)}


def seen_of(record: dict[str, Any], **changes: Any) -> JobObserved:
    """Return a job that has committed step 9, and whose two nodes are lost."""
    values = {"state": JobState.PREPARING, "created_at": 9_000.0, "state_since": NOW, "committed": Step(9), **record}
    seen: dict[str, Any] = {
        "plan": rank_plan(addresses=("a", "b")),
        "lineage": (FIRST,),
        "checkpoints": (),
        "assigned": (),
        "nodes": {},
        **changes,
    }
    return JobObserved(record=JobRecord(generation=Generation(1), **values), **seen)


def choice(seen: JobObserved, base: int = 0, **spec: Any) -> RepeatedWork | None:
    return repeats.choice(replace(SPEC, **spec), seen, seen.record, Step(base), policy=POLICY, now=NOW)


@pytest.mark.parametrize(
    ("record", "base", "is_asked"),
    [
        pytest.param({"started_at": NOW - 180}, 0, False, id="180 s since the start without a ledger"),
        pytest.param({"started_at": NOW - 181}, 0, True, id="181 s since the start"),
        pytest.param({"created_at": NOW - 180}, 0, False, id="180 s since the creation of a job that never started"),
        pytest.param({"created_at": NOW - 181}, 0, True, id="181 s since the creation"),
        pytest.param({"microseconds": minutes(3)}, 0, False, id="3 minutes of training"),
        pytest.param({"microseconds": minutes(3.1)}, 0, True, id="more than 3 minutes"),
        pytest.param({"microseconds": minutes(100)}, 8, True, id="the last step of a long training"),
        pytest.param({"started_at": NOW - 181}, 9, False, id="nothing is repeated"),
        pytest.param({"accepted_step": Step(4), "accepted_after": Generation(1)}, 4, False, id="accepted"),
        pytest.param({"accepted_step": Step(4), "accepted_after": Generation(1)}, 3, True, id="older than accepted"),
        pytest.param({"accepted_step": Step(4), "accepted_after": Generation(0)}, 4, True, id="an earlier consent"),
        pytest.param({"accepted_step": Step(0), "accepted_after": Generation(1)}, 0, False, id="the first step"),
        pytest.param({"accepted_step": NO_STEP, "accepted_after": Generation(1)}, 0, True, id="no consent"),
    ],
)
def test_a_person_decides_only_about_more_repeated_training_than_the_limit(
    record: dict[str, Any], base: int, is_asked: bool
) -> None:
    seen = seen_of(record)
    assert (choice(seen, base) is not None) is is_asked
    assert choice(seen, base, on_total_loss=OnTotalLoss.RESTART) is None


@pytest.mark.parametrize(
    ("record", "lineage", "seconds"),
    [
        pytest.param({}, (FIRST,), None, id="no ledger"),
        pytest.param({"microseconds": minutes(9)}, (FIRST,), 360.0, id="6 of 9 steps"),
        pytest.param({"microseconds": minutes(9), "max_boundary": Step(12)}, (FIRST,), 270.0, id="6 of 12 steps"),
        pytest.param(
            {"microseconds": minutes(9)},
            (initial_generation(2), replace(FIRST, base_step=Step(3))),
            540.0,
            id="from the checkpoint of step 3 of another job",
        ),
        pytest.param({"microseconds": minutes(9)}, (FIRST, replace(FIRST, base_step=Step(8))), 360.0, id="restarted"),
        pytest.param({"microseconds": minutes(9)}, (replace(FIRST, base_step=Step(9)),), None, id="no step yet"),
        pytest.param(
            {"microseconds": dict.fromkeys((Bucket.TRAIN, Bucket.SHORTAGE, Bucket.STALL, Bucket.REWORK), 9_000_000)},
            (FIRST,),
            18.0,
            id="slow steps count and repeated ones do not",
        ),
    ],
)
def test_the_repeated_time_is_the_share_of_the_training_time(
    record: dict[str, Any], lineage: tuple[GenerationRecord, ...], seconds: float | None
) -> None:
    seen = seen_of(record, lineage=lineage)
    assert repeats.repeated_seconds(seen, seen.record, Step(9), Step(3)) == seconds


def test_the_first_half_second_of_a_first_step_is_repeated() -> None:
    seen = seen_of({"microseconds": {Bucket.TRAIN.value: 500_000}})
    assert repeats.repeated_seconds(seen, seen.record, Step(1), FIRST_STEP) == 0.5


def checkpoint(step: int, *, is_wrong: bool = False) -> CheckpointRecord:
    return CheckpointRecord(generation=Generation(1), step=Step(step), bucket="b", shards=(), is_wrong=is_wrong)


def test_a_choice_tells_which_checkpoints_are_left() -> None:
    listing = StoreListing(steps=(Step(4),))
    stored = [checkpoint(step, is_wrong=step in (2, 4, 6, 8)) for step in (2, 3, 4, 6, 8, 6)]
    found = choice(seen_of({"microseconds": minutes(100)}, checkpoints=tuple(stored), listing=listing), base=4)
    assert found is not None
    assert (found.base_step, found.newest_step, found.after, found.is_stored) == (4, 9, 1, True)
    assert (found.wrong_steps, found.listing) == ((6, 8), listing)
    other = choice(seen_of({"microseconds": minutes(100)}, checkpoints=tuple(stored)), base=5)
    assert other is not None
    assert not other.is_stored


@pytest.mark.parametrize(
    ("changes", "since"),
    [
        pytest.param({}, 9_900.0, id="the same choice"),
        pytest.param({"base_step": Step(3)}, NOW, id="another step"),
        pytest.param({"after": Generation(2)}, NOW, id="another recovery"),
    ],
)
def test_a_job_waits_since_it_first_asked_for_the_same_choice(changes: dict[str, Any], since: float) -> None:
    before = RepeatedWork(base_step=Step(4), newest_step=Step(9), after=Generation(1), seconds=1.0, since=9_900.0)
    found = choice(seen_of({"microseconds": minutes(100), "repeat": replace(before, **changes)}), base=4)
    assert found is not None
    assert found.since == since


@pytest.mark.parametrize(
    ("node", "is_assigned", "is_excluded", "state"),
    [
        pytest.param({"instance": InstanceCondition.ENDED}, True, True, HolderState.ENDED, id="ended"),
        pytest.param({}, True, True, HolderState.LEFT, id="given up"),
        pytest.param({}, False, False, HolderState.LEFT, id="no longer assigned"),
        pytest.param({"silent_seconds": 1e6}, True, False, HolderState.SILENT, id="silent"),
        pytest.param(None, True, False, HolderState.SILENT, id="unknown"),
        pytest.param({}, True, False, HolderState.EMPTY, id="without the step"),
    ],
)
def test_a_choice_tells_why_no_node_has_the_newest_step(
    node: dict[str, Any] | None, is_assigned: bool, is_excluded: bool, state: HolderState
) -> None:
    lost = NodeId("i-0")
    exclusion = Exclusion(node_id=lost, evidence=NOTHING, may_terminate=False)
    seen = seen_of(
        {"microseconds": minutes(100), "exclusions": (exclusion,) if is_excluded else ()},
        assigned=(lost,) if is_assigned else (),
        nodes={} if node is None else {lost: NodeObserved(node_id=lost, **node)},
    )
    found = choice(seen)
    assert found is not None
    assert [(each.node_id, each.state) for each in found.holders] == [(lost, state), ("i-1", HolderState.LEFT)]


ENDED, LEFT = (LostHolder(node_id=NodeId(each.value), state=each) for each in (HolderState.ENDED, HolderState.LEFT))


@pytest.mark.parametrize(
    ("base", "holders", "listing", "is_total"),
    [
        pytest.param(0, (ENDED, ENDED), StoreListing(), True, id="every node ended and S3 is empty"),
        pytest.param(1, (ENDED, ENDED), StoreListing(), False, id="a step is left"),
        pytest.param(0, (ENDED, LEFT), StoreListing(), False, id="one node may live"),
        pytest.param(0, (), StoreListing(), False, id="no node is known"),
        pytest.param(0, (ENDED,), StoreListing(steps=(Step(4),)), False, id="S3 lists a step"),
        pytest.param(0, (ENDED,), StoreListing(obstacle=Obstacle.DENIED), False, id="S3 was not listed"),
        pytest.param(0, (ENDED,), None, False, id="S3 was not asked yet"),
    ],
)
def test_a_loss_is_total_only_if_aws_and_s3_both_say_so(
    base: int, holders: tuple[LostHolder, ...], listing: StoreListing | None, is_total: bool
) -> None:
    found = RepeatedWork(
        base_step=Step(base),
        newest_step=Step(9),
        after=Generation(1),
        seconds=None,
        since=NOW,
        holders=holders,
        listing=listing,
    )
    assert found.is_total is is_total


def test_s3_may_list_newer_steps_that_are_not_known_as_damaged() -> None:
    found = RepeatedWork(
        base_step=Step(4), newest_step=Step(9), after=Generation(1), seconds=None, since=NOW, wrong_steps=(Step(6),)
    )
    assert found.unknown_steps == ()
    listed = replace(found, listing=StoreListing(steps=tuple(map(Step, (3, 4, 6, 8)))))
    assert listed.unknown_steps == (8,)
