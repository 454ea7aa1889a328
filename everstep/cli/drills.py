"""`everstep drills …`: inject a failure into a running job on purpose and show the outcome."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from everstep.cli.commands import Pages, Service, Shown, command
from everstep.cli.names import OnlyJob
from everstep.cli.output import Rows, when, without_none
from everstep.cli.tables import Columns, Detail, Prose

app = typer.Typer(no_args_is_help=True, add_completion=False)


class Kind(StrEnum):
    """Kinds of failures that a drill can inject into a job."""

    KILL_RANK = "kill-rank"
    KILL_AGENT = "kill-agent"
    TERMINATE_INSTANCE = "terminate-instance"


@command(app, asks=lambda given: f"Inject {given['kind'].value} into {given['job']}?")
def start(
    service: Service,
    kind: Annotated[Kind, typer.Argument(help="Failure to inject.")],
    job: Annotated[str, typer.Option(help="Name or RunId of the training job to hit; its fleet must allow drills.")],
    node: Annotated[str | None, typer.Option(help="Node of the job; by default the last.")] = None,
    rank: Annotated[
        int | None, typer.Option(min=0, help="For kill-rank: a rank on that node; by default its first.")
    ] = None,
) -> Shown:
    """Inject one failure into a training job that is in the status Training."""
    drill = service.start_drill(TrainingJobName=job, DrillType=kind.value, **without_none(NodeId=node, Rank=rank))
    what = f", rank {drill['Rank']}" if "Rank" in drill else ""
    return Shown(
        drill,
        f"{drill['DrillId']}: {drill['DrillType']} on {drill['NodeId']}{what}",
        f"next: everstep drills list --job {job}   everstep incidents list --job {job}",
    )


@command(app, "list")
def list_drills(
    service: Service,
    pages: Pages,
    job: OnlyJob = None,
) -> Shown:
    """List drills, oldest request first."""
    answer = pages.of(service, "list_drills", TrainingJobName=job)
    columns: Columns = {
        "DRILL": "DrillId",
        "JOB": "TrainingJobName",
        "WHAT": "DrillType",
        "NODE": Detail("NodeId"),
        "RANK": Detail(lambda drill: str(drill.get("Rank", "-"))),
        "STATUS": "DrillStatus",
        "ASKED FOR (UTC)": Detail(lambda drill: when(drill["CreationTime"])),
        "STRUCK (UTC)": Detail(lambda drill: when(drill.get("StrikeTime"))),
        "INCIDENT": Detail(lambda drill: drill.get("IncidentId") or "-"),
        "OUTCOME": Prose(lambda drill: drill.get("Outcome") or ""),
        "BY": Detail("RequestedBy"),
    }
    return Shown(answer, Rows(answer["Drills"], columns, empty="No drills."))
