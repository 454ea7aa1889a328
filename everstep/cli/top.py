"""Draws the live display of `jobs top` (the board), after every event and at least every two seconds.

The module polls the service after each event. It also polls at intervals, because no event reports a job's current
step.

Invariant: after a failed poll, the board shows the reason, and polling continues.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final

from rich.console import Console
from rich.live import Live

from everstep.cli import board, following
from everstep.cli.commands import Pages
from everstep.cli.output import Json, without_none
from everstep.errors import ServiceFailed

REFRESH_SECONDS: Final = 2.0
Wait = Callable[[float], Json | None]
"""Function that waits for the next event, for at most the given seconds. It returns None if no event arrived."""


def jobs_under_way(service: Any, name: str | None) -> list[Json]:
    """Return the jobs that have not ended, newest first.

    With a name, return only the job of this name, even if it has ended.
    """
    if name is not None:
        return [service.describe_training_job(TrainingJobName=name)]
    found = [
        job
        for status in ("InProgress", "Stopping")
        for job in Pages().of(service, "list_training_jobs", StatusEquals=status)["TrainingJobSummaries"]
    ]
    return sorted(found, key=lambda job: job["CreationTime"], reverse=True)


def live(service: Any, name: str | None, console: Console) -> None:
    """Show the live display of jobs (the board) and keep it current until the user presses ^C."""
    arrived: queue.SimpleQueue[Json] = queue.SimpleQueue()

    def read() -> None:
        # Ignore a failed request for events. `boards` polls the service again, and shows its failure in the live
        # display.
        with suppress(ServiceFailed):
            for event in following.events(service, without_none(TrainingJobName=name)):
                arrived.put(event)

    def wait(seconds: float) -> Json | None:
        try:
            return arrived.get(timeout=seconds)
        except queue.Empty:
            return None

    threading.Thread(target=read, name="events", daemon=True).start()
    with suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False, screen=True) as drawn:
        for seen, now in boards(service, name, wait=wait, now=lambda: datetime.now(UTC)):
            drawn.update(board.picture(seen, now, console.width), refresh=True)


def boards(
    service: Any, name: str | None, *, wait: Wait, now: Callable[[], datetime]
) -> Iterator[tuple[board.Board, datetime]]:
    """Poll the jobs forever, and yield the content of the live display (the board) after each poll.

    Args:
        service: botocore client of this service.
        name: shows only the job of this name; None shows all unfinished jobs.
        wait: waits up to the given seconds; returns the next event, or None if no event came.
        now: clock; returns a time with a zone.

    Yields:
        The board and the time of the poll.

    Raises:
        ServiceFailed: the job does not exist, or the token is not valid.
    """
    from everstep import failures

    seen = board.Board()
    while True:
        try:
            with failures.translated():
                seen = board.with_jobs(seen, jobs_under_way(service, name), now())
        except ServiceFailed as error:
            if error.code != failures.UNAVAILABLE:
                raise
            seen = board.in_trouble(seen, "the service does not answer")
        yield seen, now()
        event = wait(REFRESH_SECONDS)
        # Process all events that have arrived, and then poll the service once.
        while event is not None:
            seen = board.with_event(seen, event)
            event = wait(0)
