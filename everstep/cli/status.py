"""`everstep status`: the jobs and fleets that need a person, and what to do."""

from __future__ import annotations

import typer

from everstep.cli.commands import Service, Shown, command
from everstep.cli.output import Json, Rows, when
from everstep.cli.tables import Columns, Detail, Prose

app = typer.Typer(add_completion=False)


@command(app)
def status(service: Service) -> Shown:
    """Show the jobs and fleets that need a person, the most urgent first."""
    answer: Json = service.describe_duties()
    columns: Columns = {
        "FOR": lambda each: each.get("TrainingJobName") or f"fleet {each['FleetName']}",
        "SINCE (UTC)": lambda each: when(each["Duty"]["Since"]) if "Since" in each["Duty"] else "-",
        "WHAT": Prose(lambda each: each["Duty"]["Sentence"]),
        "COMMAND": Detail(lambda each: next((action["Command"] for action in each["Duty"]["Actions"]), "-")),
    }
    return Shown(answer, Rows(answer["Duties"], columns, empty="No job and no fleet needs a person."))
