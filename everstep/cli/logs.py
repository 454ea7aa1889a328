"""What ranks print, merged over all ranks, as lines of a terminal: read, or followed through broken connections.

Invariant: a connection that breaks loses and doubles nothing: following goes on with the token of the last lines that
were shown.
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

from everstep.cli.following import kept_up
from everstep.cli.output import Json, colored, echo, say
from everstep.cli.terminal import safe_line
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
_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def since_when(text: str, now: datetime) -> datetime:
    """Return the time that `--since` means.

    Args:
        text: as `90s`, `10m`, `2h`, `1d`, or ISO 8601; without a zone UTC.
        now: the time.

    Returns:
        When.

    Raises:
        BadParameter: it is neither.
    """
    if (match := re.fullmatch(r"(\d{1,9})([smhd])", text)) is not None:
        return now - timedelta(seconds=int(match[1]) * _UNITS[match[2]])
    try:
        found = datetime.fromisoformat(text)
    except ValueError as error:
        raise typer.BadParameter(
            f"{text!r} is neither a time as 2026-03-01T12:00:00 nor a span as 90s, 10m, 2h, 1d", param_hint="--since"
        ) from error
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


def read(service: Any, name: str, query: Json) -> Iterator[Json]:
    """Yield the lines that there are when it is called, oldest first: a job that prints faster than it is read has an end, too.

    Args:
        service: the client.
        name: of the job.
        query: of GetLogEvents.

    Yields:
        Events.
    """
    page, seen = service.get_log_events(TrainingJobName=name, StartFromHead=True, **query), None
    query = {"EndTime": _answered_at(page), **query}
    while page["Events"] or page["NextForwardToken"] != seen:
        yield from page["Events"]
        seen = page["NextForwardToken"]
        page = service.get_log_events(TrainingJobName=name, NextToken=seen, **query)


def _answered_at(page: Json) -> datetime:
    """Return the server's time of an answer, to whole seconds, the begun one included."""
    from email.utils import parsedate_to_datetime  # no --help needs it

    told = page.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
    return (parsedate_to_datetime(told) if told else datetime.now(UTC)) + timedelta(seconds=1)


def follow(
    service: Any,
    name: str,
    query: Json,
    *,
    pause: Callable[[float], object] = threading.Event().wait,
    monotonic: Callable[[], float] = time.monotonic,
) -> Iterator[Json]:
    """Yield lines as they are printed, until the job has ended.

    Args:
        service: the client.
        name: of the job.
        query: of FollowLogs.
        pause: waits for so many seconds.
        monotonic: seconds of a clock that never jumps.

    Yields:
        Events.

    Raises:
        ServiceFailed: the service refuses, or has said nothing for a minute.
    """
    place = dict(query)

    def is_over() -> bool:
        return service.describe_training_job(TrainingJobName=name)["TrainingJobStatus"] in ENDED

    def connect() -> Any:
        return service.follow_logs(TrainingJobName=name, **place)["EventStream"]

    for said in kept_up(connect, is_over=is_over, pause=pause, monotonic=monotonic):
        yield from said["LogEvents"]["Events"]
        place["NextToken"] = said["LogEvents"]["NextForwardToken"]


def show(events: Iterator[Json], each: Callable[[Json], None] | None) -> None:
    """Print lines: stdout of ranks to stdout, their stderr and gaps to stderr.

    Args:
        events: of GetLogEvents.
        each: prints one for programs, instead.
    """
    has_any = False
    for event in events:
        has_any = True
        if each is not None:
            each(event)
            sys.stdout.flush()
        elif event["Stream"] == "gap":
            say(f"--- generation {event['Generation']} · {event['Message']}")
        else:
            moment = event["Timestamp"].astimezone(UTC).strftime("%H:%M:%S.%f")[:-3]
            who = colored(f"{moment} g{event['Generation']} r{event['Rank']}", _COLORS[event["Rank"] % len(_COLORS)])
            echo(f"{who} {safe_line(event['Message'])}", err=event["Stream"] == "stderr")
            sys.stdout.flush()
    if not has_any:
        say("Nothing matches, or nothing has been printed yet.")
