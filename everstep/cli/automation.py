"""`everstep automation …`: pause and resume all automatic actions of the control plane."""

from __future__ import annotations

from typing import Annotated

import typer

from everstep.cli.commands import Service, Shown, command
from everstep.cli.output import Facts, Json, moment

app = typer.Typer(no_args_is_help=True, add_completion=False)


@command(app)
def describe(service: Service) -> Shown:
    """Show whether automatic actions are paused, by whom and why."""
    return _shown(service.describe_automation())


@command(app, asks=lambda _: "Pause all automatic actions? Nothing recovers a failed job until you resume them.")
def pause(service: Service, reason: Annotated[str, typer.Option(help="Why; jobs and fleets show this text.")]) -> Shown:
    """Stop all automatic actions: Everstep launches and terminates no instance and restarts no job.

    Running jobs continue to train and to store snapshots.
    """
    return _shown(service.pause_automation(Reason=reason))


@command(app)
def resume(service: Service) -> Shown:
    """Resume all automatic actions. Everstep then responds to what happened during the pause."""
    return _shown(service.resume_automation())


def _shown(automation: Json) -> Shown:
    if not automation["IsPaused"]:
        return Shown(automation, "Automatic actions are active.")
    return Shown(
        automation,
        Facts(
            [
                ("automatic actions", "paused"),
                ("reason", automation["Reason"]),
                ("paused by", automation["PausedBy"]),
                ("since", moment(automation["PauseTime"])),
            ]
        ),
    )
