"""What needs a person: the duties of all jobs and fleets."""

from __future__ import annotations

from control_plane.api import views
from control_plane.api.alike import shaped
from control_plane.api.auth import Reader
from control_plane.api.deps import ServicesDep
from control_plane.api.router import Router
from control_plane.api.schemas import duties as duties_schemas
from control_plane.core.duties import DutyKind, Urgency
from control_plane.loop import disposition

router = Router(prefix="/v1/duties", tags=["Duties"])


@router.get("", operation_id="DescribeDuties")
def describe_duties(caller: Reader, services: ServicesDep) -> duties_schemas.DescribeDutiesResponse:
    """List the jobs and fleets that need a person now or later, the most urgent first, then the newest.

    A job that failed longer than a day ago needs nobody. A held node is listed with its fleet, and not again with the
    job that lost it.
    """
    agents, now = services.peers.agents().connected, services.now().timestamp()
    with services.database.read() as session:
        found = disposition.everything(session, agents, now).values()
    # A fleet's duty about held nodes contains the nodes of its jobs. Each node is listed once.
    with_nodes = {each.fleet_name for each in found if not each.job_name and each.duty.kind is DutyKind.HELD_NODES}
    shown = [
        each
        for each in found
        if each.duty.urgency.needs_a_person
        and (not each.job_name or caller.project_filter in (None, each.project))
        and not (each.job_name and each.duty.kind is DutyKind.HELD_NODES and each.fleet_name in with_nodes)
    ]
    order = tuple(Urgency)
    shown.sort(key=lambda each: (order.index(each.duty.urgency), -(each.duty.since or now)))
    return duties_schemas.DescribeDutiesResponse(
        duties=[shaped(each, duties_schemas.SubjectDuty, duty=views.duty(each)) for each in shown]
    )
