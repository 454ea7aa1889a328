"""An outage that several nodes see ends no job."""

from __future__ import annotations

from control_plane.core.states import JobState
from control_plane.core.verification import CheckpointVerdict
from everstep.protocol.agent_messages import FaultCode, NodeFault
from everstep.protocol.ids import Rank
from tests.unit.control_plane.loop.test_initial_checkpoint import initial, verify, world  # noqa: F401
from tests.unit.control_plane.loop.world import World


async def test_a_job_does_not_end_before_its_initial_checkpoint_is_verified(world: World) -> None:  # noqa: F811
    """All nodes read garbled answers. The verifier then finds the checkpoint intact."""
    world.submit(nodes=2, initial=initial(world))
    await world.running()
    for agent in world.team():
        agent.faults = (
            NodeFault(code=FaultCode.SOURCE_MISMATCH, message="rank 1: other bytes", is_permanent=False, shard=Rank(1)),
        )
    await world.until(lambda: world.checkpoints("first")[0].is_wrong)
    for agent in world.agents.values():
        agent.faults = ()
    for _ in range(20):
        await world.tick()
        assert world.job().state != JobState.FAILED, world.job().reason
    verify(world, CheckpointVerdict.of())
    await world.until(lambda: world.job().state == JobState.RUNNING)
    assert world.plan().base_step == 4
