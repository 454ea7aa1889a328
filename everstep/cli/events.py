"""`everstep events …`: list or follow the events of jobs, fleets and nodes, oldest first."""

from __future__ import annotations

import itertools
import sys
from contextlib import closing
from typing import Annotated

import typer

from everstep.cli import following
from everstep.cli.commands import Output, Pages, Query, Service, Shown, command, searched, show_value
from everstep.cli.formats import OutputFormat
from everstep.cli.names import OnlyFleet, OnlyJob
from everstep.cli.output import Json, Rows, echo, when, without_none
from everstep.cli.tables import Columns, Detail, Prose
from everstep.cli.terminal import safe_line
from everstep.errors import ConfigurationError

app = typer.Typer(no_args_is_help=True, add_completion=False)


@command(app, "list")
def list_events(
    service: Service,
    pages: Pages,
    job: OnlyJob = None,
    fleet: OnlyFleet = None,
    after: Annotated[
        int | None,
        typer.Option(min=0, help="Only events after this id; without it, -f starts with new events."),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print events as they happen, until --max-items are printed or ^C.")
    ] = False,
    output: Output = OutputFormat.TABLE,
    query: Query = None,
) -> Shown | None:
    """List events, oldest first, or follow new events as they happen."""
    if follow:
        if pages.starting_token is not None:
            raise ConfigurationError(
                "--starting-token cannot be combined with --follow, which returns no pages.",
                hint="Use --after ID to start after an event.",
            )
        with closing(
            following.events(service, without_none(TrainingJobName=job, FleetName=fleet, AfterEventId=after))
        ) as happening:
            for event in itertools.islice(happening, pages.max_items):
                if output is OutputFormat.TABLE and query is None:
                    echo(
                        safe_line(
                            f"{when(event['Time'])}  {event['EventId']}  {event['Type']}  "
                            f"{_about(event) or '-'}  {event['Message']}"
                        )
                    )
                else:
                    show_value(searched(event, query), output, is_one_of_many=True)
                sys.stdout.flush()
        return None
    answer = pages.of(service, "list_events", TrainingJobName=job, FleetName=fleet, AfterEventId=after)
    columns: Columns = {
        "ID": "EventId",
        "TIME (UTC)": lambda event: when(event["Time"]),
        "TYPE": "Type",
        "ABOUT": Detail(_about),
        "MESSAGE": Prose("Message"),
    }
    return Shown(answer, Rows(answer["Events"], columns, empty="No events."))


def _about(event: Json) -> str:
    return event.get("TrainingJobName") or event.get("NodeId") or event.get("FleetName") or ""
