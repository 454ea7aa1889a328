"""`everstep incidents …`: list, show and export failures and their recoveries, and work on them with other people."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

import typer

from everstep.cli.accounting import dollars
from everstep.cli.commands import Pages, Service, Shown, command
from everstep.cli.names import OnlyJob
from everstep.cli.output import Facts, Json, Rows, moment, seconds, step, to_do, when
from everstep.cli.tables import Columns, Detail

app = typer.Typer(no_args_is_help=True, add_completion=False)

IncidentId = Annotated[str, typer.Argument(help="Id of the incident, as `everstep incidents list` shows it.")]


class PostmortemFormat(StrEnum):
    """Format of an exported post-mortem."""

    MARKDOWN = "markdown"


@command(app, "list")
def list_incidents(
    service: Service,
    pages: Pages,
    job: OnlyJob = None,
) -> Shown:
    """List incidents, oldest first."""
    answer = pages.of(service, "list_incidents", TrainingJobName=job)
    columns: Columns = {
        "INCIDENT": "IncidentId",
        "JOB": "TrainingJobName",
        "OPENED (UTC)": Detail(lambda row: when(row["OpenedAt"])),
        "CAUSE": "Cause",
        "PHASE": "Phase",
        "FROM": Detail(lambda row: row.get("RestoreSource") or "-"),
        "BASE": Detail(lambda row: step(row.get("FromStep"))),
        "LOST STEPS": lambda row: "-" if row.get("LostSteps") is None else str(row["LostSteps"]),
        "DETECT s": Detail(lambda row: seconds(row.get("DetectSeconds"))),
        "REPLACE s": Detail(lambda row: seconds(row.get("ReplaceSeconds"))),
        "RESTORE s": Detail(lambda row: seconds(row.get("RestoreSeconds"))),
        "REWORK s": Detail(lambda row: seconds(row.get("ReworkSeconds"))),
    }
    return Shown(answer, Rows(answer["Incidents"], columns, empty="No incidents."))


@command(app)
def describe(
    service: Service,
    incident_id: IncidentId,
) -> Shown:
    """Show one incident: its evidence, the decision with its reason, the phases of the recovery, and the cost."""
    incident = service.describe_incident(IncidentId=incident_id)
    return Shown(incident, Facts(_facts(incident)))


@command(app, "ack")
def acknowledge(
    service: Service,
    incident_id: IncidentId,
    note: Annotated[str, typer.Option(help="Note for other users.")] = "",
) -> Shown:
    """Mark an incident as seen by you. The first acknowledgement counts; later ones change nothing."""
    incident = service.acknowledge_incident(IncidentId=incident_id, Note=note)
    return Shown(incident, f"{incident_id} was seen: {_seen(incident)}")


@command(app)
def update(
    service: Service,
    incident_id: IncidentId,
    owner: Annotated[str, typer.Option(help="The person who takes care of the incident. Empty: nobody.")],
) -> Shown:
    """Set or remove the owner of an incident: the person who takes care of it."""
    incident = service.update_incident(IncidentId=incident_id, Owner=owner)
    return Shown(incident, f"owner of {incident_id}: {incident.get('Owner', 'nobody')}")


@command(app)
def note(
    service: Service,
    incident_id: IncidentId,
    text: Annotated[str, typer.Argument(help="Text of the note.")],
) -> Shown:
    """Add a note to an incident. `describe` shows the notes."""
    added = service.create_incident_note(IncidentId=incident_id, Text=text)
    return Shown(added, f"note {added['NoteId']} was added to {incident_id}")


@command(app)
def similar(service: Service, incident_id: IncidentId) -> Shown:
    """List the incidents of the same cause that are most like one incident, and how they ended."""
    answer = service.list_similar_incidents(IncidentId=incident_id)
    columns: Columns = {
        "INCIDENT": "IncidentId",
        "JOB": "TrainingJobName",
        "OPENED (UTC)": lambda row: when(row["OpenedAt"]),
        "SAME": lambda row: ", ".join(row["Likeness"]) or "Cause",
        "OUTCOME": "Outcome",
        "LOST STEPS": lambda row: str(row.get("LostSteps", "-")),
    }
    return Shown(answer, Rows(answer["Incidents"], columns, empty="No similar incidents."))


@command(app)
def export(
    service: Service,
    incident_id: IncidentId,
    format: Annotated[PostmortemFormat, typer.Option(help="Format of the document.")] = PostmortemFormat.MARKDOWN,
) -> Shown:
    """Print the post-mortem of an incident: impact, timeline, evidence, log lines, notes and what to do."""
    answer = service.export_incident(IncidentId=incident_id, Format=format.value)
    return Shown(answer, answer["Content"].rstrip("\n"))


def _seen(incident: Json) -> str | None:
    if "AcknowledgementTime" not in incident:
        return None
    note = f": {incident['Acknowledgement']}" if "Acknowledgement" in incident else ""
    return f"{moment(incident['AcknowledgementTime'])} by {incident['AcknowledgedBy']}{note}"


def notes_words(notes: Sequence[Json]) -> str | None:
    """Return notes as text, oldest first, or None without notes."""
    return "\n".join(f"{moment(note['CreationTime'])} {note['Author']}: {note['Text']}" for note in notes) or None


def _sources(incident: Json) -> str:
    """Return, as text, the source from which each range of ranks restored its state."""
    sources: list[str] = []
    for run in incident["RankSources"]:
        first, last = run["FirstRank"], run["LastRank"]
        sources.append(f"{run['Source']} ({f'rank {first}' if first == last else f'ranks {first}-{last}'})")
    return ", ".join(sources)


def _stacks(incident: Json) -> str | None:
    """Return the command that prints the recorded stacks of all ranks, or None if the incident has no stacks."""
    if "StacksEventId" not in incident:
        return None
    number = incident["StacksEventId"]
    only = f"--after {number - 1} --max-items 1 --query 'Events[].Detail.stacks[]'"
    return f"in event {number}: everstep events list --job {incident['TrainingJobName']} {only} --output yaml"


def _facts(incident: Json) -> list[tuple[str, object]]:
    phases = ", ".join(
        f"{phase.lower()} {seconds(incident.get(f'{phase}Seconds'))} s"
        for phase in ("Detect", "Replace", "Restore", "Rework")
    )
    after, cost = incident.get("GenerationAfter"), incident.get("CostUsd")
    return [
        ("incident", incident["IncidentId"]),
        ("verdict", incident.get("Verdict")),
        ("do", "\n".join(to_do(each) for each in incident.get("Actions", [])) or None),
        ("job", incident["TrainingJobName"]),
        ("cause", incident["Cause"]),
        ("phase", incident["Phase"]),
        ("evidence", "\n".join(incident["Evidence"]) or None),
        ("stacks", _stacks(incident)),
        ("decision", incident["Decision"]),
        ("reason", incident["Reason"]),
        ("happened on", ", ".join(incident["FaultedInstanceIds"]) or None),
        ("instances", ", ".join(incident["InstanceIds"]) or None),
        ("replaced by", ", ".join(incident["ReplacementInstanceIds"]) or None),
        ("restored from", _sources(incident) or incident.get("RestoreSource")),
        ("base step", step(incident.get("FromStep"))),
        ("reached before", step(incident.get("ReachedStep"))),
        ("lost steps", incident.get("LostSteps")),
        ("generations", f"{incident['GenerationBefore']} → {'-' if after is None else after}"),
        ("phases", phases),
        ("cost", None if cost is None else f"{dollars(cost)}, for node time without new steps"),
        ("failed", moment(incident["FailedAt"])),
        ("opened", moment(incident["OpenedAt"])),
        ("training again", moment(incident.get("RestoredAt"))),
        ("closed", moment(incident.get("ClosedAt"))),
        ("seen", _seen(incident)),
        ("owner", incident.get("Owner")),
        ("notes", notes_words(incident.get("Notes", []))),
    ]
