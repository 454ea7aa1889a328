"""`everstep fleets …`: register, show, change and delete the Auto Scaling groups that Everstep manages."""

from __future__ import annotations

from typing import Annotated, Any, Final, cast

import typer

from everstep.cli.accounting import dollars, ettr_words, hours, incident_words, job_time
from everstep.cli.commands import Output, Pages, Query, Service, Shown, command
from everstep.cli.confirm import confirmed
from everstep.cli.formats import OutputFormat
from everstep.cli.names import FleetName
from everstep.cli.output import FAILED, Facts, Json, Rows, counted, days_old, duty_words, moment, say, without_none
from everstep.cli.request_options import FieldsOf
from everstep.cli.submission import Request
from everstep.cli.tables import Columns, Detail, Prose

app = typer.Typer(no_args_is_help=True, add_completion=False)


_NAMES: Final = {
    **dict.fromkeys(("FleetName", "AutoScalingGroupName", "DryRun", "ExpectedChanges"), ""),
    "Tags": "--tag",
    "HoldFailedInstances": "--hold-failed-instances/--end-failed-instances",
    "AllowDrills": "--allow-drills/--forbid-drills",
    "AllowCommands": "--allow-commands/--forbid-commands",
}


@command(app)
def create(
    service: Service,
    name: Annotated[str, typer.Option(help="Name of the fleet.")],
    auto_scaling_group: Annotated[
        str, typer.Option(help="Group with the tag everstep:fleet, one Availability Zone and one launch template.")
    ],
    *,
    fields: Annotated[Request, FieldsOf("CreateFleet", _NAMES)],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show the changes to the group.")] = False,
    yes: Annotated[
        bool,
        typer.Option("--yes", "-y", help="Skip the confirmation; required without a terminal."),
    ] = False,
    output: Output = OutputFormat.TABLE,
    query: Query = None,
) -> Shown:
    """Register an Auto Scaling group as a fleet. From then on, only Everstep changes its size and ends its instances.

    The command first shows the settings of the group that Everstep will change.
    """
    request: dict[str, Any] = {"FleetName": name, "AutoScalingGroupName": auto_scaling_group, **fields}
    is_for_people = output is OutputFormat.TABLE and query is None
    if dry_run or is_for_people or not yes:
        planned = cast(Json, service.create_fleet(**request, DryRun=True))
        changes = planned["Changes"]
        if dry_run:
            nothing = f"No setting of {auto_scaling_group} needs a change."
            checks = [f"{check['Setting']}: {check['Message']}" for check in planned["Checks"]]
            person = (*checks, *(map(_in_words, changes) if changes else [nothing]))
            return Shown(
                planned,
                person,
                (
                    f"Everstep can register the fleet {name} with this request; nothing was changed. next: the "
                    "same command without --dry-run"
                ),
            )
        for change in changes:
            say(_in_words(change))
        if changes and not confirmed(
            f"Change these settings of {auto_scaling_group} and register it as the fleet {name}?", yes=yes
        ):
            raise typer.Exit(FAILED)
        # The service rejects the request if it would make other changes than the user confirmed.
        request["ExpectedChanges"] = changes
    created = cast(Json, service.create_fleet(**request))
    made = sum(change["Applies"] == "Now" for change in created["Changes"])
    outcome = (
        f"Everstep changed {counted(made, 'setting')} of {auto_scaling_group}"
        if made
        else f"{auto_scaling_group} already had the required settings"
    )
    return Shown(created, _facts(created["Fleet"]), f"{outcome}. next: everstep nodes list --fleet {name}")


def _in_words(change: Json) -> str:
    return (
        f"{change['Setting']}: {change.get('Before', 'none')} → {change['After']} "
        f"({change['Applies'].lower()}). {change['Reason']}"
    )


@command(app, "list")
def list_fleets(service: Service, pages: Pages) -> Shown:
    """List fleets, sorted by name."""
    answer = pages.of(service, "list_fleets")
    columns: Columns = {
        "NAME": "FleetName",
        "STATUS": "FleetStatus",
        "GROUP": Detail("AutoScalingGroupName"),
        "NODES": lambda fleet: f"{fleet['ConnectedNodeCount']} of {fleet['DesiredNodeCount']} connected",
        "SPARES": Detail("SpareCount"),
        "TYPE": Detail("InstanceType"),
        "ZONE": Detail("AvailabilityZone"),
        "REASON": Prose("Reason"),
    }
    return Shown(
        answer, Rows(answer["Fleets"], columns, empty="No fleets. Register one: everstep fleets create --help")
    )


@command(app)
def describe(service: Service, name: FleetName) -> Shown:
    """Show one fleet."""
    fleet = service.describe_fleet(FleetName=name)
    return _shown(fleet)


@command(app)
def update(service: Service, name: FleetName, *, fields: Annotated[Request, FieldsOf("UpdateFleet", _NAMES)]) -> Shown:
    """Change a fleet: its number of nodes and spares, its price, and the treatment of failed instances."""
    return _shown(service.update_fleet(FleetName=name, **fields))


@command(
    app,
    asks=lambda given: (
        f"Treat the silent nodes of {given['name']} as lost? Everstep terminates their instances. State that only "
        "these nodes hold is lost."
    ),
)
def unfreeze(service: Service, name: FleetName) -> Shown:
    """Declare the silent nodes of a frozen fleet lost.

    Everstep freezes a fleet while most of its nodes are silent. The declaration is valid until most nodes report again.
    """
    fleet = service.unfreeze_fleet(FleetName=name)
    return _shown(fleet)


@command(
    app,
    asks=lambda given: (
        f"{'Reboot' if given['reboot'] else 'Replace'} all nodes of {given['name']}, with at most "
        f"{given['max_unavailable']} out of service?"
    ),
)
def roll(
    service: Service,
    name: FleetName,
    max_unavailable: Annotated[
        int, typer.Option(min=1, help="Begin another node only while at most this many nodes are out of service.")
    ] = 1,
    reboot: Annotated[bool, typer.Option("--reboot", help="Reboot the nodes instead of replacing them.")] = False,
    reason: Annotated[str, typer.Option(help="Reason, shown with each node and in the history.")] = "",
) -> Shown:
    """Replace or reboot all nodes of a fleet, a few at a time, without losing a step of its jobs."""
    fleet = service.start_fleet_roll(FleetName=name, MaxUnavailable=max_unavailable, Reboot=reboot, Reason=reason)
    return Shown(fleet, f"{name}: {_roll(fleet)}. next: everstep fleets describe {name}")


@command(app, "update-roll")
def update_roll(
    service: Service,
    name: FleetName,
    paused: Annotated[
        bool | None, typer.Option("--pause/--resume", help="Begin no further node, or continue the roll.")
    ] = None,
    max_unavailable: Annotated[int | None, typer.Option(min=1, help="Maximum number of nodes out of service.")] = None,
) -> Shown:
    """Pause or resume a roll, the replacement or reboot of all nodes of a fleet, or change its limits."""
    fleet = service.update_fleet_roll(FleetName=name, **without_none(Paused=paused, MaxUnavailable=max_unavailable))
    return Shown(fleet, f"{name}: {_roll(fleet)}")


@command(app, "stop-roll")
def stop_roll(service: Service, name: FleetName) -> Shown:
    """Stop a roll, the replacement or reboot of all nodes of a fleet. Jobs stay on their current nodes."""
    fleet = service.stop_fleet_roll(FleetName=name)
    return Shown(fleet, f"{name}: {_roll(fleet)}")


@command(app, asks=lambda given: f"Delete the fleet {given['name']} and terminate all its instances?")
def delete(service: Service, name: FleetName) -> Shown:
    """Terminate all nodes of a fleet and delete the fleet. Refused while unfinished jobs use the fleet."""
    fleet = service.delete_fleet(FleetName=name)
    return Shown(fleet, f"{name} is being deleted")


@command(app, "join-token")
def join_token(
    service: Service,
    name: FleetName,
    expires_in_seconds: Annotated[
        int | None, typer.Option(min=60, help="Lifetime in seconds; by default until revoked.")
    ] = None,
) -> Shown:
    """Create a token for the user data of a fleet's launch template. Each instance may use it once.

    The token may be created before the fleet.
    """
    token = service.create_join_token(FleetName=name, **without_none(ExpiresInSeconds=expires_in_seconds))
    # Pass the token in an environment variable, because every process of the node could read a command-line option.
    how = "EVERSTEP_JOIN_TOKEN=TOKEN everstep agent --control-plane-url URL"
    return Shown(token, token["JoinToken"], f"The token is shown only once. User data: {how}")


def _spares(fleet: Json) -> str:
    policy = fleet.get("SparePolicy")
    return (
        f"{fleet['SpareCount']} spares"
        if policy is None
        else f"enough spares that one is free with probability {policy['Probability']:.4%}"
    )


def _roll(fleet: Json) -> str | None:
    """Return as text the status and the progress of the newest replacement or reboot of all nodes of a fleet."""
    roll = fleet.get("Roll")
    if roll is None:
        return None
    why = f": {roll['StatusReason']}" if roll["StatusReason"] else ""
    done = "rebooted" if roll["Reboot"] else "replaced"
    return f"{roll['RollStatus']}, {roll['FinishedNodeCount']} of {roll['NodeCount']} nodes {done}{why}"


def _shown(fleet: Json) -> Shown:
    return Shown(fleet, _facts(fleet))


def _facts(fleet: Json) -> Facts:
    price, cost = fleet.get("PriceUsdPerHour"), fleet.get("CostUsd")
    counts = (
        ("connected", "ConnectedNodeCount"),
        ("known", "NodeCount"),
        ("wanted", "DesiredNodeCount"),
        ("at most", "MaxNodeCount"),
    )
    return Facts(
        [
            ("name", fleet["FleetName"]),
            ("status", fleet["FleetStatus"]),
            ("reason", fleet["Reason"] or None),
            ("to do", duty_words(fleet)),
            ("group", fleet["AutoScalingGroupName"]),
            ("nodes", ", ".join(f"{fleet[field]} {word}" for word, field in counts)),
            ("kept", f"at least {fleet['MinNodeCount']} and {_spares(fleet)}"),
            ("failed instances", "held for inspection" if fleet["HoldFailedInstances"] else "ended"),
            ("replacements", f"at most {fleet['MaxReplacementsPerHour']} per hour"),
            ("node role", fleet.get("NodeRoleName")),
            ("drills", "allowed" if fleet.get("AllowDrills") else None),
            ("commands", "allowed" if fleet.get("AllowCommands") else None),
            ("TLS between nodes", f"{'on' if fleet['EncryptsReplicas'] else 'off'} ({fleet['ReplicaEncryption']})"),
            ("instance type", fleet["InstanceType"] or None),
            ("zone", fleet["AvailabilityZone"] or None),
            ("oldest image", days_old(fleet.get("OldestImageTime"))),
            ("price", None if price is None else f"${price} per node and hour"),
            ("cost of jobs", job_time(fleet)),
            ("ETTR", ettr_words(fleet)),
            ("incidents", incident_words(fleet)),
            ("cost", None if cost is None else f"{dollars(cost)} for {hours(fleet['NodeSeconds'])} node-hours of jobs"),
            ("roll", _roll(fleet)),
            ("drift", "\n".join(fleet["Drift"]) or None),
            ("project", fleet["Project"]),
            ("created", moment(fleet["CreationTime"])),
        ]
    )
