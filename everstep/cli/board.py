"""What `jobs top` shows: jobs that have not ended, how fast they step, what happened last.

Pure; `top` keeps it up to date and draws it.

Invariant: a figure is what the service said last, and the head says when that was.
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
"""A rate is taken over this long at the least: steps come in whole numbers."""
_STYLES: Final = {"Training": "green", "Recovering": "yellow", "Failed": "red", "Paused": "dim", "Pending": "cyan"}


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast a job steps."""

    since: datetime
    boundary: int
    """What it had reached then."""
    steps_per_second: float | None = None


@dataclass(frozen=True, slots=True)
class Board:
    """What is known."""

    jobs: tuple[Json, ...] = ()
    """Summaries, newest first."""
    paces: Mapping[str, Pace] = field(default_factory=dict)
    """By run."""
    events: tuple[Json, ...] = ()
    """The newest, oldest first."""
    looked_at: datetime | None = None
    trouble: str = ""
    """Why it is not newer."""


def looked(board: Board, jobs: Sequence[Json], now: datetime) -> Board:
    """Return the board after a look at the jobs.

    Args:
        board: as it was.
        jobs: summaries, as the service lists them.
        now: the time.

    Returns:
        The new one; jobs that are not listed any more are gone from it.
    """
    paces = {job["RunId"]: _pace(board.paces.get(job["RunId"]), job["Boundary"], now) for job in jobs}
    return replace(board, jobs=tuple(jobs), paces=paces, looked_at=now, trouble="")


def told(board: Board, event: Json) -> Board:
    """Return the board after an event."""
    return replace(board, events=(*board.events, event)[-EVENTS_SHOWN:])


def in_trouble(board: Board, words: str) -> Board:
    """Return the board after a look that failed: what is known stays."""
    return replace(board, trouble=words)


def picture(board: Board, now: datetime, width: int) -> RenderableType:
    """Return what a terminal of `width` columns shows of a board at a time."""
    seconds = 0 if board.looked_at is None else int((now - board.looked_at).total_seconds())
    age = "not asked yet" if board.looked_at is None else "now" if seconds < 1 else f"{seconds} s ago"
    head = Text.assemble(
        (f"everstep · {when(now)} UTC", "bold"), f" · {counted(len(board.jobs), 'job')} under way, as of {age}"
    )
    if board.trouble:
        head.append(safe_cell(f" · {board.trouble}"), style="red")
    return Group(head, Text(), _jobs(board, now, width), Text(), _events(board))


def _pace(before: Pace | None, boundary: int, now: datetime) -> Pace:
    if before is None or boundary < before.boundary:  # another generation began from an older step
        return Pace(now, boundary)
    spent = (now - before.since).total_seconds()
    return before if spent < RATE_SECONDS else Pace(now, boundary, (boundary - before.boundary) / spent)


def _jobs(board: Board, now: datetime, width: int) -> RenderableType:
    if not board.jobs:
        return Text("No job is under way.", style="dim")

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
