"""Forwards API clients' requests about exports to the nodes' agents, and returns the agents' answers to the clients.

An export is a client's read of snapshots from the nodes' memory.

    hold, read         ──▶ HoldSnapshot, ReadSnapshot ──▶ agent
                       ◀── SnapshotHeld, SnapshotBytes ──  answered(node, answer)

While an agent keeps the snapshots of one step in memory for a client that reads them, its node has a *hold*. An agent
may execute the same request twice without harm. A caller that received no answer therefore repeats the request with
another request id.

Invariant: only the node that received a request may answer it. The desk keeps no answer whose caller has left. All
methods run on the server's event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Final, TypeVar, cast

from everstep.protocol.agent_messages import HoldSnapshot, ReadSnapshot, ReleaseSnapshot, SnapshotBytes, SnapshotHeld
from everstep.protocol.ids import NodeId

KEPT_HOLDS: Final = 256
"""Number of exports for which this server remembers that an event about their start is stored.

A client's repeated request for the same export then stores no second event.
"""
MAX_READS: Final = 8
"""Limit of reads that wait for an agent at the same time. Each needs up to `MAX_SNAPSHOT_READ_BYTES` of memory."""
ANSWER_SECONDS: Final = 20.0
"""Seconds for which a caller waits for an agent's answer."""

T = TypeVar("T")
Request = HoldSnapshot | ReadSnapshot | ReleaseSnapshot
Answer = SnapshotHeld | SnapshotBytes


class NoAnswer(Exception):
    """The agent is not connected to this server, did not answer in time, or sent an answer of the wrong type."""


class SnapshotDesk:
    """Sends one server's requests about exports of snapshots to agents, and receives their answers.

    `AgentRegistry` owns the desk.

    `send` queues a message for an agent and returns whether the agent is connected.
    """

    def __init__(self, send: Callable[[NodeId, Request], bool]) -> None:
        self._send = send
        self._asked: dict[str, tuple[NodeId, asyncio.Future[Answer]]] = {}
        self._reading = asyncio.Semaphore(MAX_READS)
        self._beginning: dict[str, asyncio.Task[object]] = {}
        """Running calls of `begin` (the start of an export), by the key passed to `once`."""
        self._begun: deque[str] = deque(maxlen=KEPT_HOLDS)

    async def once(self, key: str, begin: Callable[[], Coroutine[object, object, T]]) -> T:
        """Run `begin`, or wait for the result of a running call with the same key.

        A client may repeat its request while the first request still runs. Without this method, both would start the
        same export on the nodes, and the failure of one would end the export of the other. `begin` continues if one of
        its callers is cancelled.

        Args:
            key: id of the request. If a client repeats a request, both requests have the same id.
            begin: called at most once at a time per key.

        Returns:
            The result of `begin`, for all callers.
        """
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
        """Remember that the event about the start of this export is recorded, so that it is not recorded again."""
        self._begun.append(hold_id)

    async def hold(self, node_id: NodeId, request: HoldSnapshot) -> SnapshotHeld:
        """Ask an agent to hold the snapshots of one step.

        Args:
            node_id: the node whose snapshots are exported.
            request: the request, with an id that no other request has.

        Returns:
            The agent's answer, which may be a refusal.

        Raises:
            NoAnswer: the agent is not connected to this server, or did not answer in time.
        """
        answer = await self._ask(node_id, request)
        if not isinstance(answer, SnapshotHeld):
            raise NoAnswer(f"the agent of {node_id} sent an answer of the wrong type")
        return answer

    async def read(self, node_id: NodeId, request: ReadSnapshot) -> SnapshotBytes:
        """Ask an agent for a range of bytes of a shard that it holds for an export.

        Args:
            node_id: the node that holds the shard.
            request: the request, with an id that no other request has.

        Returns:
            The agent's answer, which may be a refusal.

        Raises:
            NoAnswer: the agent is not connected to this server, or did not answer in time.
        """
        async with self._reading:
            answer = await self._ask(node_id, request)
        if not isinstance(answer, SnapshotBytes):
            raise NoAnswer(f"the agent of {node_id} sent an answer of the wrong type")
        return answer

    def release(self, node_id: NodeId, request: ReleaseSnapshot) -> None:
        """Order an agent to free the slots that it keeps unchanged for an export.

        If the message is lost, the agent frees them by itself after a while.
        """
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
