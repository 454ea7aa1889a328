"""Creates the test data of the dashboard benchmark: more jobs, nodes and log lines than most fleets have.

The control loops launch one wide job on the simulated fleet. An SQL UPDATE sets the states of about a thousand others,
because simulating them would take hours.
"""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Final

from sqlalchemy import update

from control_plane.core.states import JobState
from control_plane.db.models import JobRow
from everstep.protocol.ids import Rank
from everstep.protocol.log_chunks import LogLine
from tests.dashboard.printed import put_chunk
from tests.sim.world import World

WIDE: Final = "wide"
SMALL: Final = "small"
CHUNK_LINES: Final = 5_000
_SHARE: Final = ((0.70, JobState.COMPLETED), (0.80, JobState.FAILED), (0.85, JobState.STOPPED))
"""Final states with the cumulative fraction of jobs. The remaining jobs wait."""


async def crowd(world: World, *, jobs: int, nodes: int) -> None:
    """Create `jobs` jobs in a new world, one of which trains on `nodes` nodes with one rank each."""
    world.submit(WIDE, nodes=nodes)
    await world.until(lambda: world.job(WIDE).state == JobState.RUNNING)
    await world.train(5, WIDE)
    await world.tick()
    for number in range(jobs - 1):
        world.submit(f"run-{number:04d}", nodes=1 + number % 8, priority=-1)
    with world.database.write() as session:
        for number in range(jobs - 1):
            state = next((state for share, state in _SHARE if number < share * jobs), None)
            if state is None:
                continue
            created = world.now - timedelta(minutes=7 * number + 20)
            values = {
                "created_at": created,
                "started_at": created + timedelta(minutes=1),
                "ended_at": created + timedelta(minutes=15),
            }
            reason = f"It made {100 + number} steps."
            session.execute(
                update(JobRow)
                .where(JobRow.name == f"run-{number:04d}")
                .values(state=state.value, reason=reason, boundary=100 + number, **values)
            )


async def small(world: World) -> None:
    """Create a job on two nodes, into which the benchmark injects faults."""
    world.submit(SMALL, nodes=2)
    await world.until(lambda: world.job(SMALL).state == JobState.RUNNING)
    await world.train(5, SMALL)


def write_log(world: World, name: str, lines: int) -> None:
    """Write log lines of a job's rank 0."""
    plan = world.plan(name)
    node = next(node for node in plan.nodes if 0 in node.ranks).node_id
    begin = int(world.now.timestamp() * 1000) - lines
    for first in range(0, lines, CHUNK_LINES):
        chunk = [_line(begin, number) for number in range(first, min(lines, first + CHUNK_LINES))]
        put_chunk(world, name, plan.generation, node, first, chunk)


def _line(begin: int, number: int) -> LogLine:
    text = (
        f"\x1b[2mstep {number:7d}\x1b[0m  loss \x1b[32m{1.7 + 6.5 * math.exp(-number / 9000):.5f}\x1b[0m  "
        f"grad_norm 0.{number % 997:03d}"
    )
    return LogLine(at_ms=begin + number, rank=Rank(0), stream="stdout", text=text, end=1)
