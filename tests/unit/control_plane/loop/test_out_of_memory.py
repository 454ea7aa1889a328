"""Runs the real loops on a rank that runs out of memory.

The incident and the job's reason name this cause, and no node is blamed.
"""

from __future__ import annotations

import pytest

from control_plane.core.states import JobState
from control_plane.db import implications
from everstep.protocol.agent_messages import ExitClass, MemoryEnd, MemoryKind, MemorySource
from tests.sim.world import World, evidence_of

GIB = 1 << 30
END = MemoryEnd(
    source=MemorySource.CGROUP,
    kind=MemoryKind.HOST,
    rank_bytes=int(61.2 * GIB),
    used_bytes=int(61.9 * GIB),
    total_bytes=62 * GIB,
)


async def test_the_incident_and_the_reason_name_the_memory(world: World) -> None:
    world.submit(max_attempts=1)
    await world.running()
    await world.train(6)
    struck = world.team()[1]
    world.kill_rank(struck, exit_class=ExitClass.OUT_OF_MEMORY, memory=END)
    await world.until(lambda: world.job().state == JobState.FAILED)
    words = (
        f"rank 1 on {struck.node_id} ran out of memory: the kernel killed it at 61.2 GiB, with 61.9 GiB of "
        "62.0 GiB in use; lower the batch size"
    )
    (incident,) = world.incidents()
    assert incident.cause == "rank_exit"
    assert any(each.startswith(words) for each in evidence_of(incident))
    assert words in world.job().reason


@pytest.mark.parametrize(("exit_class", "blamed"), [(ExitClass.ERROR, ["rank_exit"]), (ExitClass.OUT_OF_MEMORY, [])])
async def test_a_node_that_was_left_for_lack_of_memory_is_not_blamed(
    world: World, exit_class: ExitClass, blamed: list[str]
) -> None:
    world.submit(max_attempts=2)
    await world.running()
    await world.train(6)
    struck = world.team()[1]
    memory = END if exit_class is ExitClass.OUT_OF_MEMORY else None
    for generation in (2, 3):
        world.kill_rank(struck, exit_class=exit_class, code=1, memory=memory)
        await world.until(lambda: (world.job().generation, world.job().state) == (generation, JobState.RUNNING))  # noqa: B023 — awaited at once
    assert struck not in world.team(), "the node is left once, as for any failure that repeats"
    await world.train(6)
    await world.tick()
    with world.database.read() as session:
        assert [line.what for line in implications.of_node(session, struck.node_id)] == blamed
