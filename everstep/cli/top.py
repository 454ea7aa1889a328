"""`jobs top` on a terminal: the board, drawn again whenever something happens, and every two seconds.

An event makes it look at once; how far training is, no event tells. Invariant: trouble with the service is shown and
not an end: it looks again.
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

LOOK_SECONDS: Final = 2.0
Wait = Callable[[float], Json | None]
"""Waits for an event, at most so many seconds; None: there was none."""


def jobs_under_way(service: Any, name: str | None) -> list[Json]:
    """Return the jobs that have not ended, newest first; of one name, that one, ended or not."""
    if name is not None:
        return [service.describe_training_job(TrainingJobName=name)]
    found = [
        job
        for status in ("InProgress", "Stopping")
        for job in Pages().of(service, "list_training_jobs", StatusEquals=status)["TrainingJobSummaries"]
    ]
    return sorted(found, key=lambda job: job["CreationTime"], reverse=True)


def live(service: Any, name: str | None, console: Console) -> None:
    """Show the board until the user has seen enough (^C)."""
    arrived: queue.SimpleQueue[Json] = queue.SimpleQueue()

    def read() -> None:
        # Looking goes on without events, and says what is wrong.
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
    """Yield the board after each look, without an end.

    Args:
        service: the client.
        name: of the only job that is wanted, or None.
        wait: for an event.
        now: the time.

    Yields:
        The board, and when that was.

    Raises:
        ServiceFailed: there is no such job, or the token is not good.
    """
    from everstep import failures

    seen = board.Board()
    while True:
        try:
            with failures.translated():
                seen = board.looked(seen, jobs_under_way(service, name), now())
        except ServiceFailed as error:
            if error.code != failures.UNAVAILABLE:
                raise
            seen = board.in_trouble(seen, "the service does not answer")
        yield seen, now()
        event = wait(LOOK_SECONDS)
        while event is not None:  # all that has happened is one look
            seen = board.told(seen, event)
            event = wait(0)
