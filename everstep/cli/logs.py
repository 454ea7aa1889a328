"""Reads or follows the merged log lines of all ranks, and reconnects after each broken connection.

Invariant: a broken connection neither loses nor repeats lines, because the client resumes with the position token of
the last printed lines.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import typer
from rich.cells import set_cell_size

from everstep.cli.following import kept_up
from everstep.cli.output import Json, colored, echo, say, stdout
from everstep.cli.terminal import safe_cell, safe_line
from everstep.cli.waiting import ENDED

_COLORS: Final = (
    "cyan",
    "green",
    "yellow",
    "magenta",
    "blue",
    "bright_cyan",
    "bright_green",
    "bright_yellow",
    "bright_magenta",
    "bright_blue",
)
_MOST_LINES: Final = 10_000
"""Maximum value of the field `Limit` of GetLogEvents: the number of log lines in one answer."""
_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def since_when(text: str, now: datetime) -> datetime:
    """Return the time that the value of `--since` denotes.

    Args:
        text: a span before `now` such as `90s`, `10m`, `2h` or `1d`, or an ISO 8601 time. A time without a zone is UTC.
        now: current time, with a zone; spans are subtracted from it.

    Returns:
        The time, with a zone.

    Raises:
        BadParameter: the text is neither a span nor a time.
    """
    if (match := re.fullmatch(r"(\d{1,9})([smhd])", text)) is not None:
        return now - timedelta(seconds=int(match[1]) * _UNITS[match[2]])
    try:
        found = datetime.fromisoformat(text)
    except ValueError as error:
        raise typer.BadParameter(
            (f"{text!r} is neither a time such as 2026-03-01T12:00:00 nor a duration such as 90s, 10m, 2h or 1d"),
            param_hint="--since",
        ) from error
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


def read(service: Any, name: str, query: Json) -> Iterator[Json]:
    """Yield the lines printed before the call, oldest first.

    The function reads only lines that were printed before the service answered the first page. It therefore ends even
    if the job prints faster than the client reads.

    `query` holds the arguments of GetLogEvents except the job's name.
    """
    page, seen = service.get_log_events(TrainingJobName=name, StartFromHead=True, **query), None
    query = {"EndTime": _answered_at(page), **query}
    while page["Events"] or page["NextForwardToken"] != seen:
        yield from page["Events"]
        seen = page["NextForwardToken"]
        page = service.get_log_events(TrainingJobName=name, NextToken=seen, **query)


def tail(service: Any, name: str, query: Json, count: int) -> list[Json]:
    """Return the newest `count` lines, oldest first. The result is shorter only if fewer lines match.

    `query` holds the arguments of GetLogEvents except the job's name.
    """
    page, seen = service.get_log_events(TrainingJobName=name, Limit=min(count, _MOST_LINES), **query), None
    found: list[Json] = list(page["Events"])
    while len(found) < count and page["NextBackwardToken"] != seen:
        seen = page["NextBackwardToken"]
        left = min(count - len(found), _MOST_LINES)
        page = service.get_log_events(TrainingJobName=name, NextToken=seen, Limit=left, **query)
        found = [*page["Events"], *found]
    return found[-count:]


def _answered_at(page: Json) -> datetime:
    """Return the service's time of an answer plus one second, because the HTTP date omits fractions of a second."""
    from email.utils import parsedate_to_datetime  # Import here to keep `--help` fast.

    server_date = page.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
    return (parsedate_to_datetime(server_date) if server_date else datetime.now(UTC)) + timedelta(seconds=1)


def follow(
    service: Any,
    name: str,
    query: Json,
    *,
    pause: Callable[[float], object] = threading.Event().wait,
    monotonic: Callable[[], float] = time.monotonic,
) -> Iterator[Json]:
    """Yield log lines as the ranks print them, until the job has ended.

    Args:
        service: botocore client of this service.
        name: job whose end also ends the stream.
        query: arguments of FollowLogs except the job's name; `NextToken` sets where the stream begins.
        pause: sleeps for a number of seconds.
        monotonic: returns the seconds of a monotonic clock.

    Yields:
        Log events.

    Raises:
        ServiceFailed: the service refuses the request or has sent nothing for a minute.
    """
    place = dict(query)

    def is_over() -> bool:
        return service.describe_training_job(TrainingJobName=name)["TrainingJobStatus"] in ENDED

    def connect() -> Any:
        return service.follow_logs(TrainingJobName=name, **place)["EventStream"]

    for stream_event in kept_up(connect, is_over=is_over, pause=pause, monotonic=monotonic):
        yield from stream_event["LogEvents"]["Events"]
        place["NextToken"] = stream_event["LogEvents"]["NextForwardToken"]


def settled(events: Iterator[Json]) -> Iterator[Json]:
    """Yield log events without the states of a moving line, such as a progress bar, that a later event overwrites."""
    states: dict[tuple[int | None, str], Json] = {}
    for event in events:
        key = (event.get("Rank"), event["Stream"])
        before = states.pop(key, None)
        if event.get("Overwrites"):
            states[key] = event
            continue
        if before is not None:
            yield before
        yield event
    yield from states.values()


def show(events: Iterator[Json], each: Callable[[Json], None] | None) -> None:
    """Print log events: the ranks' stdout to stdout, their stderr and notes about lost lines to stderr.

    Args:
        events: log events of GetLogEvents or FollowLogs.
        each: prints one event in a format for programs. None prints lines for people. On a terminal, a state of a
            moving line, such as a progress bar, then replaces the state before it.
    """
    has_any = False
    moving: tuple[int, str] | None = None
    for event in events:
        has_any = True
        if each is not None:
            each(event)
            sys.stdout.flush()
        elif event["Stream"] == "gap":
            moving = None
            say(f"--- generation {event['Generation']} · {event['Message']}")
        else:
            moment = event["Timestamp"].astimezone(UTC).strftime("%H:%M:%S.%f")[:-3]
            color = _COLORS[int(event["Rank"]) % len(_COLORS)]
            who = f"{moment} g{event['Generation']} r{event['Rank']}"
            line, is_error = safe_line(event["Message"]), event["Stream"] == "stderr"
            is_moving = bool(event.get("Overwrites")) and (sys.stderr if is_error else sys.stdout).isatty()
            if is_moving:
                # One row of the terminal, which the next state overwrites
                line = set_cell_size(safe_cell(line), max(0, stdout().width - len(who) - 1)).rstrip()
                if moving == (event["Rank"], event["Stream"]):
                    typer.echo("\x1b[1A\x1b[2K", err=is_error, nl=False)
            moving = (event["Rank"], event["Stream"]) if is_moving else None
            echo(f"{colored(who, color)} {line}", err=is_error)
            sys.stdout.flush()
    if not has_any:
        say("No line matches, or the ranks have printed nothing yet.")
