"""Nodes: which instances there are and what each is used for, read-only."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query
from sqlalchemy.orm import Session

from control_plane.api import schemas, views
from control_plane.api.auth import Caller, Reader
from control_plane.api.deps import NodeIdPath, Router, Services, ServicesDep
from control_plane.db import jobs, nodes
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
        return _shown(session, services, nodes.get(session, node_id), caller)


def _shown(session: Session, services: Services, record: NodeRecord, caller: Caller) -> schemas.Node:
    view = services.registry.views().get(NodeId(record.id))
    job_name = None
    if record.run_id is not None:
        job = jobs.get_run(session, record.run_id)
        job_name = job.name if caller.project in ("", job.project) else None
    return views.node(record, view, refused_message_count=services.registry.refused_count(NodeId(record.id)), job_name=job_name)
