"""Stores the metrics that agents report in the database.

    agent's report ──▶ MetricInbox.take keeps one batch per node in memory, and returns immediately
    once a second  ──▶ MetricWriter.flush stores each batch in a short transaction of its own
                   ──▶ MetricsStored goes to the agent, which then sends its next batch

Rank 0's batch also contains the values that Everstep measures. For the newest point of a batch, the writer also stores
the latest measurements of all nodes of the job, and the latest logged values of its ranks.

An agent keeps unconfirmed values and sends them again, also to another control-plane server. A crash of a server
therefore loses no values. A slow or unreachable database delays metrics, but no heartbeats of agents.

Invariant: the server confirms a batch only after the batch's transaction. It drops values from a node that was not part
of the generation.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Final

from sqlalchemy.exc import SQLAlchemyError

from control_plane.db import jobs, metrics
from control_plane.db.session import Database
from control_plane.loop.agents import AgentRegistry
from control_plane.loop.metric_inbox import ReceivedBatch
from control_plane.loop.repeating import pause
from everstep.protocol.agent_messages import MemberReport, MetricsStored
from everstep.protocol.ids import NodeId

log = logging.getLogger(__name__)

FLUSH_SECONDS: Final = 1.0
REST_RATIO: Final = 3.0
"""Pause after a call of `flush`, as a multiple of the duration of this call.

The writer therefore uses the database for at most a quarter of the time.
"""


class MetricWriter:
    """Stores the metric values that agents report in the database, in a loop about once a second."""

    def __init__(self, database: Database, registry: AgentRegistry) -> None:
        self._database = database
        self._registry = registry

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
        """Store all waiting batches of metric values, and confirm each to the agent that sent it.

        An agent sends an unconfirmed batch again.
        """
        for node_id, received in self._registry.logged.empty().items():
            batch = received.batch
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
            planned = {
                number: jobs.planned_nodes(session, batch.run, number)
                for number in {point.generation for point in batch.points}
            }
            foreign = sorted(number for number, nodes in planned.items() if node_id not in nodes)
            if foreign:
                log.warning(
                    "run %s: node %s is no member of generation %d; dropped its %d values",
                    batch.run,
                    node_id,
                    foreign[0],
                    len(batch.points),
                )
                return
            planned_members = planned[batch.points[-1].generation] if batch.points else frozenset()
            members = {node: report for node, report in reports.items() if node in planned_members}
            metrics.store(
                session,
                received.agent_id,
                batch,
                {node: report.measured for node, report in members.items()},
                {each.rank: each.values for report in members.values() for each in report.logged},
            )
