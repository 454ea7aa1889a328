"""`everstep fleets …`: Auto Scaling groups that Everstep keeps."""

from __future__ import annotations

from typing import Annotated

import typer

from everstep.cli.accounting import dollars, ettr_words, hours, incident_words, job_time
from everstep.cli.commands import (
    Columns,
    Detail,
    Facts,
    Json,
    Output,
    OutputFormat,
    Pages,
    Prose,
    Query,
    Rows,
    Service,
    Shown,
    command,
)
from everstep.cli.confirm import confirmed
from everstep.cli.names import FleetName
from everstep.cli.output import FAILED, counted, moment, pairs, say, without_none

app = typer.Typer(no_args_is_help=True, add_completion=False)


@command(app)
def create(
    service: Service,
    name: Annotated[str, typer.Option(help="Name of the fleet.")],
    auto_scaling_group: Annotated[
        str, typer.Option(help="The group: tagged everstep:fleet, one Availability Zone, one launch template.")
    ],
    spare_count: Annotated[int, typer.Option(min=0, help="Nodes that wait to take over.")] = 1,
    min_node_count: Annotated[
        int, typer.Option(min=0, help="Nodes kept even when no job runs, spares not included.")
    ] = 0,
    spare_probability: Annotated[
        float | None, typer.Option(help="Instead of a count: how probably a spare is free when a failure comes.")
    ] = None,
    price_usd_per_hour: Annotated[
        float | None, typer.Option(help="What one instance costs you; jobs and incidents are valued at it.")
    ] = None,
    hold_failed_instances: Annotated[
        bool, typer.Option("--hold-failed-instances", help="Keep failed instances running for inspection.")
    ] = False,
    max_replacements_per_hour: Annotated[
        int | None, typer.Option(min=0, help="Nodes taken out by Everstep's own verdicts within an hour.")
    ] = None,
    node_role_name: Annotated[
        str | None, typer.Option(help="IAM role of the group's instances: their agents join by it, without a token.")
    ] = None,
    allow_drills: Annotated[
        bool, typer.Option("--allow-drills", help="Let administrators break its nodes on purpose.")
    ] = False,
    allow_commands: Annotated[
        bool, typer.Option("--allow-commands", help="Let submitters run programs beside their ranks.")
    ] = False,
    project: Annotated[str | None, typer.Option(help="Project that the fleet belongs to.")] = None,
    tag: Annotated[list[str] | None, typer.Option(help="name=value; may be repeated.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be changed of the group.")] = False,
    yes: Annotated[
        bool,
        typer.Option("--yes", "-y", help="Change the group without asking first; needed where there is no terminal."),
    ] = False,
    output: Output = OutputFormat.TABLE,
    query: Query = None,
) -> Shown:
    """Register an Auto Scaling group: from now on only Everstep changes its size and ends its instances.

    What changes of it is shown first.
    """
    request = {
        "FleetName": name,
        "AutoScalingGroupName": auto_scaling_group,
        "SpareCount": spare_count,
        "MinNodeCount": min_node_count,
        "HoldFailedInstances": hold_failed_instances,
        "AllowDrills": allow_drills,
        "AllowCommands": allow_commands,
        "Tags": pairs("--tag", tag or []),
        **without_none(
            Project=project,
            PriceUsdPerHour=price_usd_per_hour,
            SparePolicy=_policy(spare_probability),
            MaxReplacementsPerHour=max_replacements_per_hour,
            NodeRoleName=node_role_name,
        ),
    }
    is_for_people = output is OutputFormat.TABLE and query is None
    if dry_run or is_for_people or not yes:
        planned: Json = service.create_fleet(**request, DryRun=True)
        changes = planned["Changes"]
        if dry_run:
            nothing = f"Nothing of {auto_scaling_group} would be changed."
            checks = [f"{check['Setting']}: {check['Message']}" for check in planned["Checks"]]
            person = (*checks, *(map(_in_words, changes) if changes else [nothing]))
            return Shown(
                planned,
                person,
                f"{name} can be made of it as asked; nothing was changed. next: the same command without --dry-run",
            )
        for change in changes:
            say(_in_words(change))
        if changes and not confirmed(
            f"Change this of {auto_scaling_group}, and let Everstep keep it as the fleet {name}?", yes=yes
        ):
            raise typer.Exit(FAILED)
        request["ExpectedChanges"] = changes  # what was shown is what is done
    created: Json = service.create_fleet(**request)
    made = sum(change["Applies"] == "Now" for change in created["Changes"])
    told = (
        f"Everstep changed {counted(made, 'setting')} of {auto_scaling_group}"
        if made
        else f"{auto_scaling_group} was as it has to be"
    )
    return Shown(created, _facts(created["Fleet"]), f"{told}. next: everstep nodes list --fleet {name}")


def _in_words(change: Json) -> str:
    """Return one change of the group, with the time at which it applies and the reason."""
    return (
        f"{change['Setting']}: {change.get('Before', 'none')} → {change['After']} "
        f"({change['Applies'].lower()}). {change['Reason']}"
    )


@command(app, "list")
def list_fleets(service: Service, pages: Pages) -> Shown:
    """List fleets, by name."""
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
def update(
    service: Service,
    name: FleetName,
    spare_count: Annotated[int | None, typer.Option(min=0, help="Nodes that wait to take over.")] = None,
    min_node_count: Annotated[
        int | None, typer.Option(min=0, help="Nodes kept even when no job runs, spares not included.")
    ] = None,
    spare_probability: Annotated[
        float | None, typer.Option(help="Instead of a count: how probably a spare is free when a failure comes.")
    ] = None,
    price_usd_per_hour: Annotated[
        float | None, typer.Option(help="What one instance costs you; jobs and incidents are valued at it.")
    ] = None,
    hold_failed_instances: Annotated[
        bool | None,
        typer.Option(
            "--hold-failed-instances/--end-failed-instances",
            help="Keep failed instances running for inspection, or end them.",
        ),
    ] = None,
    max_replacements_per_hour: Annotated[
        int | None, typer.Option(min=0, help="Nodes taken out by Everstep's own verdicts within an hour.")
    ] = None,
    node_role_name: Annotated[
        str | None, typer.Option(help="IAM role of the group's instances: their agents join by it, without a token.")
    ] = None,
    allow_drills: Annotated[
        bool | None,
        typer.Option("--allow-drills/--forbid-drills", help="Let administrators break its nodes on purpose, or not."),
    ] = None,
    allow_commands: Annotated[
        bool | None,
        typer.Option(
            "--allow-commands/--forbid-commands", help="Let submitters run programs beside their ranks, or not."
        ),
    ] = None,
) -> Shown:
    """Change how many nodes and spares a fleet keeps, what they cost, and what becomes of nodes that fail."""
    changes = without_none(
        SpareCount=spare_count,
        MinNodeCount=min_node_count,
        PriceUsdPerHour=price_usd_per_hour,
        SparePolicy=_policy(spare_probability),
        HoldFailedInstances=hold_failed_instances,
        MaxReplacementsPerHour=max_replacements_per_hour,
        NodeRoleName=node_role_name,
        AllowDrills=allow_drills,
        AllowCommands=allow_commands,
    )
    fleet = service.update_fleet(FleetName=name, **changes)
    return _shown(fleet)


@command(
    app,
    asks=lambda given: (
        f"Take the silent nodes of {given['name']} for lost? Their instances are ended, and what only they "
        "hold is gone."
    ),
)
def unfreeze(service: Service, name: FleetName) -> Shown:
    """Say of a fleet most of which is silent: who is silent is gone. Holds until most of it is heard again."""
    fleet = service.unfreeze_fleet(FleetName=name)
    return _shown(fleet)


@command(app, asks=lambda given: f"Forget the fleet {given['name']} and end all its instances?")
def delete(service: Service, name: FleetName) -> Shown:
    """End a fleet's nodes and forget it; refused while jobs on it have not ended."""
    fleet = service.delete_fleet(FleetName=name)
    return Shown(fleet, f"{name} is being deleted")


@command(app, "join-token")
def join_token(
    service: Service,
    name: FleetName,
    expires_in_seconds: Annotated[
        int | None, typer.Option(min=60, help="Good for this long; by default until it is revoked.")
    ] = None,
) -> Shown:
    """Make a token for the user data of a fleet's launch template; each instance may use it once.

    The fleet may be created later.
    """
    token = service.create_join_token(FleetName=name, **without_none(ExpiresInSeconds=expires_in_seconds))
    # as an option every process of the node could read it
    how = "EVERSTEP_JOIN_TOKEN=TOKEN everstep agent --control-plane-url URL"
    return Shown(token, token["JoinToken"], f"It is shown this once. User data: {how}")


def _policy(probability: float | None) -> Json | None:
    return None if probability is None else {"Probability": probability}


def _spares(fleet: Json) -> str:
    policy = fleet.get("SparePolicy")
    return (
        f"{fleet['SpareCount']} spares"
        if policy is None
        else f"as many spares as make it {policy['Probability']:.4%} probable that one is free"
    )


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
            ("group", fleet["AutoScalingGroupName"]),
            ("nodes", ", ".join(f"{fleet[field]} {word}" for word, field in counts)),
            ("kept", f"{fleet['MinNodeCount']} at least and {_spares(fleet)}"),
            ("failed instances", "held for inspection" if fleet["HoldFailedInstances"] else "ended"),
            ("replacements", f"{fleet['MaxReplacementsPerHour']} an hour at most"),
            ("node role", fleet.get("NodeRoleName")),
            ("drills", "allowed" if fleet.get("AllowDrills") else None),
            ("commands", "allowed" if fleet.get("AllowCommands") else None),
            ("instance type", fleet["InstanceType"] or None),
            ("zone", fleet["AvailabilityZone"] or None),
            ("price", None if price is None else f"${price} per node and hour"),
            ("time of jobs", job_time(fleet)),
            ("ETTR", ettr_words(fleet)),
            ("incidents", incident_words(fleet)),
            ("cost", None if cost is None else f"{dollars(cost)} for {hours(fleet['NodeSeconds'])} node-hours of jobs"),
            ("drift", "\n".join(fleet["Drift"]) or None),
            ("project", fleet["Project"]),
            ("created", moment(fleet["CreationTime"])),
        ]
    )
