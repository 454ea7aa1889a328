"""`everstep nodes …`: which instances there are, what each is used for, and what becomes of those that are held."""

from __future__ import annotations

from typing import Annotated

import typer

from everstep.cli.output import Columns, Json, Output, OutputFormat, connect, moment, show_facts, show_json, show_rows, size, when, without_none

app = typer.Typer(help="Instances of the fleets, and what each is used for.", no_args_is_help=True)


@app.command("list")
def list_nodes(
    fleet: Annotated[str | None, typer.Option(help="Only of this fleet.")] = None,
    ended: Annotated[bool, typer.Option("--ended", help="Also those that have ended.")] = False,
    output: Output = OutputFormat.TABLE,
) -> None:
    """List nodes, oldest first."""
    with connect() as service:
        answer = service.list_nodes(**without_none(FleetName=fleet, IncludeEnded=ended))
    if output is OutputFormat.JSON:
        show_json(answer)
        return
    columns: Columns = {
        "NODE": "NodeId",
        "FLEET": "FleetName",
        "STATUS": "NodeStatus",
        "AGENT": lambda node: ("warm" if node["Warm"] else "connected") if node["Connected"] else "-",
        "JOB": lambda node: node.get("TrainingJobName") or "-",
        "ADDRESS": "Address",
        "TYPE": "InstanceType",
        "SINCE (UTC)": lambda node: when(node["CreationTime"]),
        "REASON": "Reason",
    }
    show_rows(answer["Nodes"], columns, empty="No nodes.")


@app.command()
def describe(node_id: Annotated[str, typer.Argument(help="Id of the node: its EC2 instance id.")], output: Output = OutputFormat.TABLE) -> None:
    """Show one node."""
    with connect() as service:
        node = service.describe_node(NodeId=node_id)
    if output is OutputFormat.JSON:
        show_json(node)
        return
    facts = [
        ("node", node["NodeId"]),
        ("fleet", node["FleetName"]),
        ("status", f"{node['NodeStatus']} ({node['Hold']})" if "Hold" in node else node["NodeStatus"]),
        ("asked for", node.get("RequestReason")),
        ("agent", _agent(node)),
        ("job", node.get("TrainingJobName")),
        ("refused", _refusals(node)),
        ("address", node["Address"]),
        ("memory for slots", size(node["MemoryBytes"])),
        ("instance type", node["InstanceType"] or None),
        ("zone", node["AvailabilityZone"] or None),
        ("reason", node["Reason"] or None),
        (
            "incidents",
            "\n".join(f"{when(line['Time'])}  {line['Cause']} → {line['Remedy']}: {line['Evidence']}" for line in node["Incidents"]) or None,
        ),
        ("known since", moment(node["CreationTime"])),
        ("ended", moment(node.get("EndTime"))),
    ]
    show_facts(facts)


@app.command()
def release(
    node_id: Annotated[str, typer.Argument(help="Id of the node: its EC2 instance id.")],
    terminate: Annotated[bool, typer.Option("--terminate", help="End the instance instead of letting it work again.")] = False,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Let a held node work again, or end its instance; or call off what was asked for and is not done."""
    with connect() as service:
        node = service.release_node(NodeId=node_id, Terminate=terminate)
    if output is OutputFormat.JSON:
        show_json(node)
        return
    if node["NodeStatus"] != "held":
        typer.echo(f"{node_id} is {node['NodeStatus']}; nothing is asked for it any more")
        return
    typer.echo(f"{node_id} is released: {'its instance is ended' if terminate else 'it may work again'}")


Id = Annotated[str, typer.Argument(help="Id of the node: its EC2 instance id.")]
Reason = Annotated[str, typer.Option(help="Why; told with the node and in the history.")]


@app.command()
def drain(node_id: Id, reason: Reason = "", output: Output = OutputFormat.TABLE) -> None:
    """Have its job leave a node at an agreed stop, without losing a step; then keep it out of use."""
    with connect() as service:
        node = service.drain_node(NodeId=node_id, Reason=reason)
    _asked(node, output)


@app.command()
def replace(node_id: Id, reason: Reason = "", output: Output = OutputFormat.TABLE) -> None:
    """Have its job leave a node like drain; then end its instance, and another one comes."""
    with connect() as service:
        node = service.replace_node(NodeId=node_id, Reason=reason)
    _asked(node, output)


@app.command()
def reboot(node_id: Id, reason: Reason = "", output: Output = OutputFormat.TABLE) -> None:
    """Have its job leave a node like drain; then reboot it."""
    with connect() as service:
        node = service.reboot_node(NodeId=node_id, Reason=reason)
    _asked(node, output)


@app.command()
def hold(node_id: Id, reason: Reason = "", output: Output = OutputFormat.TABLE) -> None:
    """Keep a node that works for nobody out of use until it is released."""
    with connect() as service:
        node = service.hold_node(NodeId=node_id, Reason=reason)
    _asked(node, output)


def _asked(node: Json, output: OutputFormat) -> None:
    if output is OutputFormat.JSON:
        show_json(node)
        return
    job = node.get("TrainingJobName")
    waits = f"; {job} leaves it first, once another node is there" if job else ""
    typer.echo(f"{node['NodeId']} is to be: {node['Request']}{waits}" if "Request" in node else f"{node['NodeId']} is {node['NodeStatus']}")


def _agent(node: Json) -> str:
    if not node["Connected"]:
        return "not connected"
    return f"connected, version {node['AgentVersion']}, {'ranks start warm' if node['Warm'] else 'ranks would import first'}"


def _refusals(node: Json) -> str | None:
    said = [(node["RefusedMessageCount"], "of its messages by the control plane"), (node["RefusedSessionCount"], "sessions by its agent")]
    return ", ".join(f"{count} {what}" for count, what in said if count) or None
