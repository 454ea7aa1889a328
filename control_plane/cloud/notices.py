"""Receives and parses events of AWS, which EventBridge delivers to an SQS queue.

Events may be late, duplicated, out of order or lost, so an event is only a hint to poll EC2 and Auto Scaling. Some
announcements cannot be polled: spot interruptions, rebalance recommendations, the end of a capacity block. For these,
the event itself is the notice.
Source: Amazon EC2 User Guide (spot interruption notices, rebalance recommendations, state changes, Capacity Blocks),
Auto Scaling User Guide (event reference), AWS Health User Guide (events in EventBridge).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any, Final, Protocol

from control_plane.cloud.connection import Connection, translated
from control_plane.cloud.errors import MalformedEvent
from everstep.protocol.agent_messages import NoticeKind
from everstep.protocol.ids import NodeId

SPOT_NOTICE: Final = timedelta(minutes=2)
"""Time from AWS's warning about a Spot instance until AWS interrupts the instance."""
BLOCK_END_LEAD: Final = timedelta(minutes=30)
"""Time before the end of a capacity block at which AWS begins to terminate its instances."""
MAX_BODY_CHARACTERS: Final = 256 * 1024
"""SQS's limit for a message."""
RECEIVE_SECONDS: Final = 5
"""Seconds of a long poll: short enough that a server can stop quickly, long enough to save calls."""
MESSAGES_PER_CALL: Final = 10

_HINTS: Final = frozenset(
    {
        ("aws.ec2", "EC2 Instance State-change Notification"),
        ("aws.autoscaling", "EC2 Instance-launch Lifecycle Action"),
        ("aws.autoscaling", "EC2 Instance-terminate Lifecycle Action"),
        ("aws.autoscaling", "EC2 Instance Launch Successful"),
        ("aws.autoscaling", "EC2 Instance Launch Unsuccessful"),
        ("aws.autoscaling", "EC2 Instance Terminate Successful"),
        ("aws.autoscaling", "EC2 Instance Terminate Unsuccessful"),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudEvent:
    """A parsed AWS event about instances."""

    event_id: str
    """Id that is the same for every delivery."""
    detail_type: str
    """AWS's name of the kind of event."""
    at: datetime
    instance_ids: tuple[NodeId, ...] = ()
    """Empty if the event names none."""
    group: str = ""
    capacity_reservation_id: str = ""
    """The capacity block whose end AWS announces. The event concerns all instances of the block."""
    kind: NoticeKind | None = None
    """None: the event is a hint to poll AWS."""
    ends_at: datetime | None = None
    """Time at which AWS may end the instances. None if the event names no time."""
    is_scheduled_change: bool = False
    """True if EC2 scheduled, changed or cancelled a maintenance. The server then polls EC2's scheduled events."""

    @property
    def message(self) -> str:
        """AWS's name of the event, and the time at which AWS may end the instances, if the event names it."""
        when = f" at {self.ends_at:%Y-%m-%d %H:%M:%S} UTC" if self.ends_at is not None else ""
        return f"{self.detail_type}{when}"


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedMessage:
    """A message with an event of AWS, as the SQS queue delivers it."""

    message_id: str
    receipt: str
    """Handle of this delivery, with which the reader deletes the message."""
    body: str
    delivery_count: int


class EventQueue(Protocol):
    """A queue of events that any number of servers may read. Synchronous. Raises only `CloudError`."""

    def receive(self) -> tuple[QueuedMessage, ...]:
        """Wait a few seconds for messages, and return them. A message stays in the queue until a reader deletes it."""

    def delete(self, receipts: Collection[str]) -> None:
        """Delete messages that the caller has processed, by the handles of their deliveries. Idempotent."""


class SqsQueue:
    """Implements `EventQueue` with boto3, for one SQS queue."""

    def __init__(self, connection: Connection, url: str) -> None:
        self._sqs = connection.client("sqs")
        self._url = url

    def receive(self) -> tuple[QueuedMessage, ...]:
        with translated():
            answer = self._sqs.receive_message(
                QueueUrl=self._url,
                MaxNumberOfMessages=MESSAGES_PER_CALL,
                WaitTimeSeconds=RECEIVE_SECONDS,
                MessageSystemAttributeNames=["ApproximateReceiveCount"],
            )
        return tuple(
            QueuedMessage(
                message_id=message["MessageId"],
                receipt=message["ReceiptHandle"],
                body=message["Body"],
                delivery_count=int(message.get("Attributes", {}).get("ApproximateReceiveCount", 1)),
            )
            for message in answer.get("Messages", ())
        )

    def delete(self, receipts: Collection[str]) -> None:
        entries = [{"Id": str(number), "ReceiptHandle": receipt} for number, receipt in enumerate(receipts)]
        for start in range(0, len(entries), MESSAGES_PER_CALL):
            with translated():
                self._sqs.delete_message_batch(QueueUrl=self._url, Entries=entries[start : start + MESSAGES_PER_CALL])


def parse(body: str) -> CloudEvent | None:
    """Return the event in a message of EventBridge, or None for an unrelated kind, which a broad rule can deliver.

    Pure. Raises MalformedEvent if the message lacks fields that AWS documents.
    """
    if len(body) > MAX_BODY_CHARACTERS:
        raise MalformedEvent(f"{len(body)} characters")
    try:
        event = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise MalformedEvent(f"not JSON: {error}") from error
    if not isinstance(event, dict):
        raise MalformedEvent("not a JSON object")
    # In the examples on AWS's page about Capacity Blocks, two fields have other names than in all other events.
    detail_type = _text(event, "detail-type", "detail_type")
    source = _text(event, "source")
    base = _Base(_text(event, "id", "customer_event_id"), detail_type, _time(_text(event, "time")))
    detail = event.get("detail")
    if not isinstance(detail, dict):
        raise MalformedEvent("its detail is not a JSON object")
    match source, detail_type:
        case "aws.ec2", "EC2 Spot Instance Interruption Warning":
            return base.about(
                _instance(detail, "instance-id"), kind=NoticeKind.SPOT_INTERRUPTION, ends_at=base.at + SPOT_NOTICE
            )
        case "aws.ec2", "EC2 Instance Rebalance Recommendation":
            return base.about(_instance(detail, "instance-id"), kind=NoticeKind.REBALANCE)
        case "aws.ec2", "Capacity Block Reservation Expiration Warning":
            reservation = _text(detail, "capacity-reservation-id")
            ends_at = _time(_text(detail, "end-date")) - BLOCK_END_LEAD
            return base.about(kind=NoticeKind.CAPACITY_BLOCK_END, ends_at=ends_at, capacity_reservation_id=reservation)
        case "aws.health", "AWS Health Event":
            if detail.get("service") != "EC2" or detail.get("eventTypeCategory") != "scheduledChange":
                return None
            return base.about(*_affected(detail), is_scheduled_change=True)
        case pair if pair in _HINTS:
            name = "instance-id" if source == "aws.ec2" else "EC2InstanceId"
            group = detail.get("AutoScalingGroupName", "")
            ids = (
                (_instance(detail, name),) if detail.get(name) else ()
            )  # The event of a failed launch names no instance.
            return base.about(*ids, group=group if isinstance(group, str) else "")
        case _:
            return None


@dataclass(frozen=True, slots=True)
class _Base:
    event_id: str
    detail_type: str
    at: datetime

    def about(self, *instance_ids: NodeId, **more: Any) -> CloudEvent:
        return CloudEvent(
            event_id=self.event_id, detail_type=self.detail_type, at=self.at, instance_ids=instance_ids, **more
        )


def _text(where: Mapping[str, object], *names: str) -> str:
    for name in names:
        value = where.get(name)
        if isinstance(value, str) and 0 < len(value) <= 255:
            return value
    raise MalformedEvent(f"it has no {names[0]!r}")


def _instance(detail: Mapping[str, object], name: str) -> NodeId:
    found = _text(detail, name)
    if not found.startswith("i-") or len(found) > 64:
        raise MalformedEvent(f"{name!r} is not an instance id")
    return NodeId(found)


def _affected(detail: Mapping[str, object]) -> list[NodeId]:
    entities = detail.get("affectedEntities", [])
    if not isinstance(entities, list):
        raise MalformedEvent("its affectedEntities are not a list")
    return [
        _instance(entity, "entityValue")
        for entity in entities
        if isinstance(entity, dict) and str(entity.get("entityValue")).startswith("i-")
    ]


def _time(text: str) -> datetime:
    """Parse a time: ISO 8601 from EventBridge, the format of mail headers from Health."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        try:
            found = parsedate_to_datetime(text)
        except ValueError as error:
            raise MalformedEvent(f"{text!r} is not a time") from error
    try:
        return (found if found.tzinfo is not None else found.replace(tzinfo=UTC)).astimezone(UTC)
    except OverflowError as error:
        raise MalformedEvent(f"{text!r} is not a time") from error
