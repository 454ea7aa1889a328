"""Repeats a load for as long as S3, IAM or KMS is out of reach, so that the generation continues once they answer.

A probe is a read of one byte without retries. The pauses of ordinary retries are longer than the pause between probes.
Invariant: only a store that cannot be read delays a load. All other failures end it.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from everstep.protocol.agent_messages import NodeFault
from everstep.protocol.limits import cut
from everstep.protocol.plan import ObjectReference
from worker.errors import LoadFailed
from worker.storage.object_store import ObjectStore

log = logging.getLogger(__name__)
PROBE_SECONDS = 1.0
"""Longest pause between two probes. Hundreds of nodes then send a few hundred small reads per second."""
PROBES = 60
"""Failed probes before the load itself is repeated, because the store may answer the load and not the probe."""

T = TypeVar("T")


def fault_of(error: LoadFailed) -> NodeFault:
    """Return the fault that the agent reports for a failed load."""
    return NodeFault(code=error.code, message=cut(str(error)), is_permanent=error.is_permanent, obstacle=error.obstacle)


async def patiently(
    load: Callable[[], Awaitable[T]], objects: ObjectStore, report: Callable[[NodeFault | None], None]
) -> T:
    """Run `load`, and repeat it while a store is out of reach. A repeated call continues the load.

    `report` receives the fault that delays the load, and None when the load no longer waits. Raises LoadFailed if the
    load failed for another reason.
    """
    is_waiting = False
    try:
        while True:
            try:
                return await load()
            except LoadFailed as error:
                if error.obstacle is None or error.is_permanent:
                    raise
                log.warning("the load waits for a store: %s", error)
                report(fault_of(error))
                is_waiting, place = True, error.place
            await _answer(objects, place)
    finally:
        if is_waiting:
            report(None)


async def _answer(objects: ObjectStore, place: ObjectReference | None) -> None:
    """Wait until the store answers a probe, for at most `PROBES` probes. Without an object, wait for one pause."""
    for _ in range(PROBES):
        await asyncio.sleep(PROBE_SECONDS * random.uniform(0.5, 1.0))
        if place is None or await asyncio.to_thread(objects.answers, place):
            return
