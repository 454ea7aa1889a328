"""Forwards events to an EventBridge bus.

    source        `everstep`
    detail type   the event's type
    resources     name of the job, or of the fleet for an event without a job
    detail        {"EventId", "Time", "Type", "Message", "Project", "FleetName", "TrainingJobName", "NodeId", "Detail"},
                  as in ListEvents

Source: API reference of EventBridge, PutEvents (10 entries, 256 KB in total).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Protocol

from control_plane.cloud.connection import Connection, translated
from control_plane.cloud.errors import CloudError, CloudUnavailable

ENTRIES_AT_ONCE: Final = 10
MAX_ENTRY_BYTES: Final = 24_000
"""Maximum size of one event in bytes. Ten events of this size fit into one call."""
ARN: Final = re.compile(r"arn:aws[a-z-]*:events:(?P<region>[a-z0-9-]+):\d{12}:event-bus/[A-Za-z0-9._/-]{1,256}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkEntry:
    """One event to send to a bus."""

    event_id: int
    at: datetime
    type: str
    subject: str
    """Name of the event's job or fleet."""
    detail: str
    """JSON of at most `MAX_ENTRY_BYTES` bytes."""


class EventSink(Protocol):
    """Sends events to a receiver outside Everstep."""

    def put(self, entries: Sequence[SinkEntry]) -> CloudError | None:
        """Send at most `ENTRIES_AT_ONCE` entries of different subjects, and block until the receiver answers.

        Return the reason why the receiver refused an entry, or None if it accepted all. The caller may send all entries
        again: receivers recognize duplicates by their ids.

        Raises:
            CloudError: the call failed. Usually the receiver has accepted no entry.
        """


class EventBusSink:
    """Sends events to an EventBridge bus. Implements `EventSink`; `arn` matches `ARN`."""

    def __init__(self, connection: Connection, arn: str) -> None:
        self._client = connection.client("events")
        self._arn = arn

    def put(self, entries: Sequence[SinkEntry]) -> CloudError | None:
        """Send events to the bus (see `EventSink.put`)."""
        with translated():
            answer = self._client.put_events(Entries=[self._entry(entry) for entry in entries])
        for entry in answer["Entries"]:
            if code := entry.get("ErrorCode"):
                return CloudUnavailable(f"PutEvents: {entry.get('ErrorMessage', '')}", code=code)
        return None

    def _entry(self, entry: SinkEntry) -> dict[str, Any]:
        return {
            "Time": entry.at,
            "Source": "everstep",
            "DetailType": entry.type,
            "Resources": [entry.subject],
            "Detail": entry.detail,
            "EventBusName": self._arn,
        }


def detail_of(fields: dict[str, Any]) -> str:
    """Return an event's detail as at most `MAX_ENTRY_BYTES` of JSON, without fields that are None.

    If the JSON is too long, the function empties the field `Detail` and truncates the message.
    """
    kept = {name: value for name, value in fields.items() if value is not None}
    text = json.dumps(kept, default=str)
    if len(text.encode()) <= MAX_ENTRY_BYTES:
        return text
    return json.dumps({**kept, "Detail": {}, "Message": str(kept["Message"])[:2_000], "IsCut": True}, default=str)
