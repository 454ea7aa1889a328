"""Reports of time and costs have exact figures, by full hours and with idle nodes."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from control_plane.core import idle_nodes, reports
from control_plane.core.idle_nodes import IdleNodes
from control_plane.core.ledger_hours import HOUR, MOST_HOURS, Ledger, full_hours, interpolated
from control_plane.core.observed.nodes import Cause
from control_plane.core.reports import FleetTime, IncidentKind, IncidentTime, JobTime, ReportPeriod
from control_plane.core.states import NodeState

SECOND = 1_000_000
NOON = 492_204 * HOUR  # 2026-02-24 12:00 UTC, a Tuesday
DOLLAR = 1_000_000


def job(name: str, *points: Ledger, cost: int | None = None, project: str = "speech", fleet: str = "main") -> JobTime:
    return JobTime(
        run_id=f"run-{name}",
        name=name,
        project=project,
        fleet_name=fleet,
        ranks_per_node=8,
        points=points,
        cost_micro_usd=cost,
    )


def incident(cause: Cause, failed_at: int, closed_at: int | None, *, cost: int | None = None) -> IncidentTime:
    return IncidentTime(
        run_id="run-gpt", cause=cause, failed_at=failed_at, closed_at=closed_at, lost_steps=3, cost_micro_usd=cost
    )


def over(bounds: list[int], jobs=(), fleets=(), incidents=(), max_jobs: int = 10) -> reports.Report:
    return reports.report(
        bounds, jobs=jobs, fleets=fleets, incidents=incidents, now=NOON + 10 * HOUR, max_jobs=max_jobs
    )


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


@pytest.mark.parametrize(
    ("start", "end", "period", "expected"),
    [
        ("2026-02-24T10:30", "2026-02-24T12:01", ReportPeriod.HOUR, ["24T10", "24T11", "24T12", "24T13"]),
        ("2026-02-24T10:30", "2026-02-26T00:00", ReportPeriod.DAY, ["24T10", "25T00", "26T00"]),
        ("2026-02-22T23:00", "2026-03-02T00:00", ReportPeriod.WEEK, ["22T23", "23T00", "02T00"]),
        ("2026-02-24T10:00", "2026-02-24T11:00", ReportPeriod.WEEK, ["24T10", "24T11"]),
        ("2026-02-24T10:00", "2026-02-24T10:00", ReportPeriod.HOUR, ["24T10", "24T11"]),
        ("2026-02-24T10:00:00.000001", "2026-02-24T11:00:00.000001", ReportPeriod.HOUR, ["24T10", "24T11", "24T12"]),
    ],
)
def test_buckets_begin_at_full_hours_days_and_mondays(start, end, period, expected):
    bounds = reports.bounds(at(start), at(end), period)
    assert [f"{datetime.fromtimestamp(bound // SECOND, UTC):%dT%H}" for bound in bounds] == expected


def test_the_default_period_depends_on_the_length_of_the_range():
    ends = ("2026-02-26", "2026-02-27", "2026-06-04", "2026-06-05")
    assert [reports.default_period(at("2026-02-24"), at(end)) for end in ends] == [
        ReportPeriod.HOUR,
        ReportPeriod.DAY,
        ReportPeriod.DAY,
        ReportPeriod.WEEK,
    ]


def test_time_that_a_late_detection_moves_returns_to_its_hour():
    # The job fails at 12:59:30 and the failure is detected at 13:00:10. These 40 s change from training to detection,
    # and 30 s of them belong to the hour before.
    created = Ledger(at=NOON, spent={})
    full = Ledger(at=NOON + HOUR, spent={"train": HOUR}, node_microseconds=HOUR)
    spent = {"train": HOUR - 30 * SECOND, "detect": 40 * SECOND, "replace": HOUR - 10 * SECOND}
    last = Ledger(at=NOON + 2 * HOUR, spent=spent, node_microseconds=2 * HOUR)
    found = over([NOON, NOON + HOUR, NOON + 2 * HOUR], [job("gpt", created, full, last)])
    first, second = (bucket.figures.spent for bucket in found.buckets)
    assert first == {"train": HOUR - 30 * SECOND, "detect": 30 * SECOND}
    assert second == {"detect": 10 * SECOND, "replace": HOUR - 10 * SECOND}
    assert found.total.spent == spent


def test_time_that_moves_within_the_first_hour_stays_in_it():
    before = Ledger(at=NOON, spent={"train": HOUR})
    after = Ledger(at=NOON + HOUR, spent={"train": HOUR - 30 * SECOND, "detect": HOUR + 30 * SECOND})
    found = over([NOON, NOON + HOUR], [job("gpt", before, after)])
    assert found.total.spent == {"detect": HOUR}


def test_a_move_of_one_microsecond_is_found_in_any_other_time():
    states = [
        Ledger(at=NOON, spent={}),
        Ledger(at=NOON + HOUR, spent={"train": HOUR}),
        Ledger(at=NOON + 2 * HOUR, spent={"train": HOUR - 1, "queue": HOUR + 1}),
    ]
    found = over([NOON, NOON + HOUR, NOON + 2 * HOUR], [job("gpt", *states)])
    assert [bucket.figures.spent for bucket in found.buckets] == [
        {"train": HOUR - 1, "queue": 1},
        {"queue": HOUR},
    ]


def test_counters_do_not_change_outside_their_points():
    points = (Ledger(at=NOON, spent={"train": 0}), Ledger(at=NOON + HOUR, spent={"train": HOUR}))
    found = over([NOON - HOUR, NOON, NOON + HOUR, NOON + 2 * HOUR], [job("gpt", *points)])
    assert [bucket.figures.spent.get("train", 0) for bucket in found.buckets] == [0, HOUR, 0]


def test_an_incident_that_ends_at_its_failure_costs_in_one_bucket():
    created, last = Ledger(at=NOON, spent={}), Ledger(at=NOON + HOUR, spent={"train": HOUR})
    known = [
        incident(Cause.HANG, NOON + 5, NOON + 5, cost=DOLLAR),
        incident(Cause.DRILL, NOON - HOUR, NOON + HOUR, cost=2 * DOLLAR),
        incident(Cause.NOTICE, NOON - HOUR, NOON, cost=DOLLAR),
    ]
    figures = over([NOON, NOON + HOUR], [job("gpt", created, last)], incidents=known).total.incidents
    assert figures[IncidentKind.FAILURE].cost_micro_usd == DOLLAR
    assert (figures[IncidentKind.DRILL].count, figures[IncidentKind.DRILL].cost_micro_usd) == (0, DOLLAR)
    assert figures[IncidentKind.PLANNED].cost_micro_usd is None, "it ended before"


def test_the_mean_time_to_recovery_counts_recovered_failures():
    created, last = Ledger(at=NOON, spent={}), Ledger(at=NOON + HOUR, spent={"train": HOUR})
    known = [incident(Cause.HANG, NOON, NOON + seconds * SECOND) for seconds in (6, 12)]
    assert over([NOON, NOON + HOUR], [job("gpt", created, last)], incidents=known).total.mttr_seconds == 9.0


def test_the_cost_of_a_job_is_spread_by_its_node_time():
    points = (
        Ledger(at=NOON, spent={}),
        Ledger(at=NOON + HOUR, spent={"train": HOUR}, node_microseconds=3 * HOUR),
        Ledger(at=NOON + 2 * HOUR, spent={"train": HOUR, "queue": HOUR}, node_microseconds=4 * HOUR),
    )
    jobs = [
        job("gpt", *points, cost=4 * DOLLAR),
        job("bert", *points, cost=8 * DOLLAR, project="vision", fleet="big"),
        job("free", *points),
    ]
    found = over([NOON, NOON + HOUR, NOON + 2 * HOUR], jobs, max_jobs=1)
    assert [bucket.figures.cost_micro_usd for bucket in found.buckets] == [9 * DOLLAR, 3 * DOLLAR]
    assert [(name, figures.cost_micro_usd) for name, figures in found.projects] == [
        ("vision", 8 * DOLLAR),
        ("speech", 4 * DOLLAR),
    ]
    assert [(name, figures.cost_micro_usd) for name, figures in found.fleets] == [
        ("big", 8 * DOLLAR),
        ("main", 4 * DOLLAR),
    ]
    assert [(entry.job.name, entry.figures.cost_micro_usd) for entry in found.jobs] == [("bert", 8 * DOLLAR)]
    assert (found.other_jobs.cost_micro_usd, found.other_jobs.node_microseconds) == (4 * DOLLAR, 8 * HOUR)
    assert found.other_jobs.unpriced_node_microseconds == found.total.unpriced_node_microseconds == 4 * HOUR
    assert found.total.rank_microseconds == 8 * found.total.node_microseconds
    assert (found.total.ettr_ratio, found.total.ettr_with_queue_ratio) == (1.0, 0.5)


def test_a_failure_that_the_job_gave_up_has_no_recovery_time():
    created, last = Ledger(at=NOON, spent={}), Ledger(at=NOON + HOUR, spent={"train": HOUR})
    known = [incident(Cause.HANG, NOON, NOON + 6 * SECOND), incident(Cause.HANG, NOON, NOON + 600 * SECOND)]
    found = over(
        [NOON, NOON + HOUR], [job("gpt", created, last)], incidents=[known[0], replace(known[1], is_given_up=True)]
    )
    figures = found.total.incidents[IncidentKind.FAILURE]
    assert (figures.count, figures.recovered_count, found.total.mttr_seconds) == (2, 1, 6.0)


def test_an_incident_counts_at_its_failure_and_costs_until_its_end():
    created = Ledger(at=NOON - HOUR, spent={})
    last = Ledger(at=NOON + 2 * HOUR, spent={"train": 3 * HOUR})
    known = [
        incident(Cause.HANG, NOON, NOON + 2 * HOUR, cost=DOLLAR),
        incident(Cause.HANG, NOON - HOUR, NOON + HOUR, cost=DOLLAR),
        incident(Cause.DRILL, NOON + HOUR, NOON + HOUR + 60 * SECOND, cost=DOLLAR),
        incident(Cause.NOTICE, NOON + HOUR, None),
    ]
    found = over([NOON, NOON + HOUR, NOON + 2 * HOUR], [job("gpt", created, last)], incidents=known)
    first, second = (bucket.figures for bucket in found.buckets)
    counts = [{kind.value: figures.incidents[kind].count for kind in IncidentKind} for figures in (first, second)]
    assert counts == [{"Failure": 1, "Planned": 0, "Drill": 0}, {"Failure": 0, "Planned": 1, "Drill": 1}]
    costs = [figures.incidents[IncidentKind.FAILURE].cost_micro_usd for figures in (first, second)]
    assert costs == [DOLLAR, DOLLAR // 2], "half of both failures, then the other half of one"
    assert second.incidents[IncidentKind.DRILL].cost_micro_usd == DOLLAR
    assert second.incidents[IncidentKind.PLANNED].cost_micro_usd is None
    assert second.incidents[IncidentKind.PLANNED].recovered_count == 0
    assert (found.total.mttf_seconds, found.total.mttr_seconds) == (7200.0, 7200.0)
    assert [(cause, figures.count) for cause, figures in found.causes] == [
        (Cause.DRILL, 1),
        (Cause.HANG, 1),
        (Cause.NOTICE, 1),
    ]


def test_an_open_incident_costs_until_now():
    known = [incident(Cause.HANG, NOON, None, cost=10 * DOLLAR)]
    points = (Ledger(at=NOON, spent={}), Ledger(at=NOON + HOUR, spent={"detect": HOUR}))
    found = over([NOON, NOON + HOUR], [job("gpt", *points)], incidents=known)
    assert found.total.incidents[IncidentKind.FAILURE].cost_micro_usd == DOLLAR, "one of ten hours"


def test_idle_nodes_count_for_their_fleet_and_for_no_project():
    points = (
        Ledger(at=NOON, spent={}),
        Ledger(at=NOON + HOUR, spent={"spare": 2 * HOUR, "held": HOUR // 2}),
        Ledger(at=NOON + 2 * HOUR, spent={"spare": 3 * HOUR, "held": HOUR // 2}),
    )
    fleet = FleetTime(name="main", points=points, price_micro_usd=10 * DOLLAR)
    found = over([NOON, NOON + HOUR, NOON + 2 * HOUR], fleets=[fleet])
    assert [bucket.figures.spare_cost_micro_usd for bucket in found.buckets] == [20 * DOLLAR, 10 * DOLLAR]
    assert found.total.other_idle_cost_micro_usd == 5 * DOLLAR
    assert found.total.idle_microseconds == {"held": HOUR // 2, "spare": 3 * HOUR}
    assert [(name, figures.spare_cost_micro_usd) for name, figures in found.fleets] == [("main", 30 * DOLLAR)]
    assert (found.projects, found.jobs, found.total.cost_micro_usd) == ((), (), None)


def test_a_full_hour_has_the_exact_share_of_the_charge_that_passes_it():
    before = Ledger(at=NOON - 1, spent={"train": 10, "queue": 1}, node_microseconds=7)
    after = Ledger(at=NOON + 2, spent={"train": 9, "queue": 3, "detect": 2}, node_microseconds=13)
    (hour,) = full_hours(before, after)
    assert (hour.at, sum(hour.spent.values()), hour.node_microseconds) == (NOON, 12, 9)
    assert full_hours(before, Ledger(at=NOON - 1, spent={})) == ()
    assert full_hours(hour, after) == ()
    assert interpolated(before, after, NOON + 2).spent == {"detect": 2, "queue": 3, "train": 9}


def test_hours_of_a_long_absence_are_bounded():
    before, after = Ledger(at=NOON, spent={}), Ledger(at=NOON + 2 * MOST_HOURS * HOUR, spent={})
    hours = full_hours(before, after)
    assert len(hours) == MOST_HOURS
    assert (hours[0].at, hours[-1].at) == (NOON + (MOST_HOURS + 1) * HOUR, after.at)


def test_idle_nodes_are_charged_by_their_state():
    spare, held, busy = NodeState.SPARE, NodeState.HELD, NodeState.ASSIGNED
    idle = idle_nodes.charge(IdleNodes(), [spare, spare, busy, NodeState.GONE], 1000.0)
    assert (idle.until, idle.counts, idle.microseconds) == (1000.0, {"spare": 2}, {})
    assert idle_nodes.charge(idle, [spare, spare], 1059.0) is idle, "no count changed within a minute"
    changed = idle_nodes.charge(idle, [spare, held, busy], 1010.0)
    assert (changed.counts, changed.microseconds) == ({"held": 1, "spare": 1}, {"spare": 20 * SECOND})
    back = idle_nodes.charge(changed, [], 900.0)
    assert (back.until, back.counts, back.microseconds) == (1010.0, {}, {"held": 0, "spare": 20 * SECOND})
    due = idle_nodes.charge(changed, [spare, held, busy], 1070.0)
    assert due.microseconds == {"held": 60 * SECOND, "spare": 80 * SECOND}
    hour = idle_nodes.charge(IdleNodes(until=3599.0, counts={"spare": 1}), [spare], 3600.0)
    assert (hour.until, hour.microseconds) == (3600.0, {"spare": SECOND}), "a new hour is charged at once"
    assert idle_nodes.ledger(IdleNodes()) is None
    assert idle_nodes.ledger(hour) == Ledger(at=3600 * SECOND, spent={"spare": SECOND})


def test_a_remainder_of_a_microsecond_goes_to_the_counter_that_lost_most_of_it():
    before = Ledger(at=NOON, spent={"queue": 5}, node_microseconds=7)
    after = Ledger(at=NOON + 4, spent={"train": 1, "queue": 7}, node_microseconds=17)
    found = interpolated(before, after, NOON + 3)
    assert (found.at, found.spent, found.node_microseconds) == (NOON + 3, {"queue": 6, "train": 1}, 14)
    assert interpolated(before, replace(after, at=NOON), NOON + 3) == before
