"""`everstep nodes …`: list and show nodes; drain, replace, reboot, hold and release them."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from everstep.cli.commands import Asks, Pages, Service, Shown, command
from everstep.cli.names import NodeId, OnlyFleet
from everstep.cli.output import Facts, Json, Rows, condition_words, days_old, moment, size, to_do, when
from everstep.cli.tables import Columns, Detail, Prose

app = typer.Typer(no_args_is_help=True, add_completion=False)


@command(app, "list")
def list_nodes(
    service: Service,
    pages: Pages,
    fleet: OnlyFleet = None,
    ended: Annotated[bool, typer.Option("--ended", help="Include nodes that have ended.")] = False,
) -> Shown:
    """List nodes, oldest first."""
    answer = pages.of(service, "list_nodes", FleetName=fleet, IncludeEnded=ended)
    columns: Columns = {
        "NODE": "NodeId",
        "FLEET": Detail("FleetName"),
        "STATUS": "NodeStatus",
        "AGENT": lambda node: ("warm" if node["Warm"] else "connected") if node["Connected"] else "-",
        "JOB": lambda node: node.get("TrainingJobName") or "-",
        "ADDRESS": Detail("Address"),
        "TYPE": Detail("InstanceType"),
        "NETWORK NODE": Detail(lambda node: node.get("FailureDomain") or "-"),
        "MEMORY": Detail(_share),
        "SINCE (UTC)": Detail(lambda node: when(node["CreationTime"])),
        "REASON": Prose("Reason"),
    }
    return Shown(answer, Rows(answer["Nodes"], columns, empty="No nodes."))


@command(app)
def describe(service: Service, node_id: NodeId) -> Shown:
    """Show one node."""
    node = service.describe_node(NodeId=node_id)
    facts = [
        ("node", node["NodeId"]),
        ("fleet", node["FleetName"]),
        ("status", f"{node['NodeStatus']} ({node['Hold']})" if "Hold" in node else node["NodeStatus"]),
        ("conditions", condition_words(node)),
        ("asked for", node.get("RequestReason")),
        ("agent", _agent(node)),
        ("job", node.get("TrainingJobName")),
        ("refused", _refusals(node)),
        ("exposed", node.get("Exposure")),
        ("address", node["Address"]),
        ("memory", _memory(node)),
        ("memory of ranks", _rank_memory(node)),
        ("memory for slots", size(node["MemoryBytes"])),
        ("instance type", node["InstanceType"] or None),
        ("zone", node["AvailabilityZone"] or None),
        ("network node", node.get("FailureDomain")),
        ("image", ", ".join(filter(None, (node.get("ImageId"), days_old(node.get("ImageCreationTime"))))) or None),
        ("tests", _tests(node)),
        ("reason", node["Reason"] or None),
        ("do", to_do(node["HoldAdvice"]) if "HoldAdvice" in node else None),
        (
            "incidents",
            "\n".join(
                f"{when(line['Time'])}  {line['Cause']} → {line['Remedy']}: {line['Evidence']}"
                for line in node["Incidents"]
            )
            or None,
        ),
        ("known since", moment(node["CreationTime"])),
        ("ended", moment(node.get("EndTime"))),
    ]
    return Shown(node, Facts(facts))


@command(app, asks=lambda given: f"Terminate the instance {given['node_id']}?" if given["terminate"] else None)
def release(
    service: Service,
    node_id: NodeId,
    terminate: Annotated[
        bool, typer.Option("--terminate", help="Terminate the instance instead of returning it to service.")
    ] = False,
) -> Shown:
    """Return a held (unused) node to service, or end its instance. If the node is not held, cancel its pending request.

    A pending request is an unfinished drain, replacement, reboot or hold.
    """
    node = service.release_node(NodeId=node_id, Terminate=terminate)
    if node["NodeStatus"] != "held":
        return Shown(node, f"{node_id} is {node['NodeStatus']}; it has no pending request")
    return Shown(node, f"{node_id} is released: {'its instance is ended' if terminate else 'it may work again'}")


Reason = Annotated[str, typer.Option(help="Reason, shown with the node and in the history.")]


def _add(verb: str, explanation: str, asks: Asks | None = None) -> None:
    """Add a command that calls the operation `<verb>_node` for one node."""

    def ask(service: Service, node_id: NodeId, reason: Reason = "") -> Shown:
        operation: Any = getattr(service, f"{verb}_node")
        node: Json = operation(NodeId=node_id, Reason=reason)
        job = node.get("TrainingJobName")
        waits = f"; {job} moves to another node first" if job else ""
        return Shown(
            node,
            f"requested for {node_id}: {node['Request']}{waits}"
            if "Request" in node
            else f"{node_id} is {node['NodeStatus']}",
        )

    ask.__doc__ = explanation
    command(app, verb, asks=asks)(ask)


_add("drain", "Move the job off a node without losing a step, then keep the node out of use.")
_add(
    "replace",
    "Drain a node, then terminate its instance and launch another.",
    lambda given: f"Terminate the instance {given['node_id']} and launch a replacement?",
)
_add(
    "reboot",
    "Drain a node, then reboot it.",
    lambda given: f"Reboot {given['node_id']}? The contents of its memory are lost.",
)
_add("hold", "Keep an idle node out of use until it is released.")


@command(
    app,
    "reset-session",
    asks=lambda given: f"Revoke the session of {given['node_id']} and let the node join once more?",
)
def reset_session(service: Service, node_id: NodeId, reason: Reason = "") -> Shown:
    """Revoke the session of a node's agent. The agent may join once more with a join token."""
    node = service.reset_node_session(NodeId=node_id, Reason=reason)
    return Shown(node, f"the session of {node_id} is revoked; the node may join once more")


def _agent(node: Json) -> str:
    if not node["Connected"]:
        return "not connected"
    return (
        f"connected, version {node['AgentVersion']}, "
        f"{'ranks start warm' if node['Warm'] else 'ranks would import first'}"
    )


def _share(node: Json) -> str:
    memory = node.get("Memory")
    return "-" if memory is None else f"{size(memory['UsedBytes'])} of {size(memory['TotalBytes'])}"


def _memory(node: Json) -> str | None:
    memory = node.get("Memory")
    if memory is None:
        return None
    limit = ", the limit of its cgroup" if "CgroupLimitBytes" in memory else ""
    return (
        f"{size(memory['UsedBytes'])} used of {size(memory['TotalBytes'])}{limit}; "
        f"{size(memory['AvailableBytes'])} available"
    )


def _rank_memory(node: Json) -> str | None:
    ranks = node.get("Memory", {}).get("Ranks", [])
    return (
        "\n".join(
            f"rank {rank['Rank']}: {size(rank['ResidentBytes'])}, peak {size(rank['PeakResidentBytes'])}"
            for rank in ranks
        )
        or None
    )


def _tests(node: Json) -> str | None:
    """Return a line with the time and level of the node's burn-in, and one line per test."""
    if (burn_in := node.get("BurnIn")) is None:
        return None
    lines = [f"{when(burn_in['Time'])}  level {burn_in['Level']}, {burn_in['Seconds']:.1f} s"]
    for test in burn_in["Tests"]:
        unit = "Mop/s" if "matmul" in test["Name"] else "MB/s"
        rate = f"  {test['Rate'] / 1e6:,.0f} {unit}" if "Rate" in test else ""
        lines.append(f"{test['Name']}: {test['Outcome']}{rate}  {test['Text']}".rstrip())
    return "\n".join(lines)


def _refusals(node: Json) -> str | None:
    counts = [
        (node["RefusedMessageCount"], "messages, by the control plane"),
        (node["RefusedSessionCount"], "sessions, by its agent"),
    ]
    return ", ".join(f"{count} {what}" for count, what in counts if count) or None
