"""The sums of a report agree with each other and with the ledgers of the jobs, for every history of updates.

Each job is charged in random steps, and the detection of a failure moves time that is already charged. The full hours
are stored as the job loop stores them.
"""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from control_plane.core import reports
from control_plane.core.ledger_hours import HOUR, Ledger, full_hours
from control_plane.core.observed.nodes import Cause
from control_plane.core.observed.spans import Bucket
from control_plane.core.reports import Figures, FleetTime, IncidentKind, IncidentTime, JobTime, ReportPeriod

START = 500_000 * HOUR
SECOND = 1_000_000
PASSES = st.lists(
    st.tuples(
        st.integers(1, 5 * HOUR),
        st.sampled_from([Bucket.TRAIN, Bucket.TRAIN, Bucket.DETECT, Bucket.REPLACE, Bucket.QUEUE]),
        st.integers(0, 64),
        st.sampled_from([0, 0, 1, HOUR // 3, 2 * HOUR]),
    ),
    min_size=1,
    max_size=8,
)
"""Per update of a ledger (pass of the job loop): the time since the last update, the bucket that this time belongs to,
the number of nodes, and the time that moves to the bucket `DETECT`.
"""
COSTS = st.none() | st.integers(0, 10**10)


def history(offset: int, passes: list[tuple[int, Bucket, int, int]]) -> tuple[Ledger, ...]:
    """Return a job's ledger at its creation, at each full hour, and after the last update."""
    now = Ledger(at=START + offset, spent={})
    points = [now]
    for passed, bucket, nodes, late in passes:
        spent = Counter(now.spent)
        spent[bucket.value] += passed
        moved = min(late, spent[Bucket.TRAIN.value])
        spent[Bucket.TRAIN.value] -= moved
        spent[Bucket.DETECT.value] += moved
        after = Ledger(at=now.at + passed, spent=dict(spent), node_microseconds=now.node_microseconds + passed * nodes)
        points += full_hours(now, after)
        now = after
    return (*points, now)


@st.composite
def jobs(draw: st.DrawFn) -> list[JobTime]:
    return [
        JobTime(
            run_id=f"run-{number}",
            name=f"job-{number}",
            project=draw(st.sampled_from(["speech", "vision"])),
            fleet_name=draw(st.sampled_from(["a", "b"])),
            ranks_per_node=draw(st.integers(1, 8)),
            points=history(draw(st.integers(0, 30 * HOUR)), draw(PASSES)),
            cost_micro_usd=draw(COSTS),
        )
        for number in range(draw(st.integers(0, 4)))
    ]


@st.composite
def incidents(draw: st.DrawFn, known: list[JobTime]) -> list[IncidentTime]:
    found = []
    for job in known:
        for _ in range(draw(st.integers(0, 3))):
            failed_at = START + draw(st.integers(0, 90).map(lambda hour: hour * HOUR) | st.integers(0, 90 * HOUR))
            closed_at = draw(st.none() | st.integers(failed_at, failed_at + 10 * HOUR))
            cause, cost = draw(st.sampled_from([*Cause])), draw(COSTS)
            found.append(
                IncidentTime(
                    run_id=job.run_id,
                    cause=cause,
                    failed_at=failed_at,
                    closed_at=closed_at,
                    lost_steps=draw(st.integers(0, 9)),
                    cost_micro_usd=cost,
                )
            )
    return found


def sums(figures: Figures) -> Counter[str]:
    """Return all figures of a report that can be added up, by name."""
    found = Counter(
        {
            "nodes": figures.node_microseconds,
            "ranks": figures.rank_microseconds,
            "unpriced": figures.unpriced_node_microseconds,
            "cost": figures.cost_micro_usd or 0,
            "spare_cost": figures.spare_cost_micro_usd or 0,
            "other_idle_cost": figures.other_idle_cost_micro_usd or 0,
        }
    )
    found.update({f"spent {name}": amount for name, amount in figures.spent.items()})
    found.update({f"idle {name}": amount for name, amount in figures.idle_microseconds.items()})
    for kind, of_kind in figures.incidents.items():
        found[f"count {kind}"] = of_kind.count
        found[f"recovered {kind}"] = of_kind.recovered_count
        found[f"recovery {kind}"] = of_kind.recovery_microseconds
        found[f"steps {kind}"] = of_kind.recomputed_steps
        found[f"cost {kind}"] = of_kind.cost_micro_usd or 0
    return found


def added(many: list[Figures]) -> Counter[str]:
    whole: Counter[str] = Counter()
    for figures in many:
        whole.update(sums(figures))
    return +whole


def without_idle(counted: Counter[str]) -> Counter[str]:
    return Counter({name: amount for name, amount in counted.items() if "idle" not in name and "spare" not in name})


def moment(micro: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=micro)


@given(st.data(), st.integers(-5, 60), st.integers(1, 100), st.sampled_from([*ReportPeriod]), st.integers(0, 5))
def test_all_sums_of_a_report_are_equal(data, first, hours, period, max_jobs):
    known = data.draw(jobs())
    fleet = FleetTime(
        name="a", points=history(data.draw(st.integers(0, HOUR)), data.draw(PASSES)), price_micro_usd=data.draw(COSTS)
    )
    bounds = reports.bounds(moment(START + first * HOUR), moment(START + (first + hours) * HOUR), period)
    assert (bounds[0], bounds[-1]) == (START + first * HOUR, START + (first + hours) * HOUR)
    assert list(bounds) == sorted(set(bounds))
    found = reports.report(
        bounds,
        jobs=known,
        fleets=[fleet],
        incidents=data.draw(incidents(known)),
        now=START + 100 * HOUR,
        max_jobs=max_jobs,
    )
    total = +sums(found.total)
    assert added([bucket.figures for bucket in found.buckets]) == total
    assert added([figures for _, figures in found.fleets]) == total
    assert added([figures for _, figures in found.projects]) == without_idle(total)
    assert added([*(entry.figures for entry in found.jobs), found.other_jobs]) == without_idle(total)
    assert (len(found.jobs), found.job_count) == (min(max_jobs, len(known)), len(known))
    for kind in IncidentKind:
        of_kind = [figures for cause, figures in found.causes if reports.kind_of(cause) is kind]
        assert sum(figures.count for figures in of_kind) == found.total.incidents[kind].count
        assert sum(figures.cost_micro_usd or 0 for figures in of_kind) == total[f"cost {kind}"]
    for project, figures in found.projects:
        of_project = [entry.figures for entry in found.jobs if entry.job.project == project]
        if len(found.jobs) == len(known):
            assert added(of_project) == +sums(figures)
    for name, figures in found.fleets:
        of_fleet = [entry.figures for entry in found.jobs if entry.job.fleet_name == name]
        if len(found.jobs) == len(known):
            assert added(of_fleet) == without_idle(+sums(figures))


@given(st.integers(0, 30 * HOUR), PASSES, COSTS, st.sampled_from([*ReportPeriod]))
def test_a_range_over_the_whole_life_of_a_job_equals_its_ledger(offset, passes, cost, period):
    points = history(offset, passes)
    job = JobTime(
        run_id="r", name="j", project="p", fleet_name="f", ranks_per_node=8, points=points, cost_micro_usd=cost
    )
    incident = IncidentTime(
        run_id="r", cause=Cause.HANG, failed_at=START, closed_at=points[-1].at, lost_steps=3, cost_micro_usd=cost
    )
    bounds = reports.bounds(moment(START), moment(points[-1].at + HOUR), period)
    found = reports.report(bounds, jobs=[job], fleets=[], incidents=[incident], now=points[-1].at, max_jobs=1)
    failures = found.total.incidents[IncidentKind.FAILURE]
    assert (failures.count, failures.recovered_count, failures.recomputed_steps) == (1, 1, 3)
    assert (failures.cost_micro_usd, failures.recovery_microseconds) == (cost, points[-1].at - START)
    assert found.total.spent == {name: amount for name, amount in points[-1].spent.items() if amount}
    assert found.total.node_microseconds == points[-1].node_microseconds
    assert found.total.rank_microseconds == 8 * points[-1].node_microseconds
    assert (found.total.cost_micro_usd or 0) == ((points[-1].node_microseconds and cost) or 0)
    for bucket in found.buckets:
        assert all(amount >= 0 for amount in bucket.figures.spent.values()), "no bucket has less than no time"
        assert sum(bucket.figures.spent.values()) == max(
            0, min(bucket.end, points[-1].at) - max(bucket.start, points[0].at)
        ), "the time of a bucket is the part of the job's life inside the bucket"


@given(st.integers(0, HOUR), PASSES, st.integers(1, 40), st.data())
def test_neighbouring_ranges_add_up(offset, passes, hours, data):
    points = history(offset, [(passed, bucket, nodes, 0) for passed, bucket, nodes, _ in passes])
    job = JobTime(run_id="r", name="j", project="p", fleet_name="f", ranks_per_node=1, points=points, cost_micro_usd=7)
    known = data.draw(incidents([job]))
    middle = data.draw(st.integers(1, hours))

    def over(start: int, end: int) -> Counter[str]:
        bounds = reports.bounds(moment(START + start * HOUR), moment(START + end * HOUR), ReportPeriod.DAY)
        found = reports.report(bounds, jobs=[job], fleets=[], incidents=known, now=START + 99 * HOUR, max_jobs=0)
        return sums(found.total)

    assert +(over(0, middle) + over(middle, hours + 1)) == +over(0, hours + 1)
