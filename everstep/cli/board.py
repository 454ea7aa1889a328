"""Computes the content of `jobs top`: unfinished jobs, their step rates and the latest events.

Pure: `everstep.cli.top` polls the service, updates the board and draws it.

Invariant: the board shows only values from the service's latest answer, and its heading shows the age of this answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from everstep.cli import steps, tables
from everstep.cli.output import Json, cell, counted, duration, step, when
from everstep.cli.terminal import safe_cell

EVENTS_SHOWN: Final = 8
RATE_SECONDS: Final = 5.0
"""Shortest time in seconds over which a job's step rate is measured.

Steps are whole numbers, so a rate over a shorter time would be noisy.
"""
_STYLES: Final = {"Training": "green", "Recovering": "yellow", "Failed": "red", "Paused": "dim", "Pending": "cyan"}


@dataclass(frozen=True, slots=True)
class Pace:
    """The step rate of one job, and the time and step at which the measurement of the rate began."""

    since: datetime
    boundary: int
    """Number of steps that the job had finished at the time `since`."""
    steps_per_second: float | None = None


@dataclass(frozen=True, slots=True)
class Board:
    """Content of `jobs top`. Immutable: each update returns a new board."""

    jobs: tuple[Json, ...] = ()
    """Job summaries as the service lists them, newest first."""
    paces: Mapping[str, Pace] = field(default_factory=dict[str, Pace])
    """Step rate of each unfinished job, by run id."""
    events: tuple[Json, ...] = ()
    """The latest `EVENTS_SHOWN` events, oldest first."""
    polled_at: datetime | None = None
    trouble: str = ""
    """Reason why the latest poll failed; empty after a successful poll."""


def with_jobs(board: Board, jobs: Sequence[Json], now: datetime) -> Board:
    """Return the board, the content of `jobs top`, after a successful poll of the jobs.

    Args:
        board: the board after the previous poll, with the step rates of its jobs.
        jobs: summaries in the service's order.
        now: time of the poll, with a time zone.

    Returns:
        A board with exactly these jobs. It drops the step rates of jobs that are not listed any more.
    """
    paces = {job["RunId"]: _pace(board.paces.get(job["RunId"]), job["Boundary"], now) for job in jobs}
    return replace(board, jobs=tuple(jobs), paces=paces, polled_at=now, trouble="")


def with_event(board: Board, event: Json) -> Board:
    """Return the board (the content of `jobs top`) after the arrival of one more event.

    The oldest event is dropped if there are more than `EVENTS_SHOWN` events.
    """
    return replace(board, events=(*board.events, event)[-EVENTS_SHOWN:])


def in_trouble(board: Board, words: str) -> Board:
    """Return the board (the content of `jobs top`) after a failed poll.

    The new board keeps the jobs of `board`, and shows `words` as the reason of the failure.
    """
    return replace(board, trouble=words)


def picture(board: Board, now: datetime, width: int) -> RenderableType:
    """Return what rich prints for `jobs top` at the time `now`, in a terminal of `width` columns."""
    seconds = 0 if board.polled_at is None else int((now - board.polled_at).total_seconds())
    age = "not polled yet" if board.polled_at is None else "now" if seconds < 1 else f"{seconds} s ago"
    head = Text.assemble(
        (f"everstep · {when(now)} UTC", "bold"), f" · {counted(len(board.jobs), 'job')} in progress, as of {age}"
    )
    if board.trouble:
        head.append(safe_cell(f" · {board.trouble}"), style="red")
    return Group(head, Text(), _jobs(board, now, width), Text(), _events(board))


def _pace(before: Pace | None, boundary: int, now: datetime) -> Pace:
    # Start a new measurement for a new job, and if a new generation restarted from an older step.
    if before is None or boundary < before.boundary:
        return Pace(now, boundary)
    spent = (now - before.since).total_seconds()
    return before if spent < RATE_SECONDS else Pace(now, boundary, (boundary - before.boundary) / spent)


def _jobs(board: Board, now: datetime, width: int) -> RenderableType:
    if not board.jobs:
        return Text("No job is in progress.", style="dim")

    def rate(job: Json) -> str:
        steps_per_second = board.paces[job["RunId"]].steps_per_second
        return "-" if steps_per_second is None else f"{steps_per_second:.2f}"

    def ettr(job: Json) -> str:
        ratio = job.get("EttrRatio")
        return "-" if ratio is None else f"{ratio:.3f}"

    def runs_for(job: Json) -> str:
        began = job.get("TrainingStartTime")
        return "-" if began is None else duration((now - began).total_seconds())

    columns: tables.Columns = {
        "JOB": "TrainingJobName",
        "STATUS": "SecondaryStatus",
        "STEP": steps.reached,
        "PROGRESS": tables.Detail(steps.bar),
        "LEFT": lambda job: steps.remaining(job) or "-",
        "STEPS/s": rate,
        "ETTR": tables.Detail(ettr),
        "COMMITTED": tables.Detail(lambda job: step(job["CommittedStep"])),
        "NODES": tables.Detail("NodeCount"),
        "GEN": tables.Detail("Generation"),
        "RUNS FOR": tables.Detail(runs_for),
        "REASON": tables.Prose("Reason"),
    }
    lines = tables.lines(tables.cells_of(board.jobs, columns), columns, width)
    for line, job in zip(lines[1:], board.jobs, strict=True):
        line.highlight_words([job["SecondaryStatus"]], style=_STYLES.get(job["SecondaryStatus"], ""))
    return Group(*lines)


def _events(board: Board) -> RenderableType:
    table = Table(box=None, pad_edge=False, show_header=False)
    for name in ("time", "type", "message"):
        table.add_column(name, no_wrap=True, overflow="ellipsis")
    for event in board.events:
        table.add_row(
            Text(event["Time"].astimezone(UTC).strftime("%H:%M:%S"), style="dim"),
            cell(event["Type"]),
            cell(event["Message"]),
        )
    return table
