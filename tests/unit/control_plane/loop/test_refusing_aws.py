"""Runs the real loops while AWS refuses every call, because of throttling or of expired credentials."""

from __future__ import annotations

import pytest

from control_plane.cloud.errors import AccessDenied, CloudError, Throttled
from control_plane.core.states import JobState, NodeState
from tests.sim.world import World

REFUSALS = [
    Throttled("DescribeAutoScalingGroups: Rate exceeded", code="Throttling"),
    AccessDenied("DescribeAutoScalingGroups: the security token is expired", code="ExpiredToken"),
]


@pytest.mark.parametrize("refusal", REFUSALS, ids=["throttled", "expired"])
async def test_a_job_trains_and_recovers_while_aws_refuses_every_call(world: World, refusal: CloudError) -> None:
    world.submit()
    await world.running()
    await world.train(5)
    instances, team = {*world.agents}, [agent.node_id for agent in world.team()]
    world.operator.calls.clear()
    world.refusal = refusal
    for _ in range(30):
        await world.train(1)
    await world.until(lambda: world.job().committed_step == 34)
    assert world.job().generation == 1

    world.kill_rank(world.team()[2])
    await world.until(lambda: world.job().state == JobState.RUNNING and world.job().generation == 2)
    await world.train(5)
    assert [agent.node_id for agent in world.team()] == team, "a rank's failure needs no other node"
    assert world.operator.refused_count > 2

    world.refusal = None
    for _ in range(60):
        await world.train(1)
    assert world.operator.calls == [], "no instance was ended or requested for lack of an answer"
    assert {*world.agents} == instances
    assert not {node.state for node in world.nodes().values()} & {NodeState.GONE, NodeState.HELD}
    assert [incident.cause for incident in world.incidents()] == ["rank_exit"]
