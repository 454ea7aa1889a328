"""Stores the metrics that agents report in the database.

    agent's report ──▶ MetricInbox.take keeps one batch per node in memory, and returns immediately
    once a second  ──▶ MetricWriter.flush stores a piece of each batch in a short transaction of its own
                   ──▶ MetricsStored goes to the agent, which then sends its next values

An agent keeps unconfirmed values and sends them again, also to another control-plane server. A slow or unreachable
database delays metrics, but no heartbeats of agents.

Invariant: the server confirms values only after their transaction. It drops values that the node of the generation's
rank 0 did not send, and values of a generation about which this node may not report any more (`jobs.reporters`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Final

import msgspec
from sqlalchemy.exc import SQLAlchemyError

from control_plane.core.metrics import chunk_of
from control_plane.db import jobs, metrics
from control_plane.db.session import Database
from control_plane.loop.agents import AgentRegistry
from control_plane.loop.metric_inbox import ReceivedBatch
from control_plane.loop.repeating import pause
from everstep.protocol.agent_messages import MemberReport, MetricBatch, MetricsStored
from everstep.protocol.ids import Generation, NodeId

log = logging.getLogger(__name__)

FLUSH_SECONDS: Final = 1.0
MAX_CHUNKS: Final = 64
"""Number of rows of points that one transaction touches for a node: half a second on a slow machine."""
REST_RATIO: Final = 3.0
"""Pause after `flush`, as a multiple of its duration. The writer then uses the database a quarter of the time."""


def first_piece(batch: MetricBatch) -> MetricBatch:
    """Return the first values of a batch: at least one, of one generation, and of few rows (`MAX_CHUNKS`)."""
    chunks: set[tuple[str, int]] = set()
    for count, point in enumerate(batch.points):
        # Values with neighbouring steps share rows. A rank that logs steps far apart makes a row for each value.
        chunks |= {(name, chunk_of(point.step, 1)) for name in point.values}
        if count and (len(chunks) > MAX_CHUNKS or point.generation != batch.points[0].generation):
            return msgspec.structs.replace(batch, points=batch.points[:count])
    return batch


class MetricWriter:
    """Stores the metric values that agents report, about once a second."""

    def __init__(self, database: Database, registry: AgentRegistry, now: Callable[[], datetime]) -> None:
        self._database = database
        self._registry = registry
        self._now = now

    async def run(self, stop: asyncio.Event) -> None:
        """Store batches of metric values until `stop` is set, then store the remaining batches."""
        stopping = asyncio.create_task(stop.wait())
        try:
            while not stop.is_set():
                filled = asyncio.create_task(self._registry.logged.filled.wait())
                await asyncio.wait((filled, stopping), return_when=asyncio.FIRST_COMPLETED)
                filled.cancel()
                begun = time.monotonic()
                await self.flush()
                await pause(max(FLUSH_SECONDS, REST_RATIO * (time.monotonic() - begun)), until=stop)
            await self.flush()
        finally:
            stopping.cancel()

    async def flush(self) -> None:
        """Store the first piece of each waiting batch, and confirm it to the batch's agent."""
        for node_id, received in self._registry.logged.empty().items():
            batch = first_piece(received.batch)
            received = replace(received, batch=batch)
            try:
                members = self._registry.member_reports(batch.run, batch.points[-1].generation) if batch.points else {}
                await asyncio.to_thread(self._store, node_id, received, members)
            except SQLAlchemyError as error:
                log.warning("run %s: could not store logged values; the agent sends them again: %s", batch.run, error)
                continue
            # The batch can never be stored. Confirm it below, because its agent would otherwise send it for ever.
            except Exception:
                log.exception("run %s: dropped %d logged values that cannot be stored", batch.run, len(batch.points))
            self._registry.send(
                node_id, MetricsStored(agent_id=received.agent_id, next_number=batch.first_number + len(batch.points))
            )

    def _store(self, node_id: NodeId, received: ReceivedBatch, reports: Mapping[NodeId, MemberReport]) -> None:
        batch = received.batch
        with self._database.write() as session:
            generation = batch.points[0].generation if batch.points else Generation(0)
            places = jobs.reporters(session, batch.run, generation, self._now()) if batch.points else {}
            if batch.points and places.get(node_id) != 0:
                log.warning(
                    "run %s: node %s may not report values of generation %d; dropped its %d values",
                    batch.run,
                    node_id,
                    generation,
                    len(batch.points),
                )
                return
            members = {node: report for node, report in reports.items() if node in places}
            metrics.store(
                session,
                received.agent_id,
                batch,
                {node: report.measured for node, report in members.items()},
                {each.rank: each.values for report in members.values() for each in report.logged},
            )
