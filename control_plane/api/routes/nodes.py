"""Nodes: list and describe instances, and drain, replace, reboot, hold or release them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

from fastapi import Query
from sqlalchemy.orm import Session

from control_plane.accounts import reasons
from control_plane.api import page_tokens, views
from control_plane.api.auth import Admin, Caller, Reader
from control_plane.api.deps import MaxResults, NextToken, NodeIdPath, Services, ServicesDep, page_of
from control_plane.api.errors import InUse
from control_plane.api.peers import KnownAgents
from control_plane.api.router import Router
from control_plane.api.schemas import nodes as nodes_schemas
from control_plane.core import requests
from control_plane.core.observed.facts import NodeRequest, Requested
from control_plane.core.observed.fleets import Hold, HoldRelease
from control_plane.core.states import FleetStatus, NodeState
from control_plane.db import events, fleets, implications, jobs, nodes, tokens
from control_plane.db.implications import ImplicationRecord
from control_plane.db.nodes import SavedNode
from everstep.protocol.ids import NodeId

router = Router(prefix="/v1/nodes", tags=["Nodes"])


@router.get("", operation_id="ListNodes")
def list_nodes(
    caller: Reader,
    services: ServicesDep,
    fleet_name: Annotated[str | None, Query(alias="FleetName", max_length=63)] = None,
    include_ended: Annotated[bool, Query(alias="IncludeEnded")] = False,
    max_results: MaxResults = 1000,
    next_token: NextToken = None,
) -> nodes_schemas.ListNodesResponse:
    """List nodes, oldest first. IncludeEnded adds nodes that have ended."""
    after = None if next_token is None else page_tokens.position(next_token, page_tokens.moment, page_tokens.text)
    with services.database.read() as session:
        page = nodes.page(session, fleet_name, with_ended=include_ended, after=after, limit=max_results + 1)
        owners = jobs.owners(session, {record.run_id for record in page if record.run_id is not None})
        prices = {fleet.name: fleet.price_usd_per_hour for fleet in fleets.every(session)}
    agents = services.peers.agents()
    shown, more = page_of(page, max_results, lambda record: (record.created_at.isoformat(), record.id))
    return nodes_schemas.ListNodesResponse(
        nodes=[_view(record, agents, owners, caller, prices.get(record.fleet_name)) for record in shown],
        next_token=more,
    )


@router.get("/{NodeId}", operation_id="DescribeNode")
def describe_node(node_id: NodeIdPath, caller: Reader, services: ServicesDep) -> nodes_schemas.Node:
    """Describe one node."""
    with services.database.read() as session:
        history = implications.of_node(session, node_id, caller.project_filter)
        return _shown(session, services, nodes.get(session, node_id), caller, history)


@router.post("/{NodeId}/release", operation_id="ReleaseNode", status_code=202)
def release_node(
    node_id: NodeIdPath, request: nodes_schemas.ReleaseNodeRequest, caller: Admin, services: ServicesDep
) -> nodes_schemas.Node:
    """End the hold of a node that Everstep keeps out of use: return it to service, or terminate its instance.

    If the node is not held yet, cancel the pending request to hold it.

    Everstep terminates a node that is held for inspection only after data for the inspection is stored in S3. Repeated
    calls change nothing.
    """
    now = services.now()
    with services.change() as session:
        if (
            not request.terminate
            and nodes.get(session, node_id).state != NodeState.HELD
            and nodes.call_off(session, node_id)
        ):
            record = nodes.get(session, node_id)
            message = f"{caller.name} cancelled the request for {node_id}."
            events.add(session, "NodeRequestCalledOff", message, now, fleet_name=record.fleet_name, node_id=node_id)
            return _shown(session, services, record, caller)
        release = HoldRelease.TERMINATE if request.terminate else HoldRelease.RETURN
        record = nodes.ask_release(session, node_id, state=NodeState.HELD, release=release, now=now)
        what = "its instance will be terminated" if request.terminate else "it may work again"
        message = f"A user released {node_id}: {what}. It was held: {reasons.sentence(record.reason)}"
        events.add(session, "NodeReleased", message, now, fleet_name=record.fleet_name, node_id=node_id)
        return _shown(session, services, record, caller)


@router.post("/{NodeId}/drain", operation_id="DrainNode", status_code=202)
def drain_node(
    node_id: NodeIdPath, request: nodes_schemas.DrainNodeRequest, caller: Admin, services: ServicesDep
) -> nodes_schemas.Node:
    """Move a node's job to another node, then keep the drained node out of use until ReleaseNode.

    Once the other node is ready, all ranks stop at the same step, and the job continues on that node. The job loses no
    step. Repeated calls change nothing.
    """
    return _ask(NodeRequest.DRAIN, node_id, request, caller, services)


@router.post("/{NodeId}/replace", operation_id="ReplaceNode", status_code=202)
def replace_node(
    node_id: NodeIdPath, request: nodes_schemas.ReplaceNodeRequest, caller: Admin, services: ServicesDep
) -> nodes_schemas.Node:
    """Move the job off a node as DrainNode does, then terminate the node's instance and launch a new one.

    Repeated calls change nothing.
    """
    return _ask(NodeRequest.REPLACE, node_id, request, caller, services)


@router.post("/{NodeId}/reboot", operation_id="RebootNode", status_code=202)
def reboot_node(
    node_id: NodeIdPath, request: nodes_schemas.RebootNodeRequest, caller: Admin, services: ServicesDep
) -> nodes_schemas.Node:
    """Move the job off a node as DrainNode does, then reboot the node and return it to service.

    Repeated calls change nothing.
    """
    return _ask(NodeRequest.REBOOT, node_id, request, caller, services)


@router.post("/{NodeId}/hold", operation_id="HoldNode", status_code=202)
def hold_node(
    node_id: NodeIdPath, request: nodes_schemas.HoldNodeRequest, caller: Admin, services: ServicesDep
) -> nodes_schemas.Node:
    """Keep a node without a job out of use until ReleaseNode. Repeated calls change nothing."""
    return _ask(NodeRequest.HOLD, node_id, request, caller, services)


@router.post("/{NodeId}/reset-session", operation_id="ResetNodeSession")
def reset_node_session(
    node_id: NodeIdPath, request: nodes_schemas.ResetNodeSessionRequest, caller: Admin, services: ServicesDep
) -> nodes_schemas.Node:
    """Revoke the session of a node's agent, and permit the node to join again with a join token.

    Use this operation for an instance that lost its state directory, or whose session may have been copied. The agent's
    open connection ends within ten seconds. A repeated call also revokes the session that the agent has received since.
    """
    now = services.now()
    with services.database.write() as session:
        record = nodes.get(session, node_id)
        nodes.reset_joined(session, node_id)
        tokens.revoke_sessions(session, node_id, now)
        message = (
            f"{caller.name} reset the session of {node_id}{f': {request.reason}' if request.reason else ''}. The "
            "node may join once more."
        )
        events.add(session, "NodeSessionReset", message, now, fleet_name=record.fleet_name, node_id=node_id)
        return _shown(session, services, record, caller)


def _ask(
    asked: NodeRequest, node_id: str, request: nodes_schemas.NodeOperation, caller: Caller, services: Services
) -> nodes_schemas.Node:
    """Validate and store a person's request for a node. The fleet loop executes the request."""
    now = services.now()
    with services.change() as session:
        record = nodes.get(session, node_id)
        if record.hold == Hold.PERSON and asked in (NodeRequest.DRAIN, NodeRequest.HOLD):
            return _shown(session, services, record, caller)  # The node is already in the requested state.
        refusal = requests.refusal(asked, _standing(session, record))
        if refusal is not None:
            words = reasons.sentence(refusal)
            raise InUse(f"{words[:1].upper()}{words[1:]}.")
        wanted = Requested(request=asked, node_id=NodeId(node_id), by=caller.name, note=request.reason)
        if nodes.ask(session, node_id, wanted):
            words = reasons.sentence(wanted)
            events.add(session, "NodeRequested", words, now, fleet_name=record.fleet_name, node_id=node_id)
        return _shown(session, services, nodes.get(session, node_id), caller)


def _standing(session: Session, record: SavedNode) -> requests.RequestContext:
    fleet = fleets.get(session, record.fleet_name)
    others = nodes.of_fleet(session, record.fleet_name)
    job = jobs.get_run(session, record.run_id) if record.run_id is not None else None
    return requests.RequestContext(
        node_id=record.id,
        state=NodeState(record.state),
        hold=Hold(record.hold) if record.hold is not None else None,
        request=record.request.request if isinstance(record.request, Requested) else None,
        fleet_status=FleetStatus(fleet.state),
        fleet_reasons=fleet.reasons,
        spare_count=sum(other.state == NodeState.SPARE and other.request is None for other in others),
        node_count=len(others),
        max_node_count=fleet.max_node_count,
        job_name=job.name if job is not None else "",
        taken_over_by=job.taken_over_by if job is not None else "",
    )


def _shown(
    session: Session, services: Services, record: SavedNode, caller: Caller, history: Sequence[ImplicationRecord] = ()
) -> nodes_schemas.Node:
    owners = jobs.owners(session, {record.run_id} if record.run_id is not None else set())
    fleet = fleets.find(session, record.fleet_name)
    price = None if fleet is None else fleet.price_usd_per_hour
    return _view(record, services.peers.agents(), owners, caller, price, history)


def _view(
    record: SavedNode,
    agents: KnownAgents,
    owners: Mapping[str, jobs.Owner],
    caller: Caller,
    price_usd_per_hour: float | None,
    history: Sequence[ImplicationRecord] = (),
) -> nodes_schemas.Node:
    owner = owners.get(record.run_id) if record.run_id is not None else None
    job_name = owner.job_name if owner is not None and caller.project in ("", owner.project) else None
    node_id = NodeId(record.id)
    return views.node(
        record,
        agents.views.get(node_id),
        refused_message_count=agents.refused.get(node_id, 0),
        job_name=job_name,
        price_usd_per_hour=price_usd_per_hour,
        with_reasons=job_name is not None or caller.project_filter is None,
        history=history,
    )
