"""Sends events of jobs, and of fleets' duties, to an EventBridge bus: at least once, and in order per job or fleet.

    claim the lease ──▶ read events after the position ──▶ send one event per subject ──▶ store the position ──▶ …

The position is the id of the last event that the receiver has accepted. If a server crashes after it sent events and
before it stored the position, the receiver gets these events twice. Receivers detect duplicates by the event's id.
Another control-plane server continues from the stored position once the lease has expired. After a failed call, the
exporter waits and retries. It sends no later event before the retry succeeds.

Invariant: the exporter stores a position only after the receiver has accepted all events up to this position.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Final

from sqlalchemy.orm import Session

from control_plane.cloud.errors import CloudError
from control_plane.cloud.sinks import ENTRIES_AT_ONCE, EventSink, SinkEntry, detail_of
from control_plane.db import events, exports
from control_plane.db.errors import StaleLease
from control_plane.db.events import EventRecord
from control_plane.db.leases import Lease, Leaser
from control_plane.db.session import Database
from control_plane.loop.duty_watch import BEGAN, ENDED
from control_plane.loop.repeating import pause

log = logging.getLogger(__name__)

EXPORT_POLL_SECONDS: Final = 1.0
PAGE_LIMIT: Final = 200
FIRST_RETRY_SECONDS: Final = 1.0
MOST_RETRY_SECONDS: Final = 300.0


class EventExporter:
    """The loop that exports events to one bus.

    It claims the export's lease and calls `export_some` again and again. It stores failures in the export's row, and
    pauses after each failure.

    `name` is the ARN of the bus. The exporter calls the sink in threads. `leaser` claims and renews the lease of the
    export, and no other loop may use the same `leaser`.
    """

    def __init__(
        self,
        database: Database,
        name: str,
        sink: EventSink,
        leaser: Leaser,
        now: Callable[[], datetime],
        *,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._uniform = uniform
        self._database = database
        self._name = name
        self._sink = sink
        self._leaser = leaser
        self._now = now
        self._lease: Lease | None = None
        self.failure_count = 0
        """Number of failed attempts to export since the last success."""

    def export_some(self) -> bool:
        """Send the next events to the receiver. Blocks: call it in a thread.

        Returns:
            Whether more events are ready to be sent.

        Raises:
            StaleLease: another control-plane server took the export over. That server sends the last events again.
        """
        with self._database.write() as session:
            claimed = self._claim(session)
            if claimed is None:
                return False
            lease, before = claimed
            page = events.page(session, events.EventFilter(after_id=before.position), limit=PAGE_LIMIT)
        entries, sent = _first(page, before.position)
        if entries and (failure := self._put(entries)) is not None:
            self._note_failure(lease, before, failure)
            return False
        self._note_success(lease, before, sent)
        return bool(page) and (sent < page[-1].id or len(page) == PAGE_LIMIT)

    def _put(self, entries: Sequence[SinkEntry]) -> CloudError | None:
        try:
            return self._sink.put(entries)
        except CloudError as error:
            return error

    async def run(self, stop: asyncio.Event) -> None:
        """Send events to the receiver until `stop` is set, then release the lease of the export."""
        while not stop.is_set():
            is_more = False
            try:
                is_more = await asyncio.to_thread(self.export_some)
            except StaleLease as stale:
                log.info("export to %s: %s", self._name, stale)
            except Exception:
                self.failure_count += 1
                log.exception("export to %s: a pass failed; the next pass retries", self._name)
            if not is_more:
                await pause(self.pause_seconds(), until=stop)
        await asyncio.to_thread(self._release)

    def pause_seconds(self) -> float:
        """Return the pause, in seconds, before the next call of `export_some`.

        After a failure, the pause is random, up to `retry_seconds` (full jitter). Exporters of several servers and to
        several receivers then do not retry at the same time.
        """
        return self._uniform(0.0, retry_seconds(self.failure_count)) if self.failure_count else EXPORT_POLL_SECONDS

    def _claim(self, session: Session) -> tuple[Lease, exports.ExportRecord] | None:
        """Claim the lease and read the export's state.

        Return None while another control-plane server holds the lease.
        """
        exports.ensure(session, self._name)
        self._lease = self._leaser.claim(session, "export", self._name)
        return None if self._lease is None else (self._lease, exports.get(session, self._name))

    def _note_failure(self, lease: Lease, before: exports.ExportRecord, failure: CloudError) -> None:
        self.failure_count += 1
        words = f"{failure.code}: {failure.message}" if failure.code else failure.message
        if words != before.failure:
            log.warning("export to %s failed; the exporter retries: %s", self._name, words)
        with self._database.write() as session:
            exports.change(session, lease, failing_since=before.failing_since or self._now(), failure=words)

    def _note_success(self, lease: Lease, before: exports.ExportRecord, position: int) -> None:
        self.failure_count = 0
        if position != before.position or before.failure:
            with self._database.write() as session:
                exports.change(session, lease, position=position, failing_since=None, failure="")
        if before.failure:
            log.info("export to %s succeeds again", self._name)

    def _release(self) -> None:
        if self._lease is not None:
            with self._database.write() as session:
                self._leaser.release(session, self._lease)


def retry_seconds(failure_count: int) -> float:
    """Return the longest pause, in seconds, after one or more consecutive failures.

    The limit doubles with each failure, up to `MOST_RETRY_SECONDS`.
    """
    return float(min(MOST_RETRY_SECONDS, FIRST_RETRY_SECONDS * 2 ** min(failure_count - 1, 16)))


def _first(page: Sequence[EventRecord], position: int) -> tuple[list[SinkEntry], int]:
    """Return the events that the next call sends: the first events of `page`, at most one per job or fleet.

    If the receiver rejects some events of a call, those of each subject still arrive in order. The number is the id of
    the last event that is sent or skipped, or `position` without such an event. Of the events without a job, only those
    about duties are sent.
    """
    entries, subjects = list[SinkEntry](), set[tuple[str, str, str]]()
    for event in page:
        if event.job_name is not None or event.type in (BEGAN, ENDED):
            subject = (event.project, event.fleet_name or "", event.job_name or "")
            if subject in subjects or len(entries) == ENTRIES_AT_ONCE:
                break
            subjects.add(subject)
            entries.append(entry_of(event))
        position = event.id
    return entries, position


def entry_of(event: EventRecord) -> SinkEntry:
    """Convert an event to the entry that receivers get."""
    detail = {
        "EventId": event.id,
        "Time": event.at.isoformat(),
        "Type": event.type,
        "Message": event.message,
        "Project": event.project or None,
        "FleetName": event.fleet_name,
        "TrainingJobName": event.job_name,
        "NodeId": event.node_id,
        "Detail": dict(event.detail),
    }
    return SinkEntry(
        event_id=event.id,
        at=event.at,
        type=event.type,
        subject=event.job_name or event.fleet_name or "",
        detail=detail_of(detail),
    )
