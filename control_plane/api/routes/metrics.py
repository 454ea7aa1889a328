"""`GET /metrics`: metrics of this service for Prometheus (`control_plane.api.prometheus`).

The route is not part of the published API, because only a Prometheus scraper calls it.
"""

from __future__ import annotations

from importlib.metadata import version

from fastapi import Response

from control_plane.api.auth import Reader
from control_plane.api.deps import ServicesDep
from control_plane.api.prometheus import MEDIA_TYPE, ServerFacts, exposition
from control_plane.api.router import Router
from control_plane.db import automation, events, exports, fleets, incidents, jobs, nodes, protection

router = Router(include_in_schema=False)


@router.get("/metrics")
def get_metrics(caller: Reader, services: ServicesDep) -> Response:
    """Return all metrics for a scrape.

    If the caller's token belongs to a project, return only the metrics of this project's jobs.
    """
    agents = services.peers.agents()
    with services.database.read() as session:
        live = tuple(job for job in jobs.unfinished(session) if caller.project_filter in (None, job.project))
        facts = ServerFacts(
            version=version("everstep"),
            jobs=live,
            shards={job.run_id: protection.of_run(session, job.run_id) for job in live},
            recoveries=incidents.recoveries(session, [job.run_id for job in live]),
            fleets=fleets.every(session),
            nodes=nodes.of_fleet(session),
            exports=exports.every(session),
            is_paused=automation.find(session) is not None,
            is_restore_pending=bool(automation.pending_restores(session)),
            newest_event_id=events.newest_id(session),
            connected=frozenset(agents.connected),
            refused_count=sum(agents.refused.values()),
        )
    return Response(
        exposition(facts, services.loop_metrics if caller.project_filter is None else None), media_type=MEDIA_TYPE
    )
