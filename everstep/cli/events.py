"""`everstep events …`: what happened, in order."""

from __future__ import annotations

from typing import Annotated

import typer

from everstep.cli.commands import Columns, Pages, Rows, Service, Shown, command
from everstep.cli.names import OnlyFleet, OnlyJob
from everstep.cli.output import when

app = typer.Typer(help="What happened, in order.", no_args_is_help=True)


@command(app, "list")
def list_events(
    service: Service,
    pages: Pages,
    job: OnlyJob = None,
    fleet: OnlyFleet = None,
    after: Annotated[int, typer.Option(min=0, help="Only events after this id.")] = 0,
) -> Shown:
    """List events, oldest first."""
    answer = pages.of(service, "list_events", TrainingJobName=job, FleetName=fleet, AfterEventId=after)
    columns: Columns = {
        "ID": "EventId",
        "TIME (UTC)": lambda event: when(event["Time"]),
        "TYPE": "Type",
        "ABOUT": lambda event: event.get("TrainingJobName") or event.get("NodeId") or event.get("FleetName") or "",
        "MESSAGE": "Message",
    }
    return Shown(answer, Rows(answer["Events"], columns, empty="No events."))
