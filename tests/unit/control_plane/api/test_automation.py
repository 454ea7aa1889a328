"""Administrators pause and resume all automatic actions. Everybody sees the pause."""

from __future__ import annotations

from contextlib import closing

import httpx
import pytest

from control_plane.db import automation
from control_plane.db.tokens import Role
from control_plane.loop.agents import AgentRegistry
from control_plane.loop.duty_watch import DutyWatch
from tests.postgresql import BOTH_ENGINES
from tests.unit.control_plane.api.conftest import refused, without_metadata


def paused_metric(service, name: str = "everstep_automation_paused") -> str:
    answer = httpx.get(
        f"http://{service.address}/metrics", headers={"authorization": f"Bearer {service.admin_token}"}
    ).text
    return next(line for line in answer.splitlines() if line.startswith(name))


@pytest.mark.parametrize("engine", BOTH_ENGINES)
@pytest.mark.covers("PauseAutomation.Reason")
def test_an_administrator_pauses_and_resumes_automation(service, client):
    assert without_metadata(client.describe_automation()) == {"IsPaused": False}
    made = without_metadata(client.pause_automation(Reason="AWS has an incident"))
    assert (made["IsPaused"], made["Reason"], made["PauseTime"]) == (True, "AWS has an incident", service.clock())
    service.clock.advance(60)
    assert without_metadata(client.pause_automation(Reason="AWS has an incident")) == made
    with refused("ConflictException", match="paused all automatic actions: AWS has an incident"):
        client.pause_automation(Reason="another reason")
    assert paused_metric(service) == "everstep_automation_paused 1.0"
    with closing(service.client(service.token(Role.VIEWER, "speech"))) as viewer:
        assert without_metadata(viewer.describe_automation()) == made
        with refused("AccessDeniedException"):
            viewer.resume_automation()
    for _ in range(2):
        assert without_metadata(client.resume_automation()) == {"IsPaused": False}
    assert paused_metric(service) == "everstep_automation_paused 0.0"
    found = [event["Type"] for event in client.list_events()["Events"]]
    assert (found.count("AutomationPaused"), found.count("AutomationResumed")) == (1, 1)


def duties(client) -> list[tuple[str, str]]:
    return [(each["FleetName"], each["Duty"]["Kind"]) for each in client.describe_duties()["Duties"]]


@pytest.mark.usefixtures("fleet")
def test_each_pause_is_a_duty_an_event_and_a_metric_until_a_person_ends_it(service, client):
    watch = DutyWatch(service.database, AgentRegistry(), service.clock)
    assert (duties(client), watch.compare()) == ([], 0)
    client.pause_automation(Reason="AWS has an incident")
    assert (duties(client), watch.compare()) == ([("main", "AutomationPaused")], 1)
    client.resume_automation()
    assert (duties(client), watch.compare()) == ([], 1)
    with service.database.write() as session:
        restored = automation.DatabaseRestore(restored_at=service.clock(), first_generation=1, differences=())
        automation.add_restore(session, restored)
    assert (duties(client), watch.compare()) == ([("main", "DeletionsPaused")], 1)
    assert paused_metric(service, "everstep_deletions_paused") == "everstep_deletions_paused 1.0"
    with service.database.write() as session:
        automation.accept_restores(session, service.clock())
    assert (duties(client), watch.compare()) == ([], 1)
    assert paused_metric(service, "everstep_deletions_paused") == "everstep_deletions_paused 0.0"
