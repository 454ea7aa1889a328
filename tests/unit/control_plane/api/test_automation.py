"""Administrators pause and resume all automatic actions. Everybody sees the pause."""

from __future__ import annotations

from contextlib import closing

import httpx
import pytest

from control_plane.db.tokens import Role
from tests.postgresql import BOTH_ENGINES
from tests.unit.control_plane.api.conftest import refused, without_metadata


def paused_metric(service) -> str:
    answer = httpx.get(
        f"http://{service.address}/metrics", headers={"authorization": f"Bearer {service.admin_token}"}
    ).text
    return next(line for line in answer.splitlines() if line.startswith("everstep_automation_paused"))


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
