"""Builds AWS's events and delivers them to EventBridge. `faults.Conditions` can delay, duplicate or drop events.

The targets of every matching rule on the default bus of the event's region receive it. The server holds its lock during
each call.
Source: Amazon EC2 User Guide (events), Amazon EC2 Auto Scaling User Guide (event reference), AWS Health User Guide
(EventBridge schema).
"""

from __future__ import annotations

import heapq
import itertools
import json
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import format_datetime
from typing import Any, Final

from moto.events.models import events_backends
from moto.sqs.models import sqs_backends

from infra.local_cloud.faults import Faults

HEALTH_WORDS: Final = {
    "instance-reboot": (
        "AWS_EC2_PERSISTENT_INSTANCE_REBOOT_MAINTENANCE_SCHEDULED",
        "The instance is scheduled for a reboot",
    ),
    "instance-retirement": ("AWS_EC2_INSTANCE_RETIREMENT_SCHEDULED", "The instance is running on degraded hardware"),
    "instance-stop": (
        "AWS_EC2_PERSISTENT_INSTANCE_RETIREMENT_SCHEDULED",
        "The instance is running on degraded hardware",
    ),
    "system-maintenance": (
        "AWS_EC2_SYSTEM_MAINTENANCE_EVENT",
        "The instance is scheduled for network or power maintenance",
    ),
    "system-reboot": (
        "AWS_EC2_SYSTEM_REBOOT_MAINTENANCE_SCHEDULED",
        "The host of the instance is scheduled for a reboot",
    ),
}
"""AWS Health's event type and description by EC2's code. The metadata service uses the same description."""


@dataclass(frozen=True, slots=True)
class Owner:
    """The account and the region of a resource."""

    account: str
    region: str

    def instance_arn(self, instance_id: str) -> str:
        """Return the ARN of an instance."""
        return f"arn:aws:ec2:{self.region}:{self.account}:instance/{instance_id}"


@dataclass(frozen=True, slots=True)
class EventBridgeEvent:
    """An event of AWS, with the fields that rules can match."""

    owner: Owner
    source: str
    detail_type: str
    resources: tuple[str, ...]
    detail: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedEvent:
    """A maintenance event that AWS has scheduled for an instance."""

    event_id: str
    code: str
    not_before: datetime
    not_after: datetime

    @property
    def description(self) -> str:
        """AWS's text for this kind of maintenance."""
        return HEALTH_WORDS[self.code][1]

    def as_metadata(self) -> dict[str, str]:
        """Return this event in the format of the metadata service."""
        return {
            "NotBefore": _metadata_date(self.not_before),
            "Code": self.code,
            "Description": self.description,
            "EventId": self.event_id,
            "NotAfter": _metadata_date(self.not_after),
            "State": "active",
        }


def stamp(at: datetime) -> str:
    """Return a time as AWS writes it in events and metadata."""
    return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def state_change(owner: Owner, instance_id: str, state: str) -> EventBridgeEvent:
    """Return the event of an instance that has entered a state."""
    return _ec2(
        owner, "EC2 Instance State-change Notification", instance_id, {"instance-id": instance_id, "state": state}
    )


def spot_interruption(owner: Owner, instance_id: str, action: str) -> EventBridgeEvent:
    """Return the warning two minutes before a Spot interruption (`terminate`, `stop` or `hibernate`)."""
    return _ec2(
        owner,
        "EC2 Spot Instance Interruption Warning",
        instance_id,
        {"instance-id": instance_id, "instance-action": action},
    )


def rebalance_recommendation(owner: Owner, instance_id: str) -> EventBridgeEvent:
    """Return the recommendation to replace an instance with an increased risk of interruption."""
    return _ec2(owner, "EC2 Instance Rebalance Recommendation", instance_id, {"instance-id": instance_id})


def block_expiration(owner: Owner, reservation_id: str, ends_at: datetime) -> EventBridgeEvent:
    """Return the warning 40 minutes before a Capacity Block ends, which names the reservation and no instance."""
    return EventBridgeEvent(
        owner,
        "aws.ec2",
        "Capacity Block Reservation Expiration Warning",
        (f"arn:aws:ec2:{owner.region}:{owner.account}:capacity-reservation/{reservation_id}",),
        {"capacity-reservation-id": reservation_id, "end-date": stamp(ends_at)},
    )


def scheduled_change(owner: Owner, instance_id: str, planned: PlannedEvent) -> EventBridgeEvent:
    """Return AWS Health's event about a scheduled event of EC2. The affected instance is its only resource."""
    type_code, words = HEALTH_WORDS[planned.code]
    now = format_datetime(datetime.now(UTC), usegmt=True)
    return EventBridgeEvent(
        owner,
        "aws.health",
        "AWS Health Event",
        (instance_id,),
        {
            "eventArn": f"arn:aws:health:{owner.region}::event/EC2/{type_code}/{type_code}_{planned.event_id}",
            "service": "EC2",
            "eventTypeCode": type_code,
            "eventTypeCategory": "scheduledChange",
            "eventScopeCode": "ACCOUNT_SPECIFIC",
            "communicationId": planned.event_id,
            "startTime": format_datetime(planned.not_before, usegmt=True),
            "endTime": format_datetime(planned.not_after, usegmt=True),
            "lastUpdatedTime": now,
            "statusCode": "upcoming",
            "eventRegion": owner.region,
            "eventDescription": [{"language": "en_US", "latestDescription": words}],
            "affectedEntities": [{"entityValue": instance_id, "status": "IMPAIRED", "lastUpdatedTime": now}],
            "affectedAccount": owner.account,
            "page": "1",
            "totalPages": "1",
        },
    )


def lifecycle_action(owner: Owner, group_arn: str, detail: Mapping[str, Any], *, is_launch: bool) -> EventBridgeEvent:
    """Return Auto Scaling's event that a lifecycle hook holds an instance."""
    kind = "EC2 Instance-launch Lifecycle Action" if is_launch else "EC2 Instance-terminate Lifecycle Action"
    return EventBridgeEvent(owner, "aws.autoscaling", kind, (group_arn,), detail)


def scaling_outcome(
    owner: Owner, group_arn: str, instance_id: str, detail: Mapping[str, Any], *, is_launch: bool, is_success: bool
) -> EventBridgeEvent:
    """Return the event of a launch or termination. `instance_id` is empty if a failed launch created no instance."""
    kind = f"EC2 Instance {'Launch' if is_launch else 'Terminate'} {'Successful' if is_success else 'Unsuccessful'}"
    resources = (group_arn, owner.instance_arn(instance_id)) if instance_id else (group_arn,)
    return EventBridgeEvent(owner, "aws.autoscaling", kind, resources, detail)


class Announcements:
    """Holds events until they are due, and then delivers them.

    `deliver` receives each due event with the body that AWS would send. None: `to_event_bridge`.
    """

    def __init__(
        self,
        faults: Faults,
        monotonic: Callable[[], float],
        deliver: Callable[[EventBridgeEvent, dict[str, Any]], None] | None = None,
    ) -> None:
        self._faults = faults
        self._monotonic = monotonic
        self._deliver = deliver or to_event_bridge
        self._waiting: list[tuple[float, int, EventBridgeEvent, dict[str, Any]]] = []
        self._numbers = itertools.count()

    def put(self, event: EventBridgeEvent) -> None:
        """Schedule the delivery of an event that happens now.

        Copies of a duplicated event have the same id and time.
        """
        body = {
            "version": "0",
            "id": str(uuid.uuid4()),
            "detail-type": event.detail_type,
            "source": event.source,
            "account": event.owner.account,
            "time": stamp(datetime.now(UTC)),
            "region": event.owner.region,
            "resources": list(event.resources),
            "detail": dict(event.detail),
        }
        for delay in self._faults.event_delays():
            heapq.heappush(self._waiting, (self._monotonic() + delay, next(self._numbers), event, body))

    def advance(self) -> None:
        """Deliver the due events. The server calls this every `aws.PASS_SECONDS`."""
        while self._waiting and self._waiting[0][0] <= self._monotonic():
            _, _, event, body = heapq.heappop(self._waiting)
            self._deliver(event, dict(body))


def to_event_bridge(event: EventBridgeEvent, body: dict[str, Any]) -> None:
    """Send an event to the SQS targets of all matching rules on the default bus of its region."""
    # PutEvents would not do: AWS refuses sources that begin with `aws.`, and moto omits the account and adds
    # fields.
    queues = sqs_backends[event.owner.account][event.owner.region]
    for rule in list(
        events_backends[event.owner.account][event.owner.region].describe_event_bus("default").rules.values()
    ):
        if rule.state != "ENABLED" or not rule.event_pattern.matches_event(body):
            continue
        for target in rule.targets:
            _, _, service, _, _, queue = target["Arn"].split(":", 5)
            if service == "sqs" and queue in queues.queues:
                queues.send_message(queue_name=queue, message_body=json.dumps(body))


def _ec2(owner: Owner, detail_type: str, instance_id: str, detail: Mapping[str, Any]) -> EventBridgeEvent:
    return EventBridgeEvent(owner, "aws.ec2", detail_type, (owner.instance_arn(instance_id),), detail)


def _metadata_date(at: datetime) -> str:
    return at.astimezone(UTC).strftime("%d %b %Y %H:%M:%S GMT")
