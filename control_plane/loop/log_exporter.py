"""Copies what ranks print into a CloudWatch log group: from the chunks in S3, at least once, in order for each node.

    stream   `<job>/<run>/<node>`        message   {"generation", "rank", "stream", "message"} as JSON

Of each job that has not ended, or has ended and is not copied to its end yet: read on from its stored cursor, send, store the cursor. One replica
does it, under the lease of the export. What a call refuses is tried again, later and later; other jobs wait as well, because what refuses one job's
lines (a missing group, a missing permission, a rate) refuses all.

Invariant: a cursor is stored after every line before it was taken, or refused for its own time.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Final

from control_plane.cloud.errors import CloudError
from control_plane.cloud.objects import ObjectStore
from control_plane.cloud.sinks import LogSink
from control_plane.core.log_batches import Line, batches
from control_plane.db import exports, jobs
from control_plane.db.errors import StaleLease
from control_plane.db.leases import Lease, Leaser
from control_plane.db.session import Database
from control_plane.loop.exporter import retry_seconds
from control_plane.loop.log_reader import Cursor, LogEvent, LogFilter, LogReader, facts_of
from control_plane.loop.records import prefix_of
from everstep.protocol.ids import NodeId

log = logging.getLogger(__name__)

LOOK_SECONDS: Final = 2.0
LINES_AT_ONCE: Final = 10_000
"""Of one job in one pass."""
CALLS_PER_PASS: Final = 100
"""A pass every two seconds: far below the account's 800 calls a second."""


class LogExporter:
    """The loop of the export to a log group.

    Args:
        database: where cursors are.
        objects: where lines are.
        group: the log group's name, for the lease and the log.
        sink: where to.
        leaser: of this replica, this loop's alone.
        now: the time in UTC.
    """

    def __init__(self, database: Database, objects: ObjectStore, group: str, sink: LogSink, leaser: Leaser, now: Callable[[], datetime]) -> None:
        self._database = database
        self._objects = objects
        self._name = f"logs:{group}"
        self._sink = sink
        self._leaser = leaser
        self._now = now
        self._lease: Lease | None = None
        self._calls_left = 0
        self.failure_count = 0
        """In a row."""

    async def run(self, stop: asyncio.Event) -> None:
        """Export until `stop` is set; then another replica may go on at once."""
        while not stop.is_set():
            try:
                await asyncio.to_thread(self.export_some)
            except StaleLease as stale:
                log.info("export to %s: %s", self._name, stale)
            except Exception:
                self.failure_count += 1
                log.exception("export to %s: a pass failed; it is made again", self._name)
            with suppress(TimeoutError):
                async with asyncio.timeout(retry_seconds(self.failure_count) if self.failure_count else LOOK_SECONDS):
                    await stop.wait()
        if self._lease is not None:
            with self._database.write() as session:
                self._leaser.release(session, self._lease)

    def export_some(self) -> None:
        """Make one pass over all jobs. Blocks: called in a thread.

        Raises:
            StaleLease: another replica took the export over; what was sent is sent again there.
        """
        with self._database.write() as session:
            exports.ensure(session, self._name)
            self._lease = lease = self._leaser.claim(session, "export", self._name)
            if lease is None:
                return
            before = exports.get(session, self._name)
            runs = exports.logs_to_copy(session)
        self._calls_left = CALLS_PER_PASS
        try:
            for run_id in runs:
                if self._calls_left > 0:
                    self._copy(lease, run_id)
        except CloudError as failure:
            self.failure_count += 1
            words = f"{failure.code}: {failure.message}" if failure.code else failure.message
            if words != before.failure:
                log.warning("export to %s fails and is tried again: %s", self._name, words)
            with self._database.write() as session:
                exports.change(session, lease, failing_since=before.failing_since or self._now(), failure=words)
            return
        self.failure_count = 0
        if before.failure:
            log.info("export to %s goes on", self._name)
            with self._database.write() as session:
                exports.change(session, lease, failing_since=None, failure="")

    def _copy(self, lease: Lease, run_id: str) -> None:
        """Copy the next lines of one job."""
        with self._database.read() as session:
            job = jobs.get_run(session, run_id)
            generations, alive = facts_of(session, job)
            stored = exports.log_cursor(session, run_id)
        reader, wanted = LogReader(self._objects, prefix_of(job.spec.log_uri), generations, alive, self._now), LogFilter()
        before = reader.head(wanted) if stored is None else cursor_of(stored)
        page = reader.forward(before, wanted, LINES_AT_ONCE)
        by_node: defaultdict[str, list[LogEvent]] = defaultdict(list)
        for event in page.events:
            by_node[event.node_id].append(event)
        for node, events in by_node.items():
            self._send(f"{job.name}/{run_id}/{node}", events)
        is_over = page.is_over and len(page.events) < LINES_AT_ONCE
        if page.last != before or is_over or stored is None:
            with self._database.write() as session:
                exports.store_log_cursor(session, lease, run_id, cursor=text_of(page.last), is_over=is_over)

    def _send(self, stream: str, events: Sequence[LogEvent]) -> None:
        for batch in batches(_line(event) for event in events):
            self._calls_left -= 1
            refused = self._sink.put_lines(stream, batch)
            if refused:
                log.warning("export to %s: %d lines of %s are too old, or too far ahead, for it", self._name, refused, stream)


def text_of(cursor: Cursor) -> str:
    """Return a cursor as it is stored."""
    return json.dumps([cursor.generation, dict(cursor.positions), sorted(cursor.told)])


def cursor_of(text: str) -> Cursor:
    """Return a stored cursor."""
    generation, positions, told = json.loads(text)
    return Cursor(generation, {NodeId(node): number for node, number in positions.items()}, frozenset(NodeId(node) for node in told))


def _line(event: LogEvent) -> Line:
    said = {"generation": event.generation, "rank": event.rank, "stream": event.kind, "message": event.text}
    return Line(event.at_ms, json.dumps({name: value for name, value in said.items() if value is not None}, ensure_ascii=False))
