"""`everstep events …`: what happened, in order."""

from __future__ import annotations

from typing import Annotated

import typer

from everstep.cli.output import Columns, Output, OutputFormat, connect, listed, show_json, show_rows, when

app = typer.Typer(help="What happened, in order.", no_args_is_help=True)


@app.command("list")
def list_events(
    job: Annotated[str | None, typer.Option(help="Only of this training job.")] = None,
    fleet: Annotated[str | None, typer.Option(help="Only of this fleet.")] = None,
    after: Annotated[int, typer.Option(min=0, help="Only events after this id.")] = 0,
    limit: Annotated[int, typer.Option(min=1, help="At most this many, oldest first.")] = 1000,
    output: Output = OutputFormat.TABLE,
) -> None:
    """List events, oldest first."""
    with connect() as service:
        events = listed(service, "list_events", limit, TrainingJobName=job, FleetName=fleet, AfterEventId=after)
    if output is OutputFormat.JSON:
        show_json({"Events": events})
        return
    columns: Columns = {
        "ID": "EventId",
        "TIME (UTC)": lambda event: when(event["Time"]),
        "TYPE": "Type",
        "ABOUT": lambda event: event.get("TrainingJobName") or event.get("NodeId") or event.get("FleetName") or "",
        "MESSAGE": "Message",
    }
    show_rows(events, columns, empty="No events.")
