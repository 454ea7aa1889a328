"""The database rows about one fleet that decisions about all its jobs need.

Invariant: one transaction reads all rows of a `FleetRows`. After a call of `forget`, `SharedRows.get` returns only
rows whose read began after this call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from sqlalchemy.orm import Session

from control_plane.core.observed.fleets import FleetJob
from control_plane.core.observed.nodes import Notice
from control_plane.core.queue import QueueSchedule, schedule
from control_plane.core.states import NodeState
from control_plane.db import automation, fleets, implications, jobs, nodes, notices
from control_plane.loop import records
from everstep.protocol.ids import FleetName, NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetRows:
    """The rows about one fleet, which the job loop reads once for its decisions about all jobs of the fleet."""

    name: FleetName
    fleets: Mapping[FleetName, fleets.FleetRecord]
    jobs: tuple[jobs.SavedJob, ...]
    nodes: Mapping[NodeId, nodes.SavedNode]
    """Includes ended nodes, because their end is evidence for decisions."""
    notices: Mapping[NodeId, tuple[Notice, ...]]
    implications: Mapping[str, tuple[implications.ImplicationRecord, ...]]
    pause: str = ""
    """The person who paused all automatic actions, and the reason. Empty while automation is active."""


class SharedRows:
    """A cache of `FleetRows` for the passes of one sweep. Used on the event loop; `read` runs in a thread."""

    def __init__(self, read: Callable[[FleetName], FleetRows]) -> None:
        self._read = read
        self._reads: dict[FleetName, asyncio.Task[FleetRows]] = {}

    async def get(self, name: FleetName) -> FleetRows:
        """Return the cached rows about a fleet, or read them. Concurrent callers share one read and its error."""
        read = self._reads.get(name)
        if read is None or (read.done() and (read.cancelled() or read.exception() is not None)):
            read = self._reads[name] = asyncio.create_task(asyncio.to_thread(self._read, name))
        return await asyncio.shield(read)

    def forget(self, name: FleetName | None = None) -> None:
        """Drop the cached rows of a fleet, or of all fleets if `name` is None. A read in progress continues."""
        if name is None:
            self._reads.clear()
        else:
            self._reads.pop(name, None)


def read_fleet_rows(session: Session, name: FleetName) -> FleetRows:
    """Read the rows on which the decisions about all jobs of a fleet depend, in the caller's transaction."""
    return FleetRows(
        name=name,
        fleets={FleetName(fleet.name): fleet for fleet in fleets.every(session)},
        jobs=jobs.unfinished(session, name),
        nodes={NodeId(row.id): row for row in nodes.of_fleet(session, name, with_ended=True)},
        notices=records.notices_of(notices.of_fleet(session, name)),
        implications=implications.of_fleet(session, name),
        pause=automation.words(session),
    )


def schedule_of(
    fleet: fleets.FleetRecord | None,
    live: Iterable[jobs.SavedJob],
    rows: Iterable[nodes.SavedNode],
    now: float,
    *,
    newcomer: FleetJob | None = None,
) -> QueueSchedule:
    """Compute which jobs of a fleet may hold nodes now, and which wait in its queue.

    Without a `fleet`, no capacity exists; HELD nodes reduce it. `newcomer` is a job that is not stored yet. `now` is
    Unix seconds.
    """
    held = sum(row.state == NodeState.HELD for row in rows)
    capacity = fleet.max_node_count - held if fleet is not None else 0
    every = [records.fleet_job(job) for job in live]
    return schedule([*every, newcomer] if newcomer is not None else every, capacity, now)
