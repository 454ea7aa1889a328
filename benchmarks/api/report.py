"""Report of an API benchmark run: limits, measured values and caveats. Pure except for `write`."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.document import BenchmarkRun, caveats, judged, opening, table, unless_busy, write_figures
from benchmarks.measures import FLOOR_TOLERANCE_RATIO, Summary, moved_ratio
from control_plane.contract.markdown import wrap

COMMAND = "make bench-api"
DESCRIBE_RATIO = 0.5
LIST_MILLISECONDS = 50.0
HEARTBEATS_PER_SECOND = 10_000.0
FOLLOW_MILLISECONDS = 300.0
HELP_MILLISECONDS = 200.0
COMMAND_MILLISECONDS = 500.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(BenchmarkRun):
    """Measured values of one run. Parts of the benchmark that were not run are empty."""

    bare_rates: Sequence[float] = ()
    """Responses per second of the bare FastAPI route, before, between and after the other measurements."""
    describe_rates: Sequence[float] = ()
    describe_new_rates: Sequence[float] = ()
    """Responses per second if each request describes another job.

    No cached response is used then.
    """
    writes_per_second: float = 0.0
    job_count: int = 0
    list_seconds: Sequence[float] = ()
    heartbeat_rates: Sequence[float] = ()
    """Reports per second of wall time or of the server's CPU time, whichever rate is lower."""
    heartbeat_bytes: int = 0
    agent_count: int = 0
    follow_seconds: Sequence[float] = ()
    """Delay of each line of the job, in order of arrival."""
    command_seconds: dict[str, Sequence[float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured value with its limit."""

    what: str
    measured: float
    limit: float
    is_least: bool
    unit: str
    count: int
    is_inconclusive: bool = False
    is_judged: bool = True
    """False: the table shows the value with the previous row's limit, but the exit code ignores it."""

    @property
    def is_reached(self) -> bool:
        """Whether the value is within its limit."""
        return self.measured >= self.limit if self.is_least else self.measured <= self.limit

    @property
    def falls_short(self) -> bool:
        """Whether a judged, conclusive value misses its limit."""
        return self.is_judged and not self.is_inconclusive and not self.is_reached

    @property
    def verdict(self) -> str:
        """The verdict as shown in the table."""
        if self.is_inconclusive:
            return "inconclusive"
        if not self.is_judged:
            return f"not judged; {'would pass' if self.is_reached else 'would fall short'}"
        return "pass" if self.is_reached else "**falls short**"


def rows(run: Run) -> list[Row]:
    """Return the rows of all measured values."""
    found = []
    if run.bare_rates and run.describe_rates:
        held = Row(
            what="DescribeTrainingJob of one job, with a token, by the rate of a bare route: answers are held "
            "between commits",
            measured=statistics.median(run.describe_rates) / statistics.median(run.bare_rates),
            limit=DESCRIBE_RATIO,
            is_least=True,
            unit="×",
            count=len(run.describe_rates),
            is_inconclusive=moved_ratio(run.bare_rates[0], run.bare_rates[-1]) > FLOOR_TOLERANCE_RATIO,
        )
        found.append(held)
        if run.describe_new_rates:
            found.append(
                dataclasses.replace(
                    held,
                    what="the same, each of another job: every answer is made anew",
                    measured=statistics.median(run.describe_new_rates) / statistics.median(run.bare_rates),
                    count=len(run.describe_new_rates),
                    is_judged=False,
                )
            )
    if run.list_seconds:
        found.append(
            _most(
                f"ListTrainingJobs of {run.job_count:,} jobs, a page of 100, p99",
                _p99(run.list_seconds),
                LIST_MILLISECONDS,
                run.list_seconds,
            )
        )
    if run.heartbeat_rates:
        rate = statistics.median(run.heartbeat_rates)
        found.append(
            Row(
                what="reports of agents on one core",
                measured=rate,
                limit=HEARTBEATS_PER_SECOND,
                is_least=True,
                unit="/s",
                count=len(run.heartbeat_rates),
            )
        )
    if run.follow_seconds:
        found.append(
            _most(
                "a line is printed → who follows has it, p99",
                _p99(run.follow_seconds),
                FOLLOW_MILLISECONDS,
                run.follow_seconds,
            )
        )
    for command, seconds in run.command_seconds.items():
        limit = HELP_MILLISECONDS if command.endswith("--help") else COMMAND_MILLISECONDS
        found.append(_most(f"`{command}`, median", statistics.median(seconds), limit, seconds))
    return unless_busy(run, found)


def _p99(seconds: Sequence[float]) -> float:
    return Summary.of(seconds).p99


def _most(what: str, seconds: float, limit: float, samples: Sequence[float]) -> Row:
    return Row(what=what, measured=seconds * 1000, limit=limit, is_least=False, unit="ms", count=len(samples))


def write(run: Run, figures: Path, document: Path) -> None:
    """Write the report.

    Args:
        run: the measured values.
        figures: path of the JSON file.
        document: path of the Markdown file.
    """
    write_figures(figures, dataclasses.asdict(run) | {"rows": judged(rows(run))})
    document.write_text(wrap(render(run)))


def render(run: Run) -> str:
    """Return the Markdown document."""
    return "\n\n".join([_head(run), _reached(run), _spread(run), _limits()]) + "\n"


def _head(run: Run) -> str:
    machine = run.machine
    lines = [
        *opening(run, "# How fast the service answers", COMMAND, "api.json"),
        f"- Machine: {machine.words()}. Load average before the run: {machine.load}.",
        "- The server is one process with SQLite; the load comes from one other process, over loopback. 16 "
        "requests are under way at one time "
        "for rates, one for latencies.",
    ]
    if run.describe_rates:
        lines.append(
            "- DescribeTrainingJob: requests for one job with an administrator's token, while another process "
            "commits to the database "
            f"{run.writes_per_second:.0f} times a second: each commit makes all answers that are held void. So "
            "the first row is what a dashboard, a "
            "waiter and a script find that look at the same jobs: hundreds of answers come from one. The second "
            "is what an answer costs that nobody "
            "has asked for since the last commit: a token and four questions to the database, each through "
            "SQLAlchemy, in two threads; it is shown, "
            "and not judged. The bare route is FastAPI's `async def` "
            "that returns a dict with one entry, served by the same process on another port, without a token; "
            "it is measured before and after, "
            f"and the row is inconclusive where the two differ by more than {FLOOR_TOLERANCE_RATIO:.0%}."
        )
    if run.list_seconds:
        lines.append(
            "- ListTrainingJobs: every page of the list in four orders. No page is asked for twice, so none was held."
        )
    if run.heartbeat_rates:
        lines.append(
            f"- Reports: {run.agent_count} agents send what a node with 8 ranks reports in the middle of "
            f"training ({run.heartbeat_bytes} bytes) as "
            "fast as they can. A rate is what the server has taken by its CPU time, or by the time that passed "
            "if that was more. The loops do not "
            "run; reports without news do not wake them."
        )
    if run.follow_seconds:
        lines.append(
            "- Followed logs: a job on one node of a local cluster prints the time; the delay is until boto3 "
            "has given the line to its caller. The "
            "follower came before the job was launched, and every line counts. The first was "
            f"{run.follow_seconds[0] * 1000:.0f} ms late: an agent sends lines once it is asked for them, and "
            "is asked when the follower sees the "
            "launch."
        )
    if run.command_seconds:
        lines.append("- Commands: a process each, its start included; `jobs list` shows a page of the same jobs.")
    lines += caveats(machine, is_quick=run.is_quick)
    return "\n".join(lines)


def _reached(run: Run) -> str:
    body = [
        [
            row.what,
            f"**{row.measured:,.{0 if row.measured >= 100 else 2}f}** {row.unit}",
            f"{'≥' if row.is_least else '≤'} {row.limit:,g} {row.unit}",
            str(row.count),
            row.verdict,
        ]
        for row in rows(run)
    ]
    return "## What was to be reached\n\n" + table(("what", "measured", "to reach", "n", "verdict"), body)


def _spread(run: Run) -> str:
    rates = {
        "bare route, answers/s": run.bare_rates,
        "DescribeTrainingJob, answers/s": run.describe_rates,
        "DescribeTrainingJob, each of another job, answers/s": run.describe_new_rates,
        "reports of agents/s": run.heartbeat_rates,
    }
    timed = {"ListTrainingJobs, ms": run.list_seconds, "followed logs, ms": run.follow_seconds}
    timed |= {f"`{command}`, ms": seconds for command, seconds in run.command_seconds.items()}
    body = [
        [what, *(f"{value:,.0f}" for value in (min(found), statistics.median(found), max(found))), ""]
        for what, found in rates.items()
        if found
    ]
    for what, seconds in timed.items():
        if seconds:
            summary = Summary.of(seconds)
            values = (summary.minimum, summary.median, summary.maximum, summary.p99)
            body.append([what, *(f"{value * 1000:,.1f}" for value in values)])
    return "## All figures\n\n" + table(("what", "least", "median", "most", "p99"), body)


def _limits() -> str:
    return (
        "## What this does not say\n\nOne machine: load and server share its cores, and the network is a "
        "loopback. What a busy service answers lies "
        "between the two rows of DescribeTrainingJob, by how many look at the same job. PostgreSQL was not measured."
    )
