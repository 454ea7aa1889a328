"""Forwards API clients' requests about exports to the nodes' agents, and returns the agents' answers.

An export is a client's read of snapshots from the nodes' memory. While an agent keeps the snapshots of one step for a
client, its node has a *hold*. A caller that received no answer repeats the request with another request id, because an
agent may execute the same request twice without harm.

Invariant: only the node that received a request may answer it. All methods run on the server's event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Final, TypeVar, cast

from everstep.protocol.agent_messages import HoldSnapshot, ReadSnapshot, ReleaseSnapshot, SnapshotBytes, SnapshotHeld
from everstep.protocol.ids import NodeId

KEPT_HOLDS: Final = 256
"""Number of exports whose start event is known to be stored, so that a repeated request stores no second event."""
MAX_READS: Final = 8
"""Limit of simultaneous reads. Each needs up to `MAX_SNAPSHOT_READ_BYTES` of memory."""
ANSWER_SECONDS: Final = 20.0

T = TypeVar("T")
Request = HoldSnapshot | ReadSnapshot | ReleaseSnapshot
Answer = SnapshotHeld | SnapshotBytes


class NoAnswer(Exception):
    """The agent is not connected to this server, did not answer in time, or sent an answer of the wrong type."""


class SnapshotDesk:
    """Sends one server's requests about exports to agents. `send` returns whether the agent is connected."""

    def __init__(self, send: Callable[[NodeId, Request], bool]) -> None:
        self._send = send
        self._asked: dict[str, tuple[NodeId, asyncio.Future[Answer]]] = {}
        self._reading = asyncio.Semaphore(MAX_READS)
        self._beginning: dict[str, asyncio.Task[object]] = {}
        """Running calls of `begin`, by the key passed to `once`."""
        self._begun: deque[str] = deque(maxlen=KEPT_HOLDS)

    async def once(self, key: str, begin: Callable[[], Coroutine[object, object, T]]) -> T:
        """Run `begin`, or wait for the result of a running call with the same key.

        `begin` continues if one of its callers is cancelled. Repeated requests of a client have the same key.
        """
        # Without this lookup, both requests would start the same export, and the failure of one would end that of the
        # other.
        task = cast("asyncio.Task[T] | None", self._beginning.get(key))
        if task is None:
            task = asyncio.create_task(begin(), name=f"hold {key}")
            self._beginning[key] = cast("asyncio.Task[object]", task)
            task.add_done_callback(lambda _: self._beginning.pop(key))
        return await asyncio.shield(task)

    def has_begun(self, hold_id: str) -> bool:
        """Return whether `note_begun` was called for this export, so that its start needs no further event."""
        return hold_id in self._begun

    def note_begun(self, hold_id: str) -> None:
        """Remember that the event about the start of this export is recorded."""
        self._begun.append(hold_id)

    async def hold(self, node_id: NodeId, request: HoldSnapshot) -> SnapshotHeld:
        """Ask an agent to hold the snapshots of one step. The answer may be a refusal.

        Raises NoAnswer if the agent is not connected to this server, or did not answer in time.
        """
        answer = await self._ask(node_id, request)
        if not isinstance(answer, SnapshotHeld):
            raise NoAnswer(f"the agent of {node_id} sent an answer of the wrong type")
        return answer

    async def read(self, node_id: NodeId, request: ReadSnapshot) -> SnapshotBytes:
        """Ask an agent for a range of bytes of a shard that it holds for an export. The answer may be a refusal.

        Raises NoAnswer if the agent is not connected to this server, or did not answer in time.
        """
        async with self._reading:
            answer = await self._ask(node_id, request)
        if not isinstance(answer, SnapshotBytes):
            raise NoAnswer(f"the agent of {node_id} sent an answer of the wrong type")
        return answer

    def release(self, node_id: NodeId, request: ReleaseSnapshot) -> None:
        """Order an agent to free the slots of an export. If the message is lost, the agent frees them after a while."""
        self._send(node_id, request)

    def answered(self, node_id: NodeId, answer: Answer) -> None:
        """Accept an agent's answer to a request about an export. Drop the answer if no caller waits for it."""
        asked = self._asked.get(answer.request_id)
        if asked is not None and asked[0] == node_id and not asked[1].done():
            asked[1].set_result(answer)

    async def _ask(self, node_id: NodeId, request: HoldSnapshot | ReadSnapshot) -> Answer:
        if not self._send(node_id, request):
            raise NoAnswer(f"the agent of {node_id} is not connected to this server")
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._asked[request.request_id] = node_id, answer
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return await answer
        except TimeoutError:
            raise NoAnswer(f"the agent of {node_id} did not answer within {ANSWER_SECONDS:.0f} s") from None
        finally:
            del self._asked[request.request_id]
