"""Fleets: register an Auto Scaling group, change its settings, delete it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

from control_plane.api import page_tokens, views
from control_plane.api.alike import shaped
from control_plane.api.auth import Admin, Reader
from control_plane.api.deps import FleetNamePath, MaxResults, NextToken, Services, ServicesDep, page_of
from control_plane.api.errors import InUse, invalid
from control_plane.api.router import Router
from control_plane.api.schemas import fleets as fleets_schemas
from control_plane.cloud import contract
from control_plane.cloud.contract import Change
from control_plane.cloud.errors import ContractViolation, GroupNotOurs
from control_plane.cloud.errors import NotFound as CloudNotFound
from control_plane.cloud.operator import FLEET_TAG, GroupState
from control_plane.core.fleets import first_desired
from control_plane.core.observed.fleets import FleetSpec
from control_plane.core.observed.spans import Bucket
from control_plane.core.states import FleetStatus
from control_plane.db import events, fleets, incidents, jobs, nodes
from control_plane.db.fleets import FleetRecord, NewFleet
from control_plane.loop import disposition
from everstep.protocol.ids import FleetName

_LOOK: Final = "Request the changes again with DryRun."
_SETTINGS: Final = fleets_schemas.UpdateFleetRequest.model_fields.keys() - {"spare_policy"}
"""Request fields that the database stores in columns of the same name."""
_wrong = partial(invalid, sentence="The fleet cannot be created: {field}: {message}")

router = Router(prefix="/v1/fleets", tags=["Fleets"])


@router.post("", operation_id="CreateFleet", status_code=201)
def create_fleet(
    request: fleets_schemas.CreateFleetRequest, caller: Admin, services: ServicesDep
) -> fleets_schemas.CreateFleetResponse:
    """Register an Auto Scaling group as a fleet.

    From then on, only Everstep may resize the group and terminate its instances. The response lists the changes made to
    the group. With DryRun, the call changes and creates nothing and returns the planned changes. Pass these as
    ExpectedChanges to make the call fail if it would change anything else.
    """
    project = caller.choose_project(request.project)
    with services.database.read() as session:
        fleets.require_free(session, request.fleet_name, request.auto_scaling_group_name)
    with _convert_group_errors(request.auto_scaling_group_name):
        group = services.operator.describe_group(request.auto_scaling_group_name)
        contract.require_fit(group)
        _require_room(request, group)
        planned = _answer(request, group, contract.changes(group), None)
        if request.expected_changes is not None:
            _require_expected(group.name, planned.changes, request.expected_changes)
        if request.dry_run:
            return planned
        ensured = contract.ensure(services.operator, group)
    fleet = _store(services, request, project, ensured.group)
    return _answer(request, ensured.group, ensured.made, view(services, fleet))


@router.get("", operation_id="ListFleets")
def list_fleets(
    _caller: Reader, services: ServicesDep, max_results: MaxResults = 100, next_token: NextToken = None
) -> fleets_schemas.ListFleetsResponse:
    """List fleets, sorted by name."""
    after = None if next_token is None else page_tokens.position(next_token, page_tokens.text)[0]
    with services.database.read() as session:
        page = fleets.page(session, after=after, limit=max_results + 1)
    shown, more = page_of(page, max_results, lambda fleet: (fleet.name,))
    return fleets_schemas.ListFleetsResponse(fleets=[view(services, fleet) for fleet in shown], next_token=more)


@router.get("/{FleetName}", operation_id="DescribeFleet")
def describe_fleet(fleet_name: FleetNamePath, _caller: Reader, services: ServicesDep) -> fleets_schemas.Fleet:
    """Describe one fleet."""
    with services.database.read() as session:
        fleet = fleets.get(session, fleet_name)
    return view(services, fleet)


@router.post("/{FleetName}", operation_id="UpdateFleet")
def update_fleet(
    fleet_name: FleetNamePath, request: fleets_schemas.UpdateFleetRequest, _caller: Admin, services: ServicesDep
) -> fleets_schemas.Fleet:
    """Change a fleet's settings: node and spare counts, price, and how failed nodes are handled."""
    with services.change() as session:
        before = fleets.get(session, fleet_name)
        fleet = fleets.set_wanted(session, fleet_name, **_settings(request))
        if fleet != before:
            failed = "held for inspection" if fleet.hold_failed_instances else "ended"
            policy = fleet.spare_probability
            spares = (
                f"{fleet.spare_count} spares"
                if policy is None
                else f"enough spares that one is free with probability {policy:.4%}"
            )
            message = (
                f"The fleet {fleet.name} now keeps at least {fleet.min_node_count} nodes and {spares}; failed "
                f"instances are {failed}, at most {fleet.max_replacements_per_hour} are replaced per hour. "
                f"TLS between nodes: {fleet.replica_encryption}."
            )
            events.append_for_fleet(session, fleet, "FleetUpdated", message, services.now())
    return view(services, fleet)


@router.post("/{FleetName}/unfreeze", operation_id="UnfreezeFleet", status_code=202)
def unfreeze_fleet(fleet_name: FleetNamePath, _caller: Admin, services: ServicesDep) -> fleets_schemas.Fleet:
    """Confirm that the silent nodes of a mostly silent fleet are lost, so that Everstep replaces them.

    The confirmation expires once most of the fleet is connected again. It has no effect on drift: while the settings of
    the Auto Scaling group differ from those that Everstep needs, Everstep still replaces no node.
    """
    now = services.now()
    with services.change() as session:
        before = fleets.get(session, fleet_name)
        fleet = fleets.lift_blindness(session, fleet_name, now)
        if before.blindness_lifted_at is None:
            message = (
                f"A user confirmed for the fleet {fleet.name} that its silent nodes are lost. This applies until "
                "most of the fleet reports again."
            )
            events.append_for_fleet(session, fleet, "FleetUnfrozen", message, now)
    return view(services, fleet)


@router.delete("/{FleetName}", operation_id="DeleteFleet", status_code=202)
def delete_fleet(fleet_name: FleetNamePath, _caller: Admin, services: ServicesDep) -> fleets_schemas.Fleet:
    """End a fleet's nodes and delete the fleet.

    Fails while jobs of the fleet have not ended. Repeated calls change nothing.
    """
    now = services.now()
    with services.change() as session:
        before = fleets.get(session, fleet_name)
        fleet = fleets.request_delete(session, fleet_name, now)
        if before.delete_requested_at is None:
            message = f"The fleet {fleet.name} is being deleted: Everstep terminates its nodes one by one."
            events.append_for_fleet(session, fleet, "FleetDeleteRequested", message, now)
    return view(services, fleet)


def _settings(request: fleets_schemas.CreateFleetRequest | fleets_schemas.UpdateFleetRequest) -> dict[str, Any]:
    """Return the database columns that a request changes.

    A request with SpareCount but without SparePolicy removes the stored policy, which would override SpareCount.
    """
    sent = {name: getattr(request, name) for name in _SETTINGS}
    columns = {name: value for name, value in sent.items() if value is not None}
    if request.spare_policy is not None or request.spare_count is not None:
        columns["spare_probability"] = _spare_probability(request)
    return columns


def _require_room(request: fleets_schemas.CreateFleetRequest, group: GroupState) -> None:
    wanted = request.min_node_count + request.spare_count
    if wanted > group.max_size:
        counts = f"{request.min_node_count} nodes and {request.spare_count} spares are {wanted}"
        raise _wrong("MinNodeCount", f"{counts}; the group {group.name} has MaxSize {group.max_size}")


def _require_expected(
    name: str, planned: list[fleets_schemas.GroupChange], expected: list[fleets_schemas.GroupChange]
) -> None:
    """Raise InUse if Everstep must change the Auto Scaling group in a way that the request does not expect.

    `planned` may lack an expected change, because a client may repeat a request that already made the change.
    """
    others = [
        f"{change.setting}: {change.before or 'none'} → {change.after}. {change.reason}"
        for change in planned
        if change not in expected
    ]
    if others:
        raise InUse(
            f"{name} differs from ExpectedChanges; nothing was changed. Missing: {' '.join(others)}",
            hint=_LOOK,
        )


def _answer(
    request: fleets_schemas.CreateFleetRequest,
    group: GroupState,
    changes: tuple[Change, ...],
    fleet: fleets_schemas.Fleet | None,
) -> fleets_schemas.CreateFleetResponse:
    return fleets_schemas.CreateFleetResponse(
        fleet_name=request.fleet_name,
        fleet=fleet,
        checks=[shaped(check, fleets_schemas.GroupCheck) for check in contract.checks(group)],
        changes=[
            *(shaped(change, fleets_schemas.GroupChange, applies="Now") for change in changes),
            *_later(request, group),
        ],
    )


def _later(request: fleets_schemas.CreateFleetRequest, group: GroupState) -> list[fleets_schemas.GroupChange]:
    """Return the change of desired capacity that the fleet's background loop will make once the fleet exists.

    The list is empty if the desired capacity need not change.
    """
    spec = FleetSpec(
        name=FleetName(request.fleet_name),
        group=group.name,
        min_node_count=request.min_node_count,
        spare_count=request.spare_count,
        spare_probability=_spare_probability(request),
    )
    desired = first_desired(spec, min_size=group.min_size, max_size=group.max_size)
    if desired == group.desired_count:
        return []
    kept = f"The fleet {spec.name} keeps {desired} nodes before its first job, including spares."
    ended = (
        ""
        if desired > group.desired_count
        else " Everstep terminates idle instances one by one, once their agents have connected."
    )
    return [
        fleets_schemas.GroupChange(
            setting="DesiredCapacity",
            before=str(group.desired_count),
            after=str(desired),
            reason=f"{kept}{ended}",
            applies="Later",
        )
    ]


def _spare_probability(
    request: fleets_schemas.CreateFleetRequest | fleets_schemas.UpdateFleetRequest,
) -> float | None:
    return request.spare_policy.probability if request.spare_policy is not None else None


def _store(
    services: Services, request: fleets_schemas.CreateFleetRequest, project: str, group: GroupState
) -> FleetRecord:
    now = services.now()
    with services.change() as session:
        fleet = fleets.create(
            session,
            NewFleet(
                **_settings(request),
                name=request.fleet_name,
                auto_scaling_group_name=group.name,
                project=project,
                state=FleetStatus.ACTIVE,
                max_node_count=group.max_size,
                instance_type=group.instance_type,
                encrypting_types=tuple(sorted(group.encrypting_types)),
                availability_zone=next(iter(group.availability_zones), ""),
                tags=request.tags,
            ),
            now,
        )
        message = (
            f"The Auto Scaling group {group.name} became the fleet {fleet.name}: at least {fleet.min_node_count} "
            f"nodes, {fleet.spare_count} spares."
        )
        events.append_for_fleet(session, fleet, "FleetCreated", message, now)
    return fleet


@contextmanager
def _convert_group_errors(name: str) -> Iterator[None]:
    """Convert cloud errors about the Auto Scaling group into errors of the request field AutoScalingGroupName."""
    try:
        yield
    except CloudNotFound as error:
        raise _wrong(
            "AutoScalingGroupName", f"there is no Auto Scaling group named {name!r} in this account and region"
        ) from error
    except GroupNotOurs as error:
        raise _wrong(
            "AutoScalingGroupName",
            f"the group {name!r} has no tag {FLEET_TAG}; add the tag to let Everstep manage the group",
        ) from error
    except ContractViolation as error:
        raise _wrong("AutoScalingGroupName", error.message) from error


def view(services: Services, fleet: FleetRecord) -> fleets_schemas.Fleet:
    """Return the description of a fleet, with its nodes and the history of its jobs."""
    with services.database.read() as session:
        members = nodes.of_fleet(session, fleet.name)
        history = views.History(
            jobs=jobs.totals(session, fleet.name, tuple(Bucket)),
            incidents=incidents.totals(session, fleet_name=fleet.name),
        )
        of_fleet = disposition.of_fleets(session, [fleet])[fleet.name]
    return views.fleet(fleet, members, tuple(services.peers.agents().views.values()), history, of_fleet)
