"""Answers the control plane's requests for snapshots in memory, which a user exports.

Invariant: at most `MAX_REQUESTS` requests run at a time, so that an export never uses all of the agent's threads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from everstep.protocol.agent_messages import HoldSnapshot, ReadSnapshot, ReleaseSnapshot, SnapshotBytes, SnapshotHeld
from everstep.protocol.limits import cut
from worker.member.member import Member
from worker.tasks import Background

log = logging.getLogger(__name__)
MAX_REQUESTS = 4
"""Further requests wait for their turn."""
MAX_WAITING = 64
"""Limit of requests that run or wait. Further requests are refused."""
_ENDED = "the generation does not run on this node"


class SnapshotRequests:
    """Answers the requests of exports: to keep a snapshot in memory, to read it, and to release it."""

    def __init__(self, answer: Callable[[SnapshotHeld | SnapshotBytes], None]) -> None:
        self._answer = answer
        self._running = Background()
        self._turns = asyncio.Semaphore(MAX_REQUESTS)
        self._count = 0

    def take(self, request: HoldSnapshot | ReadSnapshot | ReleaseSnapshot, member: Member | None) -> None:
        """Begin to answer a request of an export. Must not block. `member` is None if its generation runs elsewhere."""
        if isinstance(request, ReleaseSnapshot):
            if member is not None:
                member.held.release(request.hold_id)
            return
        if member is None or self._count >= MAX_WAITING:
            self._answer(_refusal(request, _ENDED if member is None else "too many requests on the node"))
            return
        self._count += 1
        self._running.begin(self._run(request, member), name="a request for a snapshot")

    async def _run(self, request: HoldSnapshot | ReadSnapshot, member: Member) -> None:
        answer = _refusal(request, _ENDED)
        try:
            async with self._turns:
                if isinstance(request, HoldSnapshot):
                    answer = await member.held.hold(request)
                else:
                    answer = await member.held.read(request)
        except Exception:
            log.exception("a request for a snapshot failed")
            answer = _refusal(request, "the agent failed; its log has the reason")
        finally:
            self._count -= 1
            self._answer(answer)

    async def close(self) -> None:
        """End all requests for snapshots; each request is answered with a refusal."""
        await self._running.close()


def _refusal(request: HoldSnapshot | ReadSnapshot, why: str) -> SnapshotHeld | SnapshotBytes:
    if isinstance(request, HoldSnapshot):
        return SnapshotHeld(request_id=request.request_id, refusal=cut(why))
    return SnapshotBytes(request_id=request.request_id, refusal=cut(why))
