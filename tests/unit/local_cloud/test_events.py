"""Tests when and how often the local AWS delivers events, also as duplicates."""

from __future__ import annotations

from typing import Any

from infra.local_cloud.events import (
    HEALTH_WORDS,
    Announcements,
    EventBridgeEvent,
    Owner,
    rebalance_recommendation,
    state_change,
)
from infra.local_cloud.fault_kinds import Maintenance
from infra.local_cloud.faults import Conditions, Faults
from infra.local_cloud.injector import MAINTENANCE_ENDS

OWNER = Owner("123456789012", "us-east-1")


class World:
    """A clock, and a bus that records its events."""

    def __init__(self, conditions: Conditions) -> None:
        self.now = 100.0
        self.got: list[dict[str, Any]] = []
        self.announcements = Announcements(Faults(conditions, seed=2), lambda: self.now, self._deliver)

    def _deliver(self, _: EventBridgeEvent, body: dict[str, Any]) -> None:
        self.got.append(body)

    def pass_at(self, now: float) -> int:
        self.now = now
        self.announcements.advance()
        return len(self.got)


def test_an_event_is_what_aws_sends() -> None:
    world = World(Conditions())
    world.announcements.put(state_change(OWNER, "i-1", "stopped"))
    assert world.pass_at(100) == 1
    (body,) = world.got
    assert {name: value for name, value in body.items() if name not in ("id", "time")} == {
        "version": "0",
        "detail-type": "EC2 Instance State-change Notification",
        "source": "aws.ec2",
        "account": "123456789012",
        "region": "us-east-1",
        "resources": ["arn:aws:ec2:us-east-1:123456789012:instance/i-1"],
        "detail": {"instance-id": "i-1", "state": "stopped"},
    }
    assert body["time"].endswith("Z")


def test_a_late_event_keeps_its_time_and_comes_when_it_is_due() -> None:
    world = World(Conditions(event_delay_seconds=5))
    world.announcements.put(rebalance_recommendation(OWNER, "i-1"))
    assert world.pass_at(104.9) == 0
    assert world.pass_at(105) == 1
    assert world.pass_at(200) == 1, "once"


def test_a_doubled_event_is_the_same_event() -> None:
    world = World(Conditions(event_double_share=1))
    world.announcements.put(rebalance_recommendation(OWNER, "i-1"))
    assert world.pass_at(100) == 2
    assert world.got[0] == world.got[1]


def test_a_lost_event_never_comes() -> None:
    world = World(Conditions(event_drop_share=1))
    world.announcements.put(rebalance_recommendation(OWNER, "i-1"))
    assert world.pass_at(1e9) == 0


def test_every_code_of_a_scheduled_event_has_its_words() -> None:
    codes = set(HEALTH_WORDS)
    assert set(Maintenance.__annotations__) == {"code", "after"}
    assert set(MAINTENANCE_ENDS) | {"system-maintenance"} == codes
