"""Nodes: which instances there are, what each is used for, and what becomes of those that are held."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query
from sqlalchemy.orm import Session

from control_plane.api import schemas, views
from control_plane.api.auth import Admin, Caller, Reader
from control_plane.api.deps import NodeIdPath, Router, Services, ServicesDep
from control_plane.core.states import NodeState
from control_plane.db import events, implications, jobs, nodes
from control_plane.db.events import NewEvent
from control_plane.db.implications import ImplicationRecord
from control_plane.db.nodes import NodeRecord
from everstep.protocol.ids import NodeId

router = Router(prefix="/v1/nodes", tags=["Nodes"])


@router.get("", operation_id="ListNodes")
def list_nodes(
    caller: Reader,
    services: ServicesDep,
    fleet_name: Annotated[str | None, Query(alias="FleetName", max_length=63)] = None,
    include_ended: Annotated[bool, Query(alias="IncludeEnded")] = False,
) -> schemas.ListNodesResponse:
    """List nodes, oldest first; those that have ended on request."""
    with services.database.read() as session:
        found = nodes.of_fleet(session, fleet_name, with_ended=include_ended)
        return schemas.ListNodesResponse(nodes=[_shown(session, services, record, caller) for record in found])


@router.get("/{NodeId}", operation_id="DescribeNode")
def describe_node(node_id: NodeIdPath, caller: Reader, services: ServicesDep) -> schemas.Node:
    """Describe one node."""
    with services.database.read() as session:
        return _shown(session, services, nodes.get(session, node_id), caller, history=implications.of_node(session, node_id))


@router.post("/{NodeId}/release", operation_id="ReleaseNode", status_code=202)
def release_node(node_id: NodeIdPath, request: schemas.ReleaseNodeRequest, caller: Admin, services: ServicesDep) -> schemas.Node:
    """Let a held node work again, or end its instance. One kept for inspection is ended once its evidence is in S3. Asking again changes nothing."""
    now = services.now()
    with services.database.write() as session:
        release = "terminate" if request.terminate else "return"
        record = nodes.ask_release(session, node_id, state=NodeState.HELD, release=release, now=now)
        what = "its instance is to be ended" if request.terminate else "it may work again"
        message = f"A person released {node_id}: {what}. It was held: {record.reason}"
        events.append(session, NewEvent(at=now, type="NodeReleased", message=message, fleet_name=record.fleet_name, node_id=node_id))
        shown = _shown(session, services, record, caller)
    services.wake()
    return shown


def _shown(session: Session, services: Services, record: NodeRecord, caller: Caller, *, history: tuple[ImplicationRecord, ...] = ()) -> schemas.Node:
    view = services.registry.views().get(NodeId(record.id))
    job_name = None
    if record.run_id is not None:
        job = jobs.get_run(session, record.run_id)
        job_name = job.name if caller.project in ("", job.project) else None
    return views.node(record, view, refused_message_count=services.registry.refused_count(NodeId(record.id)), job_name=job_name, history=history)
