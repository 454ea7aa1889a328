"""What needs a person: the duties of all jobs and fleets."""

from __future__ import annotations

from control_plane.api import views
from control_plane.api.auth import Reader
from control_plane.api.deps import ServicesDep
from control_plane.api.router import Router
from control_plane.api.schemas import duties as duties_schemas
from control_plane.core.duties import Urgency
from control_plane.loop import standing

router = Router(prefix="/v1/duties", tags=["Duties"])


@router.get("", operation_id="DescribeDuties")
def describe_duties(caller: Reader, services: ServicesDep) -> duties_schemas.DescribeDutiesResponse:
    """List the jobs and fleets that need a person now or later, the most urgent first, then the newest.

    A job that failed longer than a day ago needs nobody.
    """
    agents, now = services.peers.agents().connected, services.now().timestamp()
    with services.database.read() as session:
        found = standing.everything(session, agents, now).values()
    shown = [
        each
        for each in found
        if each.duty.urgency.needs_a_person and (not each.job_name or caller.project_filter in (None, each.project))
    ]
    order = tuple(Urgency)
    shown.sort(key=lambda each: (order.index(each.duty.urgency), -(each.duty.since or now)))
    return duties_schemas.DescribeDutiesResponse(
        duties=[
            duties_schemas.SubjectDuty(
                training_job_name=each.job_name or None,
                run_id=each.run_id or None,
                fleet_name=each.fleet_name,
                project=each.project,
                duty=views.duty(each),
            )
            for each in shown
        ]
    )
