"""Stores the logs of nodes in S3 before the control plane ends their instances.

    evidence/<node>/console.log     the console output of the instance, from EC2
    evidence/<node>/agent.log       uploaded by the agent, if it is connected
    evidence/<node>/shim.log        as agent.log; written by the shim, the parent process of the node's ranks

Invariant: a missing log delays the end of an instance by a few seconds, and never prevents it.
"""

from __future__ import annotations

import asyncio
import logging
from datetime import datetime
from typing import Final

from control_plane.cloud.errors import CloudError
from control_plane.loop.context import LoopContext
from everstep.protocol.agent_messages import KeepEvidence
from everstep.protocol.ids import NodeId
from everstep.protocol.plan import ObjectReference

log = logging.getLogger(__name__)

WAIT_SECONDS: Final = 5.0
REMEMBERED_COUNT: Final = 1_000
"""Number of nodes with stored logs that are remembered, so that each node's logs are stored only once."""


def evidence_key(node_id: NodeId) -> str:
    """Return the prefix of the S3 keys under which a node's logs are stored."""
    return f"evidence/{node_id}/"


class LastLogs:
    """Stores a node's logs in S3 before the node's instance ends. Used on the server's event loop."""

    def __init__(self, context: LoopContext) -> None:
        self._context = context
        self._begun: dict[NodeId, datetime] = {}
        """Time of the first call of `may_end`, the oldest call first."""

    async def may_end(self, node_id: NodeId) -> bool:
        """Request the logs of a node. Return False while the agent uploads them, for at most `WAIT_SECONDS`."""
        if node_id not in self._begun:
            self._begun[node_id] = self._context.now()
            if len(self._begun) > REMEMBERED_COUNT:
                del self._begun[next(iter(self._begun))]
            await self._keep_console(node_id)
        key = evidence_key(node_id)
        view = self._context.registry.view(node_id)
        if view is None or not view.is_connected or (view.report is not None and view.report.evidence_key == key):
            return True
        self._context.registry.send(node_id, KeepEvidence(place=ObjectReference(bucket=self._context.bucket, key=key)))
        return (self._context.now() - self._begun[node_id]).total_seconds() >= WAIT_SECONDS

    async def _keep_console(self, node_id: NodeId) -> None:
        at = ObjectReference(bucket=self._context.bucket, key=f"{evidence_key(node_id)}console.log")
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                output = await asyncio.to_thread(self._context.operator.console_output, node_id)
                await asyncio.to_thread(self._context.objects.put, at, output)
        except (CloudError, TimeoutError) as error:
            log.warning("node %s: its console output is not stored before its end: %s", node_id, error)
