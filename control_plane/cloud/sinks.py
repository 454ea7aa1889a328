"""Sinks that forward events: an EventBridge bus or an SNS topic.

    EventBridge   source `everstep`, detail type = the event's type, resources = the job's name, detail as below
    SNS           message = the detail as JSON; attributes `type`, `training_job_name`, `project`
                  FIFO topic: the message group is `project/name` of the job, and the event's id is the deduplication id
    detail        the fields of an event in ListEvents

Invariant: the entries of one call belong to different jobs, so a rejected entry keeps the order of each job's events.
Source: API references of EventBridge (PutEvents: 10 entries, 256 KB in total) and SNS (PublishBatch: the same).
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, ClassVar, Final, Protocol

from control_plane.cloud.connection import Connection, translated
from control_plane.cloud.errors import CloudError, CloudUnavailable

ENTRIES_AT_ONCE: Final = 10
MAX_ENTRY_BYTES: Final = 24_000
"""Ten events of this size fit into one call of EventBridge or SNS."""
ARN: Final = re.compile(
    r"arn:aws[a-z-]*:(?P<service>events|sns):(?P<region>[a-z0-9-]+):\d{12}:"
    r"(event-bus/[A-Za-z0-9._/-]{1,256}|[A-Za-z0-9_-]{1,256}(\.fifo)?)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkEntry:
    """One event to send to a bus, topic or webhook."""

    event_id: int
    at: datetime
    type: str
    job_name: str
    project: str
    detail: str
    """JSON of at most `MAX_ENTRY_BYTES` bytes."""


class EventSink(Protocol):
    """Sends events to a receiver outside Everstep, such as an SNS topic. Synchronous. Raises only `CloudError`."""

    def put(self, entries: Sequence[SinkEntry]) -> CloudError | None:
        """Send at most `ENTRIES_AT_ONCE` entries of different jobs. Return why the service refused an entry, or None.

        The caller may send all entries again, because receivers recognize duplicates by their ids. Raises CloudError if
        the call failed; usually the service has then accepted no entry.
        """


class _ServiceSink(ABC):
    SERVICE: ClassVar[str]
    OPERATION: ClassVar[str]

    def __init__(self, connection: Connection, arn: str) -> None:
        self._client = connection.client(self.SERVICE)
        self._arn = arn

    def put(self, entries: Sequence[SinkEntry]) -> CloudError | None:
        with translated():
            refused = self._send(entries)
        return None if refused is None else CloudUnavailable(f"{self.OPERATION}: {refused.message}", code=refused.code)

    @abstractmethod
    def _send(self, entries: Sequence[SinkEntry]) -> _Refused | None:
        """Call the AWS operation, and return the error of the first rejected entry."""


@dataclass(frozen=True, slots=True)
class _Refused:
    code: str
    message: str


class EventBusSink(_ServiceSink):
    """Sends events to an EventBridge bus. Implements `EventSink`."""

    SERVICE = "events"
    OPERATION = "PutEvents"

    def _send(self, entries: Sequence[SinkEntry]) -> _Refused | None:
        answer = self._client.put_events(Entries=[self._entry(entry) for entry in entries])
        return next(
            (
                _Refused(entry["ErrorCode"], entry.get("ErrorMessage", ""))
                for entry in answer["Entries"]
                if entry.get("ErrorCode")
            ),
            None,
        )

    def _entry(self, entry: SinkEntry) -> dict[str, Any]:
        return {
            "Time": entry.at,
            "Source": "everstep",
            "DetailType": entry.type,
            "Resources": [entry.job_name],
            "Detail": entry.detail,
            "EventBusName": self._arn,
        }


class TopicSink(_ServiceSink):
    """Sends events to an SNS topic. Implements `EventSink`."""

    SERVICE = "sns"
    OPERATION = "PublishBatch"

    def _send(self, entries: Sequence[SinkEntry]) -> _Refused | None:
        answer = self._client.publish_batch(
            TopicArn=self._arn, PublishBatchRequestEntries=[self._entry(entry) for entry in entries]
        )
        return next(
            (_Refused(entry.get("Code", ""), entry.get("Message", "")) for entry in answer.get("Failed", ())), None
        )

    def _entry(self, entry: SinkEntry) -> dict[str, Any]:
        named = {"type": entry.type, "training_job_name": entry.job_name, "project": entry.project}
        made: dict[str, Any] = {
            "Id": str(entry.event_id),
            "Message": entry.detail,
            "MessageAttributes": {
                name: {"DataType": "String", "StringValue": value} for name, value in named.items() if value
            },
        }
        if self._arn.endswith(".fifo"):
            # The message group contains the project, because jobs of different projects may have equal names.
            group = f"{entry.project}/{entry.job_name}"
            made |= {"MessageGroupId": group, "MessageDeduplicationId": str(entry.event_id)}
        return made


def sink_of(connection: Connection, arn: str) -> EventSink:
    """Return a new sink for an ARN that matches `ARN`."""
    match = ARN.fullmatch(arn)
    assert match is not None
    return EventBusSink(connection, arn) if match["service"] == "events" else TopicSink(connection, arn)


def detail_of(fields: dict[str, Any]) -> str:
    """Return an event's detail as at most `MAX_ENTRY_BYTES` of JSON, without fields that are None.

    If the JSON is too long, the function empties the field `Detail` and truncates the message.
    """
    kept = {name: value for name, value in fields.items() if value is not None}
    text = json.dumps(kept, default=str)
    if len(text.encode()) <= MAX_ENTRY_BYTES:
        return text
    return json.dumps({**kept, "Detail": {}, "Message": str(kept["Message"])[:2_000], "IsCut": True}, default=str)
