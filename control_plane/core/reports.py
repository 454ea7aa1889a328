"""Reports: time, cost and incidents of all jobs and fleets over a time range.

Invariant: the total equals the sum of the buckets, of the projects, and of the jobs. The sum over a job's whole life
equals the job's own ledger. Idle nodes belong to fleets only. All sums are integers.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from itertools import pairwise
from typing import Final, TypeAlias

from control_plane.core import accounting
from control_plane.core.ledger_hours import HOUR, Ledger, interpolated
from control_plane.core.observed.nodes import Cause
from control_plane.core.observed.spans import Bucket
from control_plane.core.states import NodeState


class ReportPeriod(StrEnum):
    """The length of the time buckets into which a report divides its range.

    Days and weeks begin at 00:00 UTC, and weeks on Monday.
    """

    HOUR = "Hour"
    DAY = "Day"
    WEEK = "Week"


class IncidentKind(StrEnum):
    """The kind of an incident. Reports count the incidents of each kind separately.

    - FAILURE: a fault ended the generation. MTTF and MTTR count only these incidents.
    - PLANNED: AWS's notice, a person's request, a new number of nodes, or a requested pause without success.
    - DRILL: a person injected the fault.
    """

    FAILURE = "Failure"
    PLANNED = "Planned"
    DRILL = "Drill"


_SPAN: Final = {ReportPeriod.HOUR: HOUR, ReportPeriod.DAY: 24 * HOUR, ReportPeriod.WEEK: 7 * 24 * HOUR}
_MONDAY: Final = 4 * 24 * HOUR
"""The first Monday after 1970-01-01, a Thursday, in microseconds."""
_FIRST_SOURCES: Final = tuple(name.value for name in (Bucket.DETECT, Bucket.REPLACE, Bucket.RESTORE, Bucket.REWORK))

Sums: TypeAlias = "Counter[tuple[str, str]]"
"""Sums by kind and name, for example `("spent", "train")`. A missing key means None for costs, and 0 otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTime:
    """A job, and its time by category (its ledger) at several points in time."""

    run_id: str
    name: str
    project: str
    fleet_name: str
    ranks_per_node: int
    points: tuple[Ledger, ...]
    """The ledger from the job's creation to its last update, oldest first."""
    cost_micro_usd: int | None
    """Cost of the node time of the job's whole life."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetTime:
    """A fleet, and the idle time of its nodes (its ledger) at several points in time."""

    name: str
    points: tuple[Ledger, ...]
    """Oldest first. Empty before the fleet loop has first handled the fleet."""
    price_micro_usd: int | None
    """Price of one node for one hour."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentTime:
    """An incident of a job. Times are Unix microseconds."""

    run_id: str
    cause: Cause
    failed_at: int
    closed_at: int | None
    is_given_up: bool = False
    """Whether the job ended or was paused before training had caught up."""
    lost_steps: int
    cost_micro_usd: int | None
    """Cost of the job's nodes from the failure until training has caught up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentFigures:
    """Sums over the incidents of one kind or cause. The cost is spread over all overlapped time buckets."""

    count: int
    recovered_count: int
    recovery_microseconds: int
    """Time from the failure until training has caught up, summed."""
    recomputed_steps: int
    cost_micro_usd: int | None
    """None if no incident has a cost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures of one time bucket, project, fleet or job, or of the whole report."""

    spent: Mapping[str, int]
    """Microseconds by `Bucket`, summed over jobs."""
    node_microseconds: int
    rank_microseconds: int
    """Node time multiplied by the number of ranks per node. With one rank per GPU, this is GPU time."""
    unpriced_node_microseconds: int
    """Part of the node time that `cost_micro_usd` leaves out, because the fleet has no price."""
    cost_micro_usd: int | None
    """None if no fleet has a price."""
    incidents: Mapping[IncidentKind, IncidentFigures]
    idle_microseconds: Mapping[str, int]
    """Idle time by `NodeState`, summed over nodes. Empty for projects and jobs."""
    spare_cost_micro_usd: int | None
    other_idle_cost_micro_usd: int | None

    @property
    def ettr_ratio(self) -> float | None:
        """The effective training time ratio without queue time. See `accounting.ettr_ratio`."""
        return accounting.ettr_ratio(self.spent)

    @property
    def ettr_with_queue_ratio(self) -> float | None:
        """The effective training time ratio with queue time as wall time."""
        return accounting.ettr_ratio(self.spent, is_queue_counted=True)

    @property
    def mttf_seconds(self) -> float | None:
        """See `accounting.mean_seconds_to_failure`."""
        return accounting.mean_seconds_to_failure(self.spent, self.incidents[IncidentKind.FAILURE].count)

    @property
    def mttr_seconds(self) -> float | None:
        """Mean time from a failure until training has caught up. None without a recovered failure."""
        failures = self.incidents[IncidentKind.FAILURE]
        return failures.recovery_microseconds / 1e6 / failures.recovered_count if failures.recovered_count else None


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketFigures:
    """The figures of one time bucket (hour, day or week) of a report. Times are Unix microseconds."""

    start: int
    end: int
    figures: Figures


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFigures:
    """The time, cost and incidents of one job in the time range of a report."""

    job: JobTime
    figures: Figures


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Time, cost and incidents in a time range: in total, and by time bucket, project, fleet, job and cause."""

    total: Figures
    buckets: tuple[BucketFigures, ...]
    projects: tuple[tuple[str, Figures], ...]
    """The most expensive first."""
    fleets: tuple[tuple[str, Figures], ...]
    jobs: tuple[JobFigures, ...]
    other_jobs: Figures
    job_count: int
    causes: tuple[tuple[Cause, IncidentFigures], ...]
    """The most frequent first."""


@dataclass(slots=True)
class _Groups:
    buckets: list[Sums]
    projects: defaultdict[str, Sums] = field(default_factory=lambda: defaultdict(Counter))
    fleets: defaultdict[str, Sums] = field(default_factory=lambda: defaultdict(Counter))
    causes: defaultdict[Cause, Sums] = field(default_factory=lambda: defaultdict(Counter))
    jobs: dict[str, Sums] = field(default_factory=dict[str, Sums])
    total: Sums = field(default_factory=Counter[tuple[str, str]])


def default_period(start: datetime, end: datetime) -> ReportPeriod:
    """Return the length of a report's buckets, so that the range has at most about a hundred."""
    if end - start <= timedelta(days=2):
        return ReportPeriod.HOUR
    return ReportPeriod.DAY if end - start <= timedelta(days=100) else ReportPeriod.WEEK


def bounds(start: datetime, end: datetime, period: ReportPeriod) -> tuple[int, ...]:
    """Return the bounds of a report's buckets, as ascending multiples of `HOUR` in Unix microseconds.

    The range is widened to full hours. The first and the last bucket may be shorter.
    """
    first, last = _micro(start) // HOUR * HOUR, -(-_micro(end) // HOUR) * HOUR
    span, origin = _SPAN[period], _MONDAY if period is ReportPeriod.WEEK else 0
    inner = range(origin + ((first - origin) // span + 1) * span, last, span)
    return (first, *inner, max(last, first + HOUR))


def report(
    bounds: Sequence[int],
    *,
    jobs: Iterable[JobTime],
    fleets: Iterable[FleetTime],
    incidents: Iterable[IncidentTime],
    now: int,
    max_jobs: int,
) -> Report:
    """Add up the figures of jobs, fleets and incidents between the `bounds`, which `bounds()` returns.

    An open incident counts until `now` (Unix microseconds). Jobs beyond `max_jobs` count together in `other_jobs`.
    """
    groups = _Groups(buckets=[Counter() for _ in bounds[1:]])
    known = {job.run_id: job for job in jobs}
    for job in known.values():
        groups.jobs[job.run_id] = Counter()
        for number, sums in enumerate(_job_sums(job, bounds)):
            _add(groups.buckets[number], sums)
            _add(groups.jobs[job.run_id], sums)
    kinds = {cause: kind_of(cause) for cause in Cause}
    for incident in incidents:
        kind = kinds[incident.cause]
        for number, sums in _incident_sums(incident, bounds, now):
            of_kind = Counter({(f"{name} {kind}", ""): amount for (name, _), amount in sums.items()})
            _add(groups.buckets[number], of_kind)
            _add(groups.jobs[incident.run_id], of_kind)
            _add(groups.causes[incident.cause], sums)
    for run_id, sums in groups.jobs.items():
        job = known[run_id]
        for group in (groups.total, groups.projects[job.project], groups.fleets[job.fleet_name]):
            _add(group, sums)
    for fleet in fleets:
        for number, sums in enumerate(_idle_sums(fleet, bounds)):
            for group in (groups.total, groups.buckets[number], groups.fleets[fleet.name]):
                _add(group, sums)
    ranked = _ranked(groups.jobs, lambda run_id: known[run_id].name)
    others: Sums = Counter()
    for run_id in ranked[max_jobs:]:
        _add(others, groups.jobs[run_id])
    return Report(
        total=_figures(groups.total),
        buckets=tuple(
            BucketFigures(start=start, end=end, figures=_figures(sums))
            for (start, end), sums in zip(pairwise(bounds), groups.buckets, strict=True)
        ),
        projects=tuple((name, _figures(groups.projects[name])) for name in _ranked(groups.projects, str)),
        fleets=tuple((name, _figures(groups.fleets[name])) for name in _ranked(groups.fleets, str)),
        jobs=tuple(
            JobFigures(job=known[run_id], figures=_figures(groups.jobs[run_id])) for run_id in ranked[:max_jobs]
        ),
        other_jobs=_figures(others),
        job_count=len(known),
        causes=tuple(
            sorted(
                ((cause, _incident_figures(sums, "")) for cause, sums in groups.causes.items()),
                key=lambda entry: (-entry[1].count, entry[0]),
            )
        ),
    )


def kind_of(cause: Cause) -> IncidentKind:
    """Return the kind (failure, planned or drill) of incidents with this cause."""
    if cause is Cause.DRILL:
        return IncidentKind.DRILL
    return IncidentKind.FAILURE if cause.is_failure else IncidentKind.PLANNED


def _add(group: Sums, sums: Sums) -> None:
    for key, amount in sums.items():  # Use a loop, because Counter.update takes twice as long.
        group[key] += amount


def _job_sums(job: JobTime, bounds: Sequence[int]) -> Iterable[Sums]:
    states = _at_bounds(job.points, bounds)
    whole, cost = job.points[-1].node_microseconds, job.cost_micro_usd
    for (before, after), spent in zip(pairwise(states), _changes(states), strict=True):
        sums: Sums = Counter({("spent", name): amount for name, amount in spent.items() if amount})
        if nodes := after.node_microseconds - before.node_microseconds:
            sums["nodes", ""] = nodes
            sums["ranks", ""] = nodes * job.ranks_per_node
            if cost is None:
                sums["unpriced", ""] = nodes
            else:
                sums["cost", ""] = cost * after.node_microseconds // whole - cost * before.node_microseconds // whole
        yield sums


def _changes(states: Sequence[Ledger]) -> list[dict[str, int]]:
    """Return by how much each category of a job's time grew between neighbouring states of its ledger."""
    found = [
        {name: amount - before.spent.get(name, 0) for name, amount in after.spent.items()}
        for before, after in pairwise(states)
    ]
    # The detection of a failure moves time, for example from `train` to `detect`. If an hour ended in between, `train`
    # would be negative in the next hour, so the move counts in the earlier hour.
    for number in range(len(found) - 1, -1, -1):
        later, earlier = found[number], found[number - 1] if number else {}
        for name in [name for name, amount in later.items() if amount < 0]:
            for source in (*_FIRST_SOURCES, *sorted(later)):
                moved = min(-later[name], later.get(source, 0))
                if moved > 0:
                    later[source] -= moved
                    later[name] += moved
                    earlier[source] = earlier.get(source, 0) + moved
                    earlier[name] = earlier.get(name, 0) - moved
    return found


def _idle_sums(fleet: FleetTime, bounds: Sequence[int]) -> Iterable[Sums]:
    if not fleet.points:
        return
    states = _at_bounds(fleet.points, bounds)
    for before, after in pairwise(states):
        sums: Sums = Counter()
        for name, amount in after.spent.items():
            if change := amount - before.spent.get(name, 0):
                sums["idle", name] += change
                if (price := fleet.price_micro_usd) is not None:
                    what = "spare_cost" if name == NodeState.SPARE else "other_idle_cost"
                    sums[what, ""] += price * amount // HOUR - price * before.spent.get(name, 0) // HOUR
        yield sums


def _incident_sums(incident: IncidentTime, bounds: Sequence[int], now: int) -> Iterable[tuple[int, Sums]]:
    start = incident.failed_at
    end = max(start + 1, now if incident.closed_at is None else incident.closed_at)
    cost = incident.cost_micro_usd
    for number in range(max(0, bisect_right(bounds, start) - 1), min(bisect_left(bounds, end), len(bounds) - 1)):
        sums: Sums = Counter()
        lower, upper = bounds[number], bounds[number + 1]
        if lower <= start < upper:
            sums["count", ""] = 1
            sums["recomputed", ""] = incident.lost_steps
            if incident.closed_at is not None and not incident.is_given_up:
                sums["recovered", ""] = 1
                sums["recovery", ""] = incident.closed_at - start
        low, high = (min(max(bound, start), end) - start for bound in (lower, upper))
        if cost is not None and high > low:
            sums["cost", ""] = cost * high // (end - start) - cost * low // (end - start)
        yield number, sums


def _at_bounds(points: Sequence[Ledger], bounds: Sequence[int]) -> list[Ledger]:
    moments = [point.at for point in points]
    found: list[Ledger] = []
    for bound in bounds:
        place = bisect_right(moments, bound)
        if place in (0, len(points)):
            found.append(points[0 if place == 0 else -1])
        else:
            found.append(interpolated(points[place - 1], points[place], bound))
    return found


def _ranked(groups: Mapping[str, Sums], name_of: Callable[[str], str]) -> list[str]:
    def rank(key: str) -> tuple[int, int, str, str]:
        sums = groups[key]
        cost = sum(sums.get((what, ""), 0) for what in ("cost", "spare_cost", "other_idle_cost"))
        return -cost, -sums.get(("nodes", ""), 0), name_of(key), key

    return sorted(groups, key=rank)


def _figures(sums: Sums) -> Figures:
    return Figures(
        spent={name: amount for (kind, name), amount in sorted(sums.items()) if kind == "spent"},
        node_microseconds=sums["nodes", ""],
        rank_microseconds=sums["ranks", ""],
        unpriced_node_microseconds=sums["unpriced", ""],
        cost_micro_usd=sums.get(("cost", "")),
        incidents={kind: _incident_figures(sums, f" {kind}") for kind in IncidentKind},
        idle_microseconds={name: amount for (kind, name), amount in sorted(sums.items()) if kind == "idle"},
        spare_cost_micro_usd=sums.get(("spare_cost", "")),
        other_idle_cost_micro_usd=sums.get(("other_idle_cost", "")),
    )


def _incident_figures(sums: Sums, suffix: str) -> IncidentFigures:
    return IncidentFigures(
        count=sums[f"count{suffix}", ""],
        recovered_count=sums[f"recovered{suffix}", ""],
        recovery_microseconds=sums[f"recovery{suffix}", ""],
        recomputed_steps=sums[f"recomputed{suffix}", ""],
        cost_micro_usd=sums.get((f"cost{suffix}", "")),
    )


def _micro(moment: datetime) -> int:
    passed = moment - datetime(1970, 1, 1, tzinfo=UTC)
    return (passed.days * 86_400 + passed.seconds) * 1_000_000 + passed.microseconds
