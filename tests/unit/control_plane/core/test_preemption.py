"""Tests, by example, which jobs release nodes for the first job of the queue."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from control_plane.core.observed.fleets import FleetJob
from control_plane.core.queue import cannot_delay, schedule
from control_plane.core.states import JobState
from everstep.protocol.ids import JobName, RunId

NOW = 100.0


def job(name: str, count: int, state: JobState = JobState.RUNNING, **changes: Any) -> FleetJob:
    values: dict[str, Any] = {"priority": 0, "created_at": 0.0, "is_settled": state is JobState.RUNNING, **changes}
    return FleetJob(job=JobName(name), run=RunId(name), state=state, node_count=count, **values)


def waiting(count: int, priority: int = 0, **changes: Any) -> FleetJob:
    return job("head", count, JobState.QUEUED, priority=priority, created_at=9.0, **changes)


def released(jobs: list[FleetJob], capacity: int) -> dict[str, int]:
    """Return the number of nodes that each job keeps if it releases nodes.

    0: the job pauses or returns to the queue.
    """
    found = schedule(jobs, capacity, NOW)
    return {**{run: each.keep_count for run, each in found.reductions.items()}, **dict.fromkeys(found.giving_way, 0)}


GROWN = job("grown", 3, most_node_count=6, member_count=6)
SHRINKS = job("shrinks", 6, least_node_count=2, member_count=6, is_preemptible=True)
PAUSES = job("pauses", 4, member_count=4, is_preemptible=True)


@pytest.mark.parametrize(
    ("jobs", "capacity", "kept"),
    [
        ([GROWN, waiting(2)], 6, {"grown": 4}),
        ([GROWN, waiting(3)], 6, {"grown": 3}),
        ([GROWN, waiting(4)], 6, {}),
        ([GROWN, waiting(4, priority=9)], 6, {}),
        ([SHRINKS, waiting(2)], 6, {}),
        ([SHRINKS, waiting(2, priority=1)], 6, {"shrinks": 4}),
        ([SHRINKS, waiting(5, priority=1)], 6, {"shrinks": 0}),
        ([SHRINKS, waiting(7, priority=1)], 6, {}),
        ([GROWN, SHRINKS, waiting(4, priority=1)], 12, {"grown": 3, "shrinks": 5}),
        ([PAUSES, SHRINKS, waiting(4, priority=1)], 10, {"shrinks": 2}),
        ([PAUSES, SHRINKS, waiting(8, priority=1)], 10, {"pauses": 0, "shrinks": 2}),
        ([job("gang", 4, JobState.ALLOCATING, least_node_count=1), waiting(2, priority=1)], 4, {"gang": 0}),
        ([job("gang", 2, JobState.ALLOCATING, is_taken_over=True), GROWN, waiting(5, priority=1)], 8, {}),
        ([PAUSES, waiting(2, priority=1), job("stops", 2, JobState.STOPPING, member_count=2)], 6, {}),
    ],
)
def test_jobs_release_what_the_first_job_needs_the_cheapest_way(
    jobs: list[FleetJob], capacity: int, kept: dict[str, int]
) -> None:
    assert released(jobs, capacity) == kept


@pytest.mark.parametrize("changes", [{"is_settled": False}, {"no_pause_before": NOW + 1}])
def test_a_job_that_cannot_stop_now_keeps_its_nodes(changes: dict[str, Any]) -> None:
    grown = job("grown", 3, most_node_count=6, member_count=6, **changes)
    assert released([grown, waiting(2)], 6) == {}


def test_a_preemptible_job_grows_back_only_after_the_job_of_higher_priority() -> None:
    small = job("small", 6, least_node_count=2, member_count=2, is_preemptible=True)
    head = waiting(4, priority=1)
    assert dict(schedule([small, head], 6, NOW).counts) == {"small": 2, "head": 4}
    assert dict(schedule([small, waiting(4)], 6, NOW).counts) == {"small": 6}, "an equal job waits behind the claim"
    firm = job("small", 6, least_node_count=2, member_count=2)
    assert dict(schedule([firm, head], 6, NOW).counts) == {"small": 6}, "a job that is not preemptible keeps its claim"


@pytest.mark.parametrize(("members", "count"), [(0, 4), (2, 3), (3, 3), (5, 5), (6, 5)])
def test_a_changed_limit_applies_to_the_next_generation(members: int, count: int) -> None:
    """Limits that a user changes apply only from the next generation on.

    The running generation may have fewer or more nodes than the new limits allow.
    """
    changed = job("gpt", 4, least_node_count=3, most_node_count=5, member_count=members)
    assert changed.needed_count(NOW) == count


def test_a_patient_job_starts_with_the_free_nodes() -> None:
    patient = waiting(4, least_node_count=2, smaller_from=NOW - 1)
    runs = job("runs", 3, member_count=3)
    assert dict(schedule([runs, patient], 6, NOW).counts) == {"runs": 3, "head": 3}
    assert "head" not in schedule([runs, waiting(4, least_node_count=2, smaller_from=NOW + 1)], 6, NOW).counts


def test_no_job_grows_beyond_its_node_count_while_another_one_stands_aside() -> None:
    small = job("small", 2, most_node_count=4, member_count=2)
    aside = waiting(9, not_before=NOW + 1)
    assert schedule([small, aside], 6, NOW).counts["small"] == 2
    assert schedule([small], 6, NOW).counts["small"] == 4


def test_a_job_that_may_grow_does_not_pass_a_head_that_its_growth_would_delay() -> None:
    runs = job("runs", 4, member_count=4)
    passes = job("passes", 4, JobState.QUEUED, created_at=10.0, least_node_count=1, smaller_from=NOW - 1)
    assert "passes" not in schedule([runs, waiting(6), passes], 7, NOW).counts
    fixed = job("fixed", 1, JobState.QUEUED, created_at=10.0)
    assert "fixed" in schedule([runs, waiting(6), fixed], 7, NOW).counts


@pytest.mark.parametrize(("needs", "kept"), [(1, {"grown": 3}), (2, {})])
def test_no_job_returns_nodes_that_another_claim_takes_before_the_first_job(needs: int, kept: dict[str, int]) -> None:
    """A grown job can return three nodes, and a small job takes two of them before the first job of the queue.

    The grown job therefore returns nodes only if the first job needs at most one.
    """
    small = job("small", 4, least_node_count=2, member_count=2)
    assert released([GROWN, small, waiting(needs)], 8) == kept
    after = job("grown", 3, most_node_count=6, member_count=3)
    assert ("head" in schedule([after, small, waiting(needs)], 8, NOW).counts) == bool(kept)


def test_no_job_passes_a_head_that_would_start_after_its_patience() -> None:
    runs = job("runs", 4, member_count=4)
    head = waiting(6, least_node_count=3, smaller_from=NOW + 1)
    passes = job("passes", 1, JobState.QUEUED, created_at=10.0)
    assert "passes" not in schedule([runs, head, passes], 7, NOW).counts, "three nodes remain for the head"
    assert "passes" in schedule([runs, waiting(6), passes], 7, NOW).counts


def test_no_job_passes_a_head_that_starts_once_another_job_shrinks() -> None:
    low = job("low", 6, least_node_count=3, member_count=6, is_preemptible=True)
    passes = job("passes", 2, JobState.QUEUED, created_at=10.0)
    found = schedule([low, waiting(5, priority=1), passes], 8, NOW)
    assert released([low, waiting(5, priority=1), passes], 8) == {"low": 3}
    assert "passes" not in found.counts, "the head needs the two free nodes and the three that the other job returns"


def test_no_job_grows_beyond_its_node_count_with_the_quota_that_another_one_waits_for() -> None:
    grows = job("grows", 3, most_node_count=6, member_count=3, project="p", quota=6)
    ends = job("ends", 2, member_count=2, project="p", quota=6)
    waits = waiting(3, project="p", quota=6)
    assert dict(schedule([grows, ends, waits], 9, NOW).counts) == {"grows": 3, "ends": 2}
    assert dict(schedule([grows, waits], 9, NOW).counts) == {"grows": 3, "head": 3}
    assert dict(schedule([grows, ends], 9, NOW).counts) == {"grows": 4, "ends": 2}


def test_a_job_returns_nodes_beyond_its_node_count_to_a_job_that_runs_on_fewer() -> None:
    grown = job("grown", 3, most_node_count=6, member_count=6)
    small = job("small", 4, least_node_count=2, member_count=2)
    assert released([grown, small], 8) == {"grown": 4}, "two nodes complete the small job"
    assert released([grown, small], 9) == {"grown": 5}, "one node is free"
    assert released([grown, small], 10) == {}
    assert released([replace(grown, is_settled=False), small], 8) == {}
    limited = replace(small, project="p", quota=3)
    assert released([grown, limited], 8) == {"grown": 5}, "the small job may hold one more node"
    assert released([job("other", 6, member_count=6), small], 8) == {}


def test_a_job_returns_nodes_beyond_its_node_count_to_a_job_that_waits_for_its_quota() -> None:
    grown = job("grown", 3, most_node_count=6, member_count=6, project="p", quota=6)
    waits = waiting(2, project="p", quota=6)
    assert released([grown, waits], 9) == {"grown": 4}
    assert released([grown, waiting(4, project="p", quota=6)], 9) == {}, "three nodes do not suffice"
    assert released([replace(grown, project="q"), job("own", 5, member_count=5, project="p"), waits], 13) == {}
    assert released([grown, waits], 6) == {"grown": 4}, "the returned nodes alone suffice"


def test_several_jobs_together_return_no_more_than_is_missing() -> None:
    both = [job(name, 3, most_node_count=6, member_count=6) for name in ("a", "b")]
    small = job("small", 6, least_node_count=2, member_count=2)
    assert sorted(released([*both, small], 14).values()) == [3, 5]
    assert released([*both, replace(small, is_taken_over=True)], 14) == {}, "a person has it in hand"


def test_the_queue_counts_places_from_1() -> None:
    runs = job("runs", 4, member_count=4)
    first, second, aside = (job(name, 4, JobState.QUEUED, created_at=9.0) for name in ("a", "b", "c"))
    found = schedule([runs, second, first, replace(aside, not_before=NOW + 1)], 6, NOW)
    assert [each.run for each in found.waiting] == ["a", "b", "c"]
    assert [found.place_of(each.run) for each in (first, second, runs)] == [1, 2, None]
    assert [found.ahead_of(each.run) for each in (first, second, runs)] == [(), (first,), ()]


def test_a_job_stands_aside_until_its_time() -> None:
    assert "head" in schedule([waiting(2, not_before=NOW)], 6, NOW).counts
    assert "head" not in schedule([waiting(2, not_before=NOW + 1)], 6, NOW).counts


@pytest.mark.parametrize(("capacity", "free"), [(7, 3), (4, 0), (3, 0)])
def test_free_nodes_are_those_that_no_job_holds(capacity: int, free: int) -> None:
    assert schedule([job("runs", 4, member_count=4)], capacity, NOW).free_count == free


def test_a_job_passes_with_all_free_nodes_that_the_head_does_not_need() -> None:
    runs, passes = job("runs", 4, member_count=4), job("passes", 3, JobState.QUEUED, created_at=10.0)
    assert "passes" in schedule([runs, waiting(4), passes], 7, NOW).counts
    grows = job("grows", 6, least_node_count=2, member_count=2)
    passes = replace(passes, node_count=2)
    assert "passes" not in schedule([grows, waiting(4), passes], 9, NOW).counts, "the other job may grow to four nodes"


@pytest.mark.parametrize(
    ("sizes", "is_safe"),
    [
        pytest.param([], True, id="nobody holds nodes"),
        pytest.param([range(1, 2)], True, id="one node leaves room for both"),
        pytest.param([range(2, 3)], False, id="two nodes leave room for one of them"),
        pytest.param([range(4, 5)], False, id="four nodes leave room for the head"),
        pytest.param([range(5, 8)], True, id="five nodes leave no room for the head"),
        pytest.param([range(1, 3)], False, id="one or two nodes"),
        pytest.param([range(1, 2), range(1, 2)], False, id="one node twice"),
        pytest.param([range(1, 8)], False, id="up to seven nodes"),
    ],
)
def test_a_job_of_three_nodes_cannot_delay_a_head_of_three_on_seven(sizes: list[range], is_safe: bool) -> None:
    assert cannot_delay(3, 3, sizes, 7) is is_safe


@pytest.mark.parametrize(
    ("jobs", "capacity", "kept"),
    [
        pytest.param([job("stops", 4, JobState.STOPPING, member_count=4), GROWN, waiting(4)], 10, {}, id="one stops"),
        pytest.param([PAUSES, waiting(4, priority=1)], 8, {}, id="enough free nodes"),
        pytest.param([PAUSES, waiting(4, priority=1)], 7, {"pauses": 0}, id="one node is missing"),
        pytest.param([PAUSES, waiting(4, priority=0)], 7, {}, id="an equal priority"),
        pytest.param(
            [job("gang", 4, JobState.ALLOCATING), waiting(4, priority=0)], 4, {}, id="an equal job that is allocated"
        ),
        pytest.param([SHRINKS, waiting(4, priority=1)], 6, {"shrinks": 2}, id="exactly its least number"),
        pytest.param(
            [PAUSES, GROWN, waiting(4, priority=1)], 10, {"pauses": 0}, id="the surplus goes to the job that trains on"
        ),
        pytest.param([replace(GROWN, member_count=4), waiting(1)], 4, {"grown": 3}, id="a single node"),
        pytest.param(
            [SHRINKS, job("firm", 6, least_node_count=5, member_count=6, is_preemptible=True), waiting(10, priority=1)],
            12,
            {"shrinks": 2, "firm": 0},
            id="a surplus of exactly its least number",
        ),
    ],
)
def test_nodes_are_released_up_to_the_limits_of_each_job(
    jobs: list[FleetJob], capacity: int, kept: dict[str, int]
) -> None:
    assert released(jobs, capacity) == kept


@pytest.mark.parametrize(("seconds", "can_stop"), [(0.0, True), (1.0, False)])
def test_a_job_can_stop_again_at_its_time(seconds: float, can_stop: bool) -> None:
    grown = replace(GROWN, no_pause_before=NOW + seconds)
    assert released([grown, waiting(2)], 6) == ({"grown": 4} if can_stop else {})
