"""`everstep drills …`: break something of a job on purpose, and see what became of it."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from everstep.cli.output import Columns, Output, OutputFormat, connect, listed, say, show_json, show_rows, when, without_none

app = typer.Typer(help="Break something of a training job on purpose, and see what became of it.", no_args_is_help=True)


class Kind(StrEnum):
    """What is broken."""

    KILL_RANK = "kill-rank"
    KILL_AGENT = "kill-agent"
    TERMINATE_INSTANCE = "terminate-instance"


@app.command()
def start(
    kind: Annotated[Kind, typer.Argument(help="What is broken.")],
    job: Annotated[str, typer.Option(help="Training job that is struck; its fleet must allow drills.")],
    node: Annotated[str | None, typer.Option(help="One of its nodes; the last unless said.")] = None,
    rank: Annotated[int | None, typer.Option(min=0, help="For kill-rank: a rank on that node; its first unless said.")] = None,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Break something of a training job that trains, once."""
    with connect() as service:
        drill = service.start_drill(TrainingJobName=job, DrillType=kind.value, **without_none(NodeId=node, Rank=rank))
    if output is OutputFormat.JSON:
        show_json(drill)
        return
    what = f", rank {drill['Rank']}" if "Rank" in drill else ""
    typer.echo(f"{drill['DrillId']}: {drill['DrillType']} on {drill['NodeId']}{what}")
    say(f"next: everstep drills list --job {job}   everstep incidents list --job {job}")


@app.command("list")
def list_drills(
    job: Annotated[str | None, typer.Option(help="Only of this training job.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most this many.")] = 100,
    output: Output = OutputFormat.TABLE,
) -> None:
    """List drills in the order they were asked for."""
    with connect() as service:
        rows = listed(service, "list_drills", limit, TrainingJobName=job)
    if output is OutputFormat.JSON:
        show_json({"Drills": rows})
        return
    columns: Columns = {
        "DRILL": "DrillId",
        "JOB": "TrainingJobName",
        "WHAT": "DrillType",
        "NODE": "NodeId",
        "RANK": lambda drill: str(drill.get("Rank", "-")),
        "STATUS": "DrillStatus",
        "ASKED FOR (UTC)": lambda drill: when(drill["CreationTime"]),
        "STRUCK (UTC)": lambda drill: when(drill.get("StrikeTime")),
        "INCIDENT": lambda drill: drill.get("IncidentId") or "-",
        "OUTCOME": lambda drill: drill.get("Outcome") or "",
        "BY": "RequestedBy",
    }
    show_rows(rows, columns, empty="No drills.")
