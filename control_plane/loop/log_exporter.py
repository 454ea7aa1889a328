"""Copies what ranks print into a CloudWatch log group: from the chunks in S3, at least once, in order for each node.

    stream   `<job>/<run>/<node>`        message   {"generation", "rank", "stream", "message"} as JSON

Of each job that has not ended, or has ended and is not copied to its end yet: read on from its stored cursor, send,
store the cursor. One replica does it, under the lease of the export. What a call refuses is tried again, later and
later; other jobs wait as well, because what refuses one job's lines (a missing group, a missing permission, a rate)
refuses all.

Invariant: a cursor is stored after every line before it was taken, or refused for its own time.
"""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Final

from control_plane.cloud.errors import CloudError
from control_plane.cloud.objects import ObjectStore
from control_plane.cloud.sinks import LogSink
from control_plane.core.log_batches import Line, batches
from control_plane.db import exports, jobs
from control_plane.db.leases import Leaser
from control_plane.db.session import Database
from control_plane.loop.exporter import Exporter
from control_plane.loop.log_reader import Cursor, LogEvent, LogFilter, LogReader, facts_of
from control_plane.loop.records import prefix_of
from everstep.protocol.ids import NodeId

log = logging.getLogger(__name__)

LOOK_SECONDS: Final = 2.0
LINES_AT_ONCE: Final = 10_000
"""Of one job in one pass."""
CALLS_PER_PASS: Final = 100
"""A pass every two seconds: far below the account's 800 calls a second."""


class LogExporter(Exporter):
    """The export to a log group.

    Args:
        database: where cursors are.
        objects: where lines are.
        group: the log group's name, for the lease and the log.
        sink: where to.
        leaser: of this replica, this loop's alone.
        now: the time in UTC.
    """

    look_seconds = LOOK_SECONDS

    def __init__(
        self,
        database: Database,
        objects: ObjectStore,
        group: str,
        sink: LogSink,
        leaser: Leaser,
        now: Callable[[], datetime],
    ) -> None:
        super().__init__(database, f"logs:{group}", leaser, now)
        self._objects = objects
        self._sink = sink
        self._calls_left = 0
        self._copied_last = ""
        """The run: a pass begins behind it, else those that print much would use up all calls of every pass."""

    def export_some(self) -> bool:
        """Send the next lines of all jobs (see `Exporter`)."""
        with self._database.write() as session:
            claimed = self._claim(session)
            if claimed is None:
                return False
            _, before = claimed
            runs = exports.logs_to_copy(session)
        self._calls_left = CALLS_PER_PASS
        try:
            following = runs.index(self._copied_last) + 1 if self._copied_last in runs else 0
            for run_id in (*runs[following:], *runs[:following]):
                if self._calls_left > 0:
                    self._copied_last = run_id
                    self._copy(run_id)
        except CloudError as failure:
            self._note_failure(self._kept(), before, failure)
        else:
            self._note_success(self._kept(), before, before.position)
        return False  # the account's calls are limited: the next pass is soon enough

    def _copy(self, run_id: str) -> None:
        """Copy the next lines of one job."""
        self._kept()
        with self._database.read() as session:
            job = jobs.get_run(session, run_id)
            facts = facts_of(session, job)
            stored = exports.log_cursor(session, run_id)
        reader, wanted = LogReader(self._objects, prefix_of(job.spec.log_uri), *facts, self._now), LogFilter()
        before = reader.head(wanted) if stored is None else cursor_of(stored)
        page = reader.forward(before, wanted, LINES_AT_ONCE)
        by_node: defaultdict[str, list[LogEvent]] = defaultdict(list)
        for event in page.events:
            by_node[event.node_id].append(event)
        for node, events in by_node.items():
            self._send(f"{job.name}/{run_id}/{node}", events)
        is_over = page.is_over and len(page.events) < LINES_AT_ONCE
        if page.last != before or is_over or stored is None:
            lease = self._kept()
            with self._database.write() as session:
                exports.store_log_cursor(session, lease, run_id, cursor=text_of(page.last), is_over=is_over)

    def _send(self, stream: str, events: Sequence[LogEvent]) -> None:
        for batch in batches(_line(event) for event in events):
            self._calls_left -= 1
            self._kept()
            refused = self._sink.put_lines(stream, batch)
            if refused:
                log.warning(
                    "export to %s: %d lines of %s are too old, or too far ahead, for it", self._name, refused, stream
                )


def text_of(cursor: Cursor) -> str:
    """Return a cursor as it is stored."""
    return json.dumps([cursor.generation, dict(cursor.positions), sorted(cursor.told)])


def cursor_of(text: str) -> Cursor:
    """Return a stored cursor."""
    generation, positions, told = json.loads(text)
    return Cursor(
        generation,
        {NodeId(node): number for node, number in positions.items()},
        frozenset(NodeId(node) for node in told),
    )


def _line(event: LogEvent) -> Line:
    said = {"generation": event.generation, "rank": event.rank, "stream": event.kind, "message": event.text}
    return Line(
        event.at_ms, json.dumps({name: value for name, value in said.items() if value is not None}, ensure_ascii=False)
    )
