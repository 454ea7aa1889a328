"""Prints the progress of a job while `jobs wait` and `wait …` wait.

On a terminal, the module keeps one line current. Without a terminal, it prints each line once, after a change. In both
cases it prints a line when an incident opens and when it ends.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, Self

from rich.console import Console
from rich.status import Status

from everstep.cli import steps
from everstep.cli.commands import Pages
from everstep.cli.output import Json, cell, counted, duty_words, seconds, stderr, step
from everstep.cli.waiting import ENDED

QUIET_SECONDS: Final = 10.0
"""Minimum seconds between printed lines if only the step, or the reason of a job that trains, has changed.

The reason of a suspected hang contains an age, which changes with every poll. The live display has no such limit.
"""
_TRAINS: Final = ("Training", "Stopping")


class Progress:
    """Prints the progress of one job to stderr. Use as a context manager, which clears the live line at the end.

    Args:
        service: client for the list of incidents.
        name: job whose incidents are listed.
        console: output of the printed lines; None: stderr, with a live line on a terminal.
        monotonic: returns the seconds of a monotonic clock.
    """

    def __init__(
        self,
        service: Any,
        name: str,
        *,
        console: Console | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._service = service
        self._name = name
        self._console = console or stderr()
        self._monotonic = monotonic
        self._live: Status | None = self._console.status("") if sys.stderr.isatty() and console is None else None
        self._shown_state: tuple[object, ...] | None = None
        self._shown_at = 0.0
        self._shown_line: str = ""
        self._incidents: dict[str, str] = {}

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, job: Json) -> None:
        """Print the state of a job that has not ended, if it has changed. Called after every poll.

        The command that waits says how the job ended.
        """
        self._show_incidents(job)
        if job["TrainingJobStatus"] in ENDED:
            return
        line = line_of(job)
        if self._live is not None:
            self._live.update(cell(line))
            return
        status = job["SecondaryStatus"]
        news = (status, job["Generation"], duty_words(job), "" if status in _TRAINS else job["Reason"])
        now = self._monotonic()
        is_due = news != self._shown_state or now - self._shown_at >= QUIET_SECONDS
        if is_due and line != self._shown_line:
            self._console.print(cell(line), soft_wrap=True)
            self._shown_state, self._shown_at, self._shown_line = news, now, line

    def _show_incidents(self, job: Json) -> None:
        if not job["IncidentCount"]:
            return
        for incident in Pages().of(self._service, "list_incidents", TrainingJobName=self._name)["Incidents"]:
            state = "closed" if incident.get("ClosedAt") else "open"
            if self._incidents.get(incident["IncidentId"]) != state:
                self._incidents[incident["IncidentId"]] = state
                self._console.print(cell(incident_line(incident)), soft_wrap=True)


def line_of(job: Json) -> str:
    """Return the state of a job as one line."""
    status, duty = job["SecondaryStatus"], job.get("Duty", {})
    needed = f" {duty['Sentence']}" if duty.get("Urgency") in ("Now", "Later") else ""
    if job["Boundary"] < 0 or status not in _TRAINS:
        return f"{job['TrainingJobName']}: {status}: {job['Reason']}{needed}"
    incidents = f", {counted(job['IncidentCount'], 'incident')}" if job["IncidentCount"] else ""
    committed = f"committed {step(job['CommittedStep'])}"
    return (
        f"{job['TrainingJobName']}: {status}, {steps.words(job)}, {committed}, generation "
        f"{job['Generation']}{incidents}; {job['Reason']}{needed}"
    )


def incident_line(incident: Json) -> str:
    """Return one line about an incident: its cause and decision while open, its outcome and duration when closed."""
    if not incident.get("ClosedAt"):
        evidence = incident["Evidence"][0] if incident["Evidence"] else incident["Reason"]
        return f"! {incident['Cause']}: {evidence} → {incident['Decision']}"
    phases = [incident.get(f"{phase}Seconds") for phase in ("Detect", "Replace", "Restore", "Rework")]
    total = seconds(sum(phase or 0.0 for phase in phases))
    if "RestoredAt" not in incident:
        return f"✗ {incident['Cause']}: the job ended before training ran again, {total} s after the failure"
    restored = f"training again from step {step(incident.get('FromStep'))} ({incident.get('RestoreSource', 'nothing')})"
    return f"✓ {incident['Cause']}: {restored}, {counted(incident.get('LostSteps', 0), 'step')} lost, {total} s"
