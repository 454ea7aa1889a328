"""Operations with which an administrator pauses and resumes all automatic actions of the control plane."""

from __future__ import annotations

from control_plane.api.alike import shaped
from control_plane.api.auth import Admin, Reader
from control_plane.api.deps import ServicesDep
from control_plane.api.router import Router
from control_plane.api.schemas import automation as automation_schemas
from control_plane.db import automation, events
from control_plane.db.automation import PauseRecord

router = Router(prefix="/v1/automation", tags=["Automation"])


@router.get("", operation_id="DescribeAutomation")
def describe_automation(_caller: Reader, services: ServicesDep) -> automation_schemas.Automation:
    """Return whether the service's automatic actions are active or paused, and who paused them."""
    with services.database.read() as session:
        return _shown(automation.find(session))


@router.post("/pause", operation_id="PauseAutomation", status_code=202)
def pause_automation(
    request: automation_schemas.PauseAutomationRequest, caller: Admin, services: ServicesDep
) -> automation_schemas.Automation:
    """Pause all automatic actions until ResumeAutomation, also across restarts of the service.

    During the pause, the service terminates, launches and reboots no instance, starts and restarts no job, and deletes
    no checkpoint. Running jobs continue to train and to store snapshots and checkpoints. The service still halts ranks
    of ended generations. It still accepts requests for jobs and nodes, which take effect after the pause. Actions that
    the service has already begun may continue for up to a second.

    If automation is already paused for the same reason, the call changes nothing. Raises ConflictException if
    automation is paused for another reason.
    """
    now = services.now()
    with services.change() as session:
        if automation.pause(session, PauseRecord(paused_at=now, paused_by=caller.name, reason=request.reason)):
            message = f"{caller.name} paused all automatic actions: {request.reason}"
            events.add(session, "AutomationPaused", message, now)
        return _shown(automation.find(session))


@router.post("/resume", operation_id="ResumeAutomation", status_code=202)
def resume_automation(caller: Admin, services: ServicesDep) -> automation_schemas.Automation:
    """Resume all automatic actions. Repeated calls change nothing.

    The service then responds to everything that happened during the pause, for example to lost nodes.
    """
    now = services.now()
    with services.change() as session:
        if automation.resume(session):
            message = f"{caller.name} resumed all automatic actions."
            events.add(session, "AutomationResumed", message, now)
    return _shown(None)


def _shown(pause: PauseRecord | None) -> automation_schemas.Automation:
    if pause is None:
        return automation_schemas.Automation(is_paused=False)
    return shaped(pause, automation_schemas.Automation, is_paused=True)
