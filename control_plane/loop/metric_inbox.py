"""Holds the batches of metric values that agents have sent and that the database does not contain yet.

Invariant: the inbox has at most one batch per node. An agent sends its next batch only after the server has confirmed
the previous batch.
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
        """Add the batch of metric values that a node's agent (`agent_id`) has sent.

        If an agent sends a batch again, the new copy replaces the earlier copy, so that the batch is stored once.
        """
        self._received[node_id] = ReceivedBatch(agent_id, batch)
        self.filled.set()

    def empty(self) -> dict[NodeId, ReceivedBatch]:
        """Remove all batches from the inbox, and return them by node."""
        received, self._received = self._received, {}
        self.filled.clear()
        return received
