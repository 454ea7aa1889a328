"""Computes the table rows, verdicts and documentation page of the API benchmark. Pure."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.measures import FLOOR_TOLERANCE_RATIO, Summary, moved_ratio
from benchmarks.page import BenchmarkRun, Page
from benchmarks.rows import Row, limits, table, without_verdicts

DESCRIBE_RATIO = 0.5
LIST_MILLISECONDS = 50.0
HEARTBEATS_PER_SECOND = 10_000.0
FOLLOW_MILLISECONDS = 300.0
HELP_MILLISECONDS = 200.0
COMMAND_MILLISECONDS = 500.0
BESIDE_HOSTILE_RATIO = 3.0
HOSTILE_MEBIBYTES = 256.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(BenchmarkRun):
    """Measured values of one run. Parts that were not measured are empty."""

    bare_rates: Sequence[float] = ()
    """Responses per second of a route that returns a constant, measured repeatedly: the machine's speed."""
    describe_rates: Sequence[float] = ()
    describe_new_rates: Sequence[float] = ()
    """Each request describes another job, so that the server can use no cached response."""
    writes_per_second: float = 0.0
    job_count: int = 0
    list_seconds: Sequence[float] = ()
    heartbeat_rates: Sequence[float] = ()
    """Processed reports ÷ seconds by round, wall time or, if longer because threads run in parallel, CPU time."""
    heartbeat_bytes: int = 0
    agent_count: int = 0
    follow_seconds: Sequence[float] = ()
    """Seconds from the job's print of a line until the client received it."""
    command_seconds: dict[str, Sequence[float]] = field(default_factory=dict)
    quiet_seconds: Sequence[float] = ()
    """Response times of a well-behaved caller alone, before each kind of hostile callers."""
    hostile_seconds: dict[str, Sequence[float]] = field(default_factory=dict)
    """Response times of the same caller beside hostile callers, by their kind."""
    hostile_bytes: dict[str, float] = field(default_factory=dict)
    """Growth of the server's memory to its peak, by kind."""


def rows(run: Run) -> list[Row]:
    """Return one table row per measured value, with limit and verdict."""
    found = []
    if run.bare_rates and run.describe_rates:
        bare, moved = statistics.median(run.bare_rates), moved_ratio(run.bare_rates[0], run.bare_rates[-1])
        cached = Row(
            what="DescribeTrainingJob of one job ÷ bare route, cached between commits",
            value=statistics.median(run.describe_rates) / bare,
            unit="×",
            n=len(run.describe_rates),
            limit=DESCRIBE_RATIO,
            is_least=True,
        )
        found.append(cached.judged(f"the bare route moved by {moved:.0%}" if moved > FLOOR_TOLERANCE_RATIO else ""))
        if run.describe_new_rates:
            uncached = dataclasses.replace(
                cached,
                what="the same, each request of another job, not cached",
                value=statistics.median(run.describe_new_rates) / bare,
                n=len(run.describe_new_rates),
            )
            would = "would pass" if uncached.is_reached else "would fall short"
            found.append(dataclasses.replace(uncached, reason=f"not judged; {would}"))
    if run.list_seconds:
        what = f"ListTrainingJobs of {run.job_count:,} jobs, a page of 100, p99"
        found.append(_most(what, _p99(run.list_seconds), LIST_MILLISECONDS, run.list_seconds))
    if run.heartbeat_rates:
        found.append(
            Row(
                what="reports of agents on one core",
                value=statistics.median(run.heartbeat_rates),
                unit="/s",
                n=len(run.heartbeat_rates),
                limit=HEARTBEATS_PER_SECOND,
                is_least=True,
            ).judged()
        )
    if run.follow_seconds:
        what = "from a printed line to the follower, p99"
        found.append(_most(what, _p99(run.follow_seconds), FOLLOW_MILLISECONDS, run.follow_seconds))
    for command, seconds in run.command_seconds.items():
        limit = HELP_MILLISECONDS if command.endswith("--help") else COMMAND_MILLISECONDS
        found.append(_most(f"`{command}`, median", statistics.median(seconds), limit, seconds))
    for kind, seconds in run.hostile_seconds.items():
        ratio = _p99(seconds) / _p99(run.quiet_seconds)
        what = f"p99 of a caller beside {kind} ÷ alone"
        found.append(Row(what=what, value=ratio, limit=BESIDE_HOSTILE_RATIO, unit="×", n=len(seconds)).judged())
    if run.hostile_bytes:
        kind, most = max(run.hostile_bytes.items(), key=lambda each: each[1])
        what, mebibytes = f"most memory for hostile callers ({kind})", most / 2**20
        row = Row(what=what, value=mebibytes, limit=HOSTILE_MEBIBYTES, unit="MiB", n=len(run.hostile_bytes))
        found.append(row.judged())
    return without_verdicts(found) if run.is_busy else found


def _p99(seconds: Sequence[float]) -> float:
    return Summary.of(seconds).p99


def _most(what: str, seconds: float, limit: float, samples: Sequence[float]) -> Row:
    return Row(what=what, value=seconds * 1000, limit=limit, unit="ms", n=len(samples)).judged()


def values(run: Run) -> dict[str, str | None]:
    """Return the text per placeholder of the page's template.

    None omits its paragraph, item or section (`benchmarks.page`).
    """
    return {
        "machine": run.machine.words(),
        "writes": f"{run.writes_per_second:.0f}" if run.describe_rates else None,
        "bare_tolerance": f"{FLOOR_TOLERANCE_RATIO:.0%}" if run.describe_rates else None,
        "lists": "yes" if run.list_seconds else None,
        "agents": str(run.agent_count) if run.heartbeat_rates else None,
        "heartbeat_bytes": str(run.heartbeat_bytes),
        "first_line": f"{run.follow_seconds[0] * 1000:.0f}" if run.follow_seconds else None,
        "commands": "yes" if run.command_seconds else None,
        "hostile": f"{len(run.quiet_seconds):,}" if run.hostile_seconds else None,
        "limits": limits(rows(run)),
        "spread": _spread(run),
    }


def _spread(run: Run) -> str:
    rates = {
        "bare route, responses/s": run.bare_rates,
        "DescribeTrainingJob, responses/s": run.describe_rates,
        "DescribeTrainingJob, each of another job, responses/s": run.describe_new_rates,
        "reports of agents/s": run.heartbeat_rates,
    }
    timed = {"ListTrainingJobs, ms": run.list_seconds, "followed logs, ms": run.follow_seconds}
    timed |= {f"`{command}`, ms": seconds for command, seconds in run.command_seconds.items()}
    timed |= {"a caller alone, ms": run.quiet_seconds}
    timed |= {f"beside {kind}, ms": seconds for kind, seconds in run.hostile_seconds.items()}
    body = [
        [what, *(f"{value:,.0f}" for value in (min(found), statistics.median(found), max(found))), ""]
        for what, found in rates.items()
        if found
    ]
    for what, seconds in timed.items():
        if seconds:
            summary = Summary.of(seconds)
            measured = (summary.minimum, summary.median, summary.maximum, summary.p99)
            body.append([what, *(f"{value * 1000:,.1f}" for value in measured)])
    return table(("what", "least", "median", "most", "p99"), body)


PAGE = Page(name="api", command="make bench-api", run=Run, values=values, rows=rows)
