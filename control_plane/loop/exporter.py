"""Sends the events of jobs to an EventBridge bus, an SNS topic or a webhook, at least once and in order per job.

    claim the lease ──▶ read events after the position ──▶ send one event per job ──▶ store the position ──▶ …

Receivers detect duplicates by the event's id. After a failed call, the exporter sends no later event before the retry
succeeds.

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
from control_plane.loop.repeating import pause

log = logging.getLogger(__name__)

EXPORT_POLL_SECONDS: Final = 1.0
PAGE_LIMIT: Final = 200
FIRST_RETRY_SECONDS: Final = 1.0
MOST_RETRY_SECONDS: Final = 300.0


class EventExporter:
    """The loop that exports events to one bus, topic or webhook. No other loop may use the same `leaser`.

    `name` is the receiver's ARN, or a webhook's host and a digest of its URL.
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

    def export_some(self) -> bool:
        """Send the next events to the receiver, and return whether more events are ready. Blocks.

        Raises StaleLease if another server took the export over. That server sends the last events again.
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
        """Return the pause, in seconds, before the next call of `export_some`. After a failure, it is random."""
        # Full jitter, so that exporters of several servers and to several receivers do not retry at the same time.
        return self._uniform(0.0, retry_seconds(self.failure_count)) if self.failure_count else EXPORT_POLL_SECONDS

    def _claim(self, session: Session) -> tuple[Lease, exports.ExportRecord] | None:
        """Claim the lease and read the export's state. Return None while another server holds the lease."""
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
    """Return the longest pause, in seconds, after consecutive failures. It doubles with each failure."""
    return float(min(MOST_RETRY_SECONDS, FIRST_RETRY_SECONDS * 2 ** min(failure_count - 1, 16)))


def _first(page: Sequence[EventRecord], position: int) -> tuple[list[SinkEntry], int]:
    """Return the events that the next call sends, at most one per job, and the last id that is sent or skipped."""
    # If the receiver rejects some events of a call, each job's events still arrive in order.
    entries, jobs = list[SinkEntry](), set[tuple[str, str]]()
    for event in page:
        if event.job_name is not None:
            job = (event.project, event.job_name)
            if job in jobs or len(entries) == ENTRIES_AT_ONCE:
                break
            jobs.add(job)
            entries.append(entry_of(event))
        position = event.id
    return entries, position


def entry_of(event: EventRecord) -> SinkEntry:
    """Convert an event of a job to the entry that receivers get."""
    assert event.job_name is not None
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
        job_name=event.job_name,
        project=event.project,
        detail=detail_of(detail),
    )
