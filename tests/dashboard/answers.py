"""Records the API's answers about a simulated fleet at one moment, for the tests that render the dashboard's pages.

The routes of the API compute each answer from the fleet's database and its connected agents, in one call without HTTP.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from control_plane.api.archive import SourceLimits
from control_plane.api.auth import Caller
from control_plane.api.deps import Services, SortOrder
from control_plane.api.held_tokens import HeldTokens
from control_plane.api.memberships import Memberships
from control_plane.api.peers import Peers
from control_plane.api.routes import (
    drills,
    duties,
    events,
    fleets,
    incidents,
    job_lists,
    jobs,
    logs,
    metric_data,
    nodes,
    notes,
    reports,
    revisions,
)
from control_plane.api.schemas.common import Shape
from control_plane.certificates import FleetAuthorities
from control_plane.db.tokens import Role, TokenRecord
from control_plane.loop.event_feed import EventFeed
from tests.sim.world import BUCKET, START, World

Answers = dict[str, Any]
"""Answers as JSON, by `GET` and the path of the request without its query.

An answer with a list contains all entries. The code that reads the answers applies the filters of a request.
"""
MOST = 1000
_TOKEN = TokenRecord(
    id="t", digest="", kind="user", role="admin", project="", fleet_name=None, node_id=None, description="",
    created_at=START, expires_at=None, revoked_at=None,
)  # fmt: skip
_CALLER = Caller(role=Role.ADMIN, project="", token=_TOKEN)


def services_of(world: World) -> Services:
    """Return the services that the API's read-only routes need, over a simulated fleet."""
    return Services(
        database=world.database,
        tokens=cast(HeldTokens, None),
        operator=world.operator,
        memberships=Memberships(world.operator, world.monotonic),
        events=None,
        objects=world.objects,
        registry=world.registry,
        peers=Peers(world.database, world.registry, key=""),
        timeouts=world.timeouts,
        bucket=BUCKET,
        default_max_slowdown=0.0,
        spool_directory=Path(),
        source_limits=SourceLimits(),
        session_key=b"",
        nonce_key=b"",
        authorities=FleetAuthorities(b""),
        server_id="",
        feed=cast(EventFeed, None),
        now=lambda: world.now,
        wake=lambda: None,
    )


def answers(world: World) -> Answers:
    """Return all answers at the present moment.

    The paths of a job's answers contain the job's name, not its run id. The rendered pages request only these paths.
    """
    services = services_of(world)
    found: Answers = {}

    def add(path: str, shape: Shape) -> Any:
        found[f"GET {path}"] = json.loads(shape.model_dump_json(by_alias=True, exclude_none=True))
        return found[f"GET {path}"]

    listed = add("/v1/training-jobs", job_lists.list_training_jobs(_CALLER, services, max_results=MOST))
    for name in [job["TrainingJobName"] for job in listed["TrainingJobSummaries"]]:
        path = f"/v1/training-jobs/{name}"
        add(path, jobs.describe_training_job(name, _CALLER, services))
        add(f"{path}/protection", jobs.describe_protection(name, _CALLER, services))
        add(f"{path}/nodes", jobs.list_training_job_nodes(name, _CALLER, services, max_results=MOST))
        add(f"{path}/time-spans", jobs.list_time_spans(name, _CALLER, services, max_results=MOST))
        add(f"{path}/checkpoints", jobs.list_checkpoints(name, _CALLER, services, max_results=MOST))
        add(f"{path}/revisions", revisions.list_training_job_revisions(name, _CALLER, services))
        add(f"{path}/notes", notes.list_training_job_notes(name, _CALLER, services))
        add(f"{path}/logs/events", logs.get_log_events(name, _CALLER, services, start_from_head=True, limit=MOST))
        add(f"{path}/metric-data", metric_data.get_metric_data(name, _CALLER, services, max_points=MOST))
    run_ids = ",".join(job["RunId"] for job in listed["TrainingJobSummaries"])
    add("/v1/loss-curves", metric_data.batch_get_loss_curves(_CALLER, services, run_ids))
    happened = add("/v1/incidents", incidents.list_incidents(_CALLER, services, max_results=MOST))
    for incident_id in [incident["IncidentId"] for incident in happened["Incidents"]]:
        path = f"/v1/incidents/{incident_id}"
        add(path, incidents.describe_incident(incident_id, _CALLER, services))
        add(f"{path}/similar", incidents.list_similar_incidents(incident_id, _CALLER, services))
    add("/v1/duties", duties.describe_duties(_CALLER, services))
    add("/v1/fleets", fleets.list_fleets(_CALLER, services, max_results=MOST))
    add("/v1/nodes", nodes.list_nodes(_CALLER, services, include_ended=True))
    add("/v1/drills", drills.list_drills(_CALLER, services, max_results=MOST))
    add("/v1/reports", reports.get_report(_CALLER, services))
    newest = events.list_events(_CALLER, services, max_results=MOST, sort_order=SortOrder.DESCENDING)
    add("/v1/events", newest)
    return found
