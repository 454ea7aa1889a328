"""Holds the batches of metric values that agents have sent and that the database does not contain yet.

Invariant: at most one batch per node. An agent sends its next batch only after a confirmation.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from everstep.protocol.agent_messages import MetricBatch
from everstep.protocol.ids import NodeId


@dataclass(frozen=True, slots=True)
class ReceivedBatch:
    """A batch of metric values and the agent that sent it."""

    agent_id: str
    batch: MetricBatch


class MetricInbox:
    """Batches of metric values that wait for `MetricWriter`. Used on the server's event loop only."""

    def __init__(self) -> None:
        self._received: dict[NodeId, ReceivedBatch] = {}
        self.filled = asyncio.Event()

    def take(self, node_id: NodeId, agent_id: str, batch: MetricBatch) -> None:
        """Add an agent's batch. A copy that is sent again replaces the earlier one, so that it is stored once."""
        self._received[node_id] = ReceivedBatch(agent_id, batch)
        self.filled.set()

    def empty(self) -> dict[NodeId, ReceivedBatch]:
        """Remove all batches from the inbox, and return them by node."""
        received, self._received = self._received, {}
        self.filled.clear()
        return received
