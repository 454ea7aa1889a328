"""What `jobs top` shows: jobs that have not ended, how fast they step, what happened last. Pure; `top` keeps it up to date and draws it.

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

from everstep.cli.output import Json, step, when

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


def picture(board: Board, now: datetime) -> RenderableType:
    """Return what is seen of a board at a time."""
    seconds = 0 if board.looked_at is None else int((now - board.looked_at).total_seconds())
    age = "not asked yet" if board.looked_at is None else "now" if seconds < 1 else f"{seconds} s ago"
    head = Text.assemble((f"everstep · {when(now)} UTC", "bold"), f" · {len(board.jobs)} jobs under way, as of {age}")
    if board.trouble:
        head.append(f" · {board.trouble}", style="red")
    return Group(head, Text(), _jobs(board, now), Text(), _events(board))


def _pace(before: Pace | None, boundary: int, now: datetime) -> Pace:
    if before is None or boundary < before.boundary:  # another generation began from an older step
        return Pace(now, boundary)
    spent = (now - before.since).total_seconds()
    return before if spent < RATE_SECONDS else Pace(now, boundary, (boundary - before.boundary) / spent)


def _jobs(board: Board, now: datetime) -> RenderableType:
    if not board.jobs:
        return Text("No job is under way.", style="dim")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("JOB", "STATUS", "STEP", "COMMITTED", "STEPS/s", "ETTR", "NODES", "GEN", "RUNS FOR", "REASON"):
        table.add_column(heading, overflow="ellipsis" if heading == "REASON" else "fold", no_wrap=True)
    for job in board.jobs:
        rate, ettr, began = board.paces[job["RunId"]].steps_per_second, job.get("EttrRatio"), job.get("TrainingStartTime")
        status = job["SecondaryStatus"]
        table.add_row(
            Text(job["TrainingJobName"]),
            Text(status, style=_STYLES.get(status, "")),
            step(job["Boundary"]),
            step(job["CommittedStep"]),
            "-" if rate is None else f"{rate:.2f}",
            "-" if ettr is None else f"{ettr:.3f}",
            str(job["NodeCount"]),
            str(job["Generation"]),
            "-" if began is None else _long((now - began).total_seconds()),
            Text(job["Reason"]),
        )
    return table


def _events(board: Board) -> RenderableType:
    table = Table(box=None, pad_edge=False, show_header=False)
    for name in ("time", "type", "message"):
        table.add_column(name, no_wrap=True, overflow="ellipsis")
    for event in board.events:
        table.add_row(Text(event["Time"].astimezone(UTC).strftime("%H:%M:%S"), style="dim"), Text(event["Type"]), Text(event["Message"]))
    return table


def _long(seconds: float) -> str:
    whole = max(int(seconds), 0)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {whole % 60:02} s"
