"""The control plane decides with how many nodes an elastic job continues, and when a running job grows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from control_plane.accounts import jobs as accounts
from control_plane.core import elastic, members
from control_plane.core.observed.incidents import IncidentRecord, RestartsRanks
from control_plane.core.observed.jobs import Growth, JobRecord, Suspicion
from control_plane.core.observed.nodes import Cause
from control_plane.core.states import IncidentState, JobState
from control_plane.core.timeouts import ladder
from everstep.protocol.agent_messages import MemberPhase, MemberReport, ShardProtection
from everstep.protocol.ids import Generation, NodeId, Rank, Step
from tests.unit.control_plane.core.cluster import spec_of
from tests.unit.worker.rank_plans import rank_plan

TIMEOUTS = ladder(3.0)
SPEC = replace(spec_of("gpt", "a", 4, 2), min_node_count=2, patience_seconds=20)
NOW = 1000.0


def record(**changes: object) -> JobRecord:
    values = {"state": JobState.RUNNING, "reason": "", "created_at": 0.0, "state_since": 0.0, **changes}
    return JobRecord(**values)  # type: ignore[arg-type]


def nodes(*names: str) -> tuple[NodeId, ...]:
    return tuple(NodeId(name) for name in names)


@pytest.mark.parametrize(
    ("sizes", "available", "count"),
    [
        ({}, 2, 4),
        ({"member_count": 3}, 2, 3),
        ({"member_count": 3}, 4, 4),
        ({"member_count": 3}, 9, 4),
        ({"member_count": 4, "reduced_count": 3}, 3, 3),
        ({"member_count": 4, "reduced_count": 3}, 4, 4),
    ],
)
def test_a_generation_has_the_nodes_that_it_needs_or_all_that_are_there(
    sizes: dict[str, int], available: int, count: int
) -> None:
    assert elastic.next_count(SPEC, record(**sizes), available_count=available, reporting_count=available) == count


@pytest.mark.parametrize(("available", "heard", "count"), [(6, 6, 6), (6, 5, 6), (5, 5, 5), (4, 4, 4), (2, 2, 4)])
def test_members_beyond_a_lowered_maximum_take_part(available: int, heard: int, count: int) -> None:
    """After a user has lowered a job's maximum, the next generation still has all nodes that are available.

    The job has six nodes and a maximum of four. The nodes beyond the maximum may hold the only copies of a shard.
    """
    found = elastic.next_count(SPEC, record(member_count=6), available_count=available, reporting_count=heard)
    assert found == count


def test_a_job_with_one_size_always_waits_for_all_nodes() -> None:
    fixed = replace(SPEC, min_node_count=None)
    for available in range(6):
        assert (
            elastic.next_count(fixed, record(member_count=4), available_count=available, reporting_count=available) == 4
        )
    assert (
        elastic.reduced_count(fixed, promised_count=3, waited_seconds=9e9, has_spare=False, timeouts=TIMEOUTS) is None
    )


@pytest.mark.parametrize(
    ("promised", "waited", "has_spare", "count"),
    [
        (3, 19.9, False, None),
        (3, 20.0, False, 3),
        (2, 20.0, False, 2),
        (1, 9e9, False, None),
        (3, 20.0, True, None),
        (3, 20.0 + TIMEOUTS.prepare_deadline_seconds, True, 3),
    ],
)
def test_a_waiting_job_continues_with_fewer_nodes_after_its_patience(
    promised: int, waited: float, has_spare: bool, count: int | None
) -> None:
    found = elastic.reduced_count(
        SPEC, promised_count=promised, waited_seconds=waited, has_spare=has_spare, timeouts=TIMEOUTS
    )
    assert found == count


def test_ready_nodes_count_from_the_last_change_of_their_set() -> None:
    first = elastic.followed(None, nodes("b", "a"), 1.0)
    assert first == Growth(node_ids=nodes("a", "b"), since=1.0)
    assert elastic.followed(first, nodes("a", "b"), 2.0) == first
    assert elastic.followed(first, nodes("b"), 3.0) == Growth(node_ids=nodes("b"), since=3.0)
    assert elastic.followed(first, (), 3.0) is None


def test_a_requested_stop_is_never_withdrawn() -> None:
    asked = Growth(node_ids=nodes("a"), since=1.0, asked_at=2.0)
    assert elastic.followed(asked, (), 3.0) == asked
    assert not elastic.is_due(SPEC, record(member_count=3, growth=asked, committed=Step(5)), NOW, TIMEOUTS)


@pytest.mark.parametrize(
    ("count", "age", "due"),
    [
        (2, TIMEOUTS.lease_seconds - 0.1, False),
        (2, TIMEOUTS.lease_seconds, True),
        (1, TIMEOUTS.lease_seconds, False),
        (1, 19.9, False),
        (1, 20.0, True),
    ],
)
def test_a_job_grows_once_for_all_its_nodes_or_after_its_patience(count: int, age: float, due: bool) -> None:
    growth = Growth(node_ids=nodes("a", "b")[:count], since=NOW - age)
    small = record(member_count=2, growth=growth, committed=Step(5))
    assert elastic.is_due(SPEC, small, NOW, TIMEOUTS) == due


def test_a_job_grows_neither_during_a_recovery_nor_before_a_new_commit() -> None:
    growth = Growth(node_ids=nodes("a", "b"), since=0.0)
    small = record(member_count=2, growth=growth, base_step=Step(5), committed=Step(6))
    assert elastic.is_due(SPEC, small, NOW, TIMEOUTS)
    assert not elastic.is_due(SPEC, replace(small, committed=Step(5)), NOW, TIMEOUTS)
    rework = IncidentRecord(
        id="i",
        state=IncidentState.REWORKING,
        cause=Cause.SHRUNK,
        evidence=(),
        decision=RestartsRanks(),
        generation_before=Generation(1),
        failed_at=0.0,
        opened_at=0.0,
        reached_step=Step(9),
    )
    assert not elastic.is_due(SPEC, replace(small, incident=rework), NOW, TIMEOUTS)


def test_the_forecast_names_every_size() -> None:
    assert accounts.forecast_words(spec_of("gpt", "a", 4, 2)) == ""
    assert accounts.forecast_words(SPEC) == "may start and continue on 2 of 4 nodes after 20 s without capacity"
    assert accounts.forecast_words(replace(SPEC, min_node_count=4, max_node_count=6)) == "may grow to 6 nodes"


def test_a_waiting_job_names_its_smallest_size_only_if_it_can_start_with_fewer_nodes() -> None:
    assert accounts.start_words(SPEC) == "starts on at least 2 nodes after 20 s"
    assert accounts.start_words(replace(SPEC, min_node_count=4)) == ""


@pytest.mark.parametrize(
    ("least", "most", "quota", "fields"),
    [
        (None, None, None, []),
        (4, 4, 6, []),
        (5, 6, 6, ["MinNodeCount"]),
        (None, 3, None, ["MaxNodeCount"]),
        (None, 6, 5, ["MaxNodeCount"]),
        (None, 7, None, ["MaxNodeCount"]),
    ],
)
def test_an_elastic_config_must_contain_its_node_count_and_fit_the_limits(
    least: int | None, most: int | None, quota: int | None, fields: list[str]
) -> None:
    limits = elastic.NodeLimits(group="asg", fleet="main", max_size=6, project="default", quota=quota)
    found = [field for field, _ in elastic.contradictions(4, least, most, limits)]
    assert found == [f"ElasticConfig.{field}" for field in fields]


def test_members_of_another_number_of_nodes_keep_their_order() -> None:
    plan = rank_plan(addresses=("a", "b", "c", "d"))
    assert members.places(plan, nodes("i-0", "i-2", "i-3"), 3) == nodes("i-0", "i-2", "i-3")
    assert members.places(plan, nodes("i-3", "new", "i-0"), 3) == nodes("i-0", "i-3", "new")
    assert members.places(plan, nodes("i-0", "i-3"), 3) == (*nodes("i-0", "i-3"), None)
    assert members.places(plan, nodes("new", "i-0", "i-2", "i-3"), 4) == nodes("i-0", "new", "i-2", "i-3")
    pair = rank_plan(addresses=("a", "b"))
    assert members.places(pair, nodes("new", "i-1", "i-0", "other"), 4) == nodes("i-0", "i-1", "new", "other")


def test_a_waiting_job_counts_its_patience_from_the_end_of_an_absence() -> None:
    waits = record(state=JobState.QUEUED, vacant_since=100.0)
    assert elastic.smaller_from(SPEC, waits) == 120.0
    assert elastic.smaller_from(SPEC, replace(waits, unwatched=(110.0, 150.0))) == 170.0
    assert elastic.smaller_from(SPEC, replace(waits, unwatched=(10.0, 50.0))) == 120.0
    assert elastic.smaller_from(SPEC, replace(waits, vacant_since=None)) is None
    assert elastic.smaller_from(replace(SPEC, min_node_count=None), waits) is None
    assert elastic.smaller_from(SPEC, replace(waits, state=JobState.PREPARING)) is None


@pytest.mark.parametrize(
    ("wanted", "most", "count"), [(None, None, 6), (4, None, 4), (1, None, 2), (None, 5, 5), (4, 5, 4), (5, 4, 4)]
)
def test_a_running_job_keeps_what_the_queue_and_its_limits_leave(
    wanted: int | None, most: int | None, count: int
) -> None:
    spec = replace(SPEC, max_node_count=6 if most is None else most)
    runs = record(member_count=6, base_step=Step(1), committed=Step(2))
    assert elastic.kept_count(spec, runs, wanted) == count
    for unsettled in (
        replace(runs, committed=Step(1)),
        replace(runs, taken_over_by="somebody"),
        replace(runs, state=JobState.PAUSING),
        replace(runs, suspicion=Suspicion(since=0.0, began_at=0.0, number=1, asked_at=0.0)),
    ):
        assert elastic.kept_count(spec, unsettled, wanted) == 6


def test_the_remaining_nodes_hold_every_shard_where_possible() -> None:
    plan = rank_plan(addresses=("a", "b", "c", "d"))
    names = [node.node_id for node in plan.nodes]
    pairs = [(names[place], names[place ^ 1]) for place in range(4)]
    reports = {
        node.node_id: MemberReport(
            job=plan.job,
            run=plan.run,
            generation=plan.generation,
            phase=MemberPhase.RUNNING,
            protection=(
                ShardProtection(
                    rank=Rank(place), holders=pairs[place], in_view=pairs[place], committed=Step(3), payload_bytes=1
                ),
            ),
        )
        for place, node in enumerate(plan.nodes)
    }
    assert elastic.returned_nodes(plan, reports, 1) == (names[3],)
    assert elastic.returned_nodes(plan, reports, 2) == (names[3], names[1]), "a pair holds each other's shards"
    assert elastic.returned_nodes(plan, reports, 3) == (names[3], names[1], names[2])
    assert elastic.returned_nodes(plan, {}, 2) == (names[3], names[2]), "without reports, the last nodes go"


def test_departing_nodes_are_returned_first_unless_another_job_waits_for_the_nodes() -> None:
    plan = rank_plan(addresses=("a", "b", "c", "d"))
    names = [node.node_id for node in plan.nodes]
    departing = {names[1]}
    assert elastic.returned_nodes(plan, {}, 2, departing=departing) == (names[1], names[3])
    assert elastic.returned_nodes(plan, {}, 3, departing=departing, is_for_other=True) == (names[3], names[2], names[0])
