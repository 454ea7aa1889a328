"""Rows of one fleet that several jobs share: its jobs, nodes, notices and fault histories.

Invariant: one transaction reads all rows of a `Surroundings`. `SharedRows.get` returns no rows whose read began before
the last call of `forget` that precedes the call of `get`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from sqlalchemy.orm import Session

from control_plane.core.observed.fleets import FleetJob
from control_plane.core.observed.nodes import Notice
from control_plane.core.queue import Schedule, schedule
from control_plane.core.states import NodeState
from control_plane.db import fleets, implications, jobs, nodes, notices
from control_plane.loop import records
from everstep.protocol.ids import FleetName, NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """Rows of one fleet that the passes over its jobs share."""

    name: FleetName
    fleets: Mapping[FleetName, fleets.FleetRecord]
    """All fleets, by name."""
    jobs: tuple[jobs.JobRecord, ...]
    """The fleet's jobs that have not ended."""
    nodes: Mapping[NodeId, nodes.NodeRecord]
    """The fleet's nodes. Ended nodes are included, because their end is evidence."""
    notices: Mapping[NodeId, tuple[Notice, ...]]
    implications: Mapping[str, tuple[implications.ImplicationRecord, ...]]


class SharedRows:
    """The rows that the passes of one sweep over jobs share.

    Without sharing, each pass would read all jobs and nodes of its fleet, and a sweep's cost would be quadratic.

    Used on the server's event loop.

    Args:
        read: function that reads the rows of a fleet. It blocks, and runs in a thread.
    """

    def __init__(self, read: Callable[[FleetName], Surroundings]) -> None:
        self._read = read
        self._reads: dict[FleetName, asyncio.Task[Surroundings]] = {}

    async def get(self, name: FleetName) -> Surroundings:
        """Return a fleet's rows. Callers that ask at the same time share one read.

        Raises the error of the read. The next call reads again.
        """
        read = self._reads.get(name)
        if read is None or (read.done() and (read.cancelled() or read.exception() is not None)):
            read = self._reads[name] = asyncio.create_task(asyncio.to_thread(self._read, name))
        return await asyncio.shield(read)

    def forget(self, name: FleetName | None = None) -> None:
        """Read the rows of a fleet anew for all later calls of `get`, or of all fleets if `name` is None.

        A read in progress still answers the calls that wait for it.
        """
        if name is None:
            self._reads.clear()
        else:
            self._reads.pop(name, None)


def read_surroundings(session: Session, name: FleetName) -> Surroundings:
    """Read the shared rows of a fleet in the caller's transaction."""
    return Surroundings(
        name=name,
        fleets={FleetName(fleet.name): fleet for fleet in fleets.every(session)},
        jobs=jobs.unfinished(session, name),
        nodes={NodeId(row.id): row for row in nodes.of_fleet(session, name, with_ended=True)},
        notices=records.notices_of(notices.of_fleet(session, name)),
        implications=implications.of_fleet(session, name),
    )


def schedule_of(
    fleet: fleets.FleetRecord | None,
    live: Iterable[jobs.JobRecord],
    rows: Iterable[nodes.NodeRecord],
    now: float,
    *,
    newcomer: FleetJob | None = None,
) -> Schedule:
    """Compute which jobs of a fleet may run now.

    Args:
        fleet: as stored. None: no capacity.
        live: all unfinished jobs of the fleet.
        rows: the fleet's nodes. Held nodes are not part of the capacity.
        now: Unix seconds.
        newcomer: a job that is not stored yet, to predict its place in the queue.

    Returns:
        The schedule that the core computes.
    """
    held = sum(row.state == NodeState.HELD for row in rows)
    capacity = fleet.max_node_count - held if fleet is not None else 0
    every = [records.fleet_job(job) for job in live]
    return schedule([*every, newcomer] if newcomer is not None else every, capacity, now)
