"""Copies the ranks' output from S3 into a CloudWatch log group.

Each line is sent at least once, and in order per node.

    stream   `<job>/<run>/<node>`        message   {"generation", "rank", "stream", "message"} as JSON

Each call of `LogExporter.export_some` handles each run whose log is not completely copied. It reads lines after the
stored cursor (a position in the log), sends these lines, and stores the new cursor. One control-plane server exports at
a time, under the lease of the export.

After a failed call, the exporter waits and retries. All runs wait meanwhile, because the usual causes affect all runs:
a missing log group, a missing permission or throttling.

Invariant: the exporter stores a cursor only after CloudWatch has accepted every earlier line, or has rejected the line
because of its timestamp.
"""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Final

from control_plane.cloud.errors import CloudError
from control_plane.cloud.objects import ServiceStore
from control_plane.cloud.sinks import LogSink
from control_plane.core.log_batches import BatchLine, batches
from control_plane.db import exports, jobs
from control_plane.db.leases import Leaser
from control_plane.db.session import Database
from control_plane.loop.exporter import Exporter
from control_plane.loop.log_reader import Cursor, LogEvent, LogFilter, LogReader, facts_of
from control_plane.loop.records import prefix_of
from everstep.protocol.ids import NodeId

log = logging.getLogger(__name__)

LOG_EXPORT_POLL_SECONDS: Final = 2.0
LINES_AT_ONCE: Final = 10_000
"""Limit of lines that one call of `export_some` copies per run."""
CALLS_PER_PASS: Final = 100
"""Limit of API calls per call of `export_some`.

The exporter calls `export_some` about every two seconds, so the rate is far below the account's limit of 800 API calls
per second.
"""


class LogExporter(Exporter):
    """The loop that exports the jobs' logs to one log group.

    `leaser` claims the lease that permits one control-plane server to export to this log group; no other loop may use
    the same `leaser`. The log group's name is part of the lease's key and of log messages.
    """

    poll_seconds = LOG_EXPORT_POLL_SECONDS

    def __init__(
        self,
        database: Database,
        objects: ServiceStore,
        group: str,
        sink: LogSink,
        leaser: Leaser,
        now: Callable[[], datetime],
        *,
        calls_per_pass: int = CALLS_PER_PASS,
    ) -> None:
        super().__init__(database, f"logs:{group}", leaser, now)
        self._calls_per_pass = calls_per_pass
        self._objects = objects
        self._sink = sink
        self._calls_left = 0
        self._copied_last = ""
        """The last run whose log the previous call of `export_some` copied.

        The next call starts with the run after it, so that busy runs do not delay other runs for ever.
        """

    def export_some(self) -> bool:
        """Copy the next log lines of all runs to the log group that receives them (see `Exporter.export_some`)."""
        with self._database.write() as session:
            claimed = self._claim(session)
            if claimed is None:
                return False
            _, before = claimed
            runs = exports.logs_to_copy(session)
        self._calls_left = self._calls_per_pass
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
        return False  # Pause before the next export, because AWS limits an account's calls.

    def _copy(self, run_id: str) -> None:
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
                    "export to %s: CloudWatch rejected %d lines of %s with a time stamp too old or too far ahead",
                    self._name,
                    refused,
                    stream,
                )


def text_of(cursor: Cursor) -> str:
    """Return a log cursor as text for the database."""
    return json.dumps([cursor.generation, dict(cursor.positions), sorted(cursor.reported_gaps)])


def cursor_of(text: str) -> Cursor:
    """Return the log cursor that `text_of` encoded."""
    generation, positions, reported_gaps = json.loads(text)
    return Cursor(
        generation,
        {NodeId(node): number for node, number in positions.items()},
        frozenset(NodeId(node) for node in reported_gaps),
    )


def _line(event: LogEvent) -> BatchLine:
    fields = {"generation": event.generation, "rank": event.rank, "stream": event.kind, "message": event.text}
    return BatchLine(
        event.at_ms,
        json.dumps({name: value for name, value in fields.items() if value is not None}, ensure_ascii=False),
    )
