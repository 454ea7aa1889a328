"""`everstep incidents …`: failures and their recoveries."""

from __future__ import annotations

from typing import Annotated

import typer

from everstep.cli.accounting import dollars
from everstep.cli.output import Columns, Json, Output, OutputFormat, connect, listed, moment, seconds, show_facts, show_json, show_rows, step, when

app = typer.Typer(help="Failures and their recoveries.", no_args_is_help=True)


@app.command("list")
def list_incidents(
    job: Annotated[str | None, typer.Option(help="Only of this training job.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most this many.")] = 100,
    output: Output = OutputFormat.TABLE,
) -> None:
    """List incidents in the order they were opened."""
    with connect() as service:
        incidents = listed(service, "list_incidents", limit, TrainingJobName=job)
    if output is OutputFormat.JSON:
        show_json({"Incidents": incidents})
        return
    columns: Columns = {
        "INCIDENT": "IncidentId",
        "JOB": "TrainingJobName",
        "OPENED (UTC)": lambda row: when(row["OpenedAt"]),
        "CAUSE": "Cause",
        "PHASE": "Phase",
        "FROM": lambda row: row.get("RestoreSource") or "-",
        "BASE": lambda row: step(row.get("FromStep")),
        "LOST STEPS": lambda row: "-" if row.get("LostSteps") is None else str(row.get("LostSteps")),
        "DETECT s": lambda row: seconds(row.get("DetectSeconds")),
        "REPLACE s": lambda row: seconds(row.get("ReplaceSeconds")),
        "RESTORE s": lambda row: seconds(row.get("RestoreSeconds")),
        "REWORK s": lambda row: seconds(row.get("ReworkSeconds")),
    }
    show_rows(incidents, columns, empty="No incidents.")


@app.command()
def describe(
    incident_id: Annotated[str, typer.Argument(help="Id of the incident, as `everstep incidents list` shows it.")],
    output: Output = OutputFormat.TABLE,
) -> None:
    """Show one incident: its evidence, what was decided and why, and what it cost."""
    with connect() as service:
        incident = service.describe_incident(IncidentId=incident_id)
    if output is OutputFormat.JSON:
        show_json(incident)
        return
    show_facts(_facts(incident))


@app.command("ack")
def acknowledge(
    incident_id: Annotated[str, typer.Argument(help="Id of the incident, as `everstep incidents list` shows it.")],
    note: Annotated[str, typer.Option(help="What others should know.")] = "",
    output: Output = OutputFormat.TABLE,
) -> None:
    """Say to have seen an incident. The first who does so stays."""
    with connect() as service:
        incident = service.acknowledge_incident(IncidentId=incident_id, Note=note)
    if output is OutputFormat.JSON:
        show_json(incident)
        return
    typer.echo(f"{incident_id} was seen: {_seen(incident)}")


def _seen(incident: Json) -> str | None:
    if "AcknowledgementTime" not in incident:
        return None
    note = f": {incident['Acknowledgement']}" if "Acknowledgement" in incident else ""
    return f"{moment(incident['AcknowledgementTime'])} by {incident['AcknowledgedBy']}{note}"


def _sources(incident: Json) -> str:
    """Say where each rank's shard came from."""
    told = []
    for run in incident["RankSources"]:
        first, last = run["FirstRank"], run["LastRank"]
        told.append(f"{run['Source']} ({f'rank {first}' if first == last else f'ranks {first}-{last}'})")
    return ", ".join(told)


def _facts(incident: Json) -> list[tuple[str, object]]:
    phases = ", ".join(f"{phase.lower()} {seconds(incident.get(f'{phase}Seconds'))} s" for phase in ("Detect", "Replace", "Restore", "Rework"))
    after, cost = incident.get("GenerationAfter"), incident.get("CostUsd")
    return [
        ("incident", incident["IncidentId"]),
        ("job", incident["TrainingJobName"]),
        ("cause", incident["Cause"]),
        ("phase", incident["Phase"]),
        ("evidence", "\n".join(incident["Evidence"]) or None),
        ("decision", incident["Decision"]),
        ("reason", incident["Reason"]),
        ("instances", ", ".join(incident["InstanceIds"]) or None),
        ("replaced by", ", ".join(incident["ReplacementInstanceIds"]) or None),
        ("restored from", _sources(incident) or incident.get("RestoreSource")),
        ("base step", step(incident.get("FromStep"))),
        ("reached before", step(incident.get("ReachedStep"))),
        ("lost steps", incident.get("LostSteps")),
        ("generations", f"{incident['GenerationBefore']} → {'-' if after is None else after}"),
        ("phases", phases),
        ("cost", None if cost is None else f"{dollars(cost)}: its nodes made no new step meanwhile"),
        ("failed", moment(incident["FailedAt"])),
        ("opened", moment(incident["OpenedAt"])),
        ("closed", moment(incident.get("ClosedAt"))),
        ("seen", _seen(incident)),
    ]
