"""Runs drills with the real loops. Each drill injects its fault once, and no node is blamed for it.

The incident of a drill has the cause `drill`.
"""

from __future__ import annotations

from datetime import timedelta

import pytest

from control_plane.core.states import JobState, NodeState
from control_plane.db import drills, implications
from control_plane.db.drills import DrillRecord, NewDrill
from everstep.protocol.agent_messages import KillForDrill
from everstep.protocol.ids import NodeId
from tests.sim.world import FLEET, World, evidence_of


def ask(world: World, kind: str, node_id: NodeId, rank: int | None = None) -> DrillRecord:
    job = world.job()
    new = NewDrill(
        run_id=job.run_id,
        job_name=job.name,
        fleet_name=FLEET,
        project="",
        kind=kind,
        node_id=node_id,
        rank=rank,
        requested_by="ann",
        requested_at=world.now,
        state="requested",
    )
    with world.database.write() as session:
        return drills.create(session, new)


def drill(world: World) -> DrillRecord:
    with world.database.read() as session:
        (found,) = drills.page(session, job_name="gpt", project=None, after=None, limit=10)
    return found


async def trains(world: World) -> NodeId:
    world.submit()
    await world.running()
    await world.train(10)
    return world.team()[1].node_id


async def again(world: World) -> None:
    await world.until(lambda: world.job().state == JobState.RUNNING and world.job().generation == 2)
    for _ in range(3):
        await world.train(1)


def kills(world: World) -> list[tuple[NodeId, KillForDrill]]:
    return [(node_id, message) for node_id, message in world.said if isinstance(message, KillForDrill)]


async def test_a_killed_rank_is_an_incident_of_the_drill_and_nobodys_failure(world: World) -> None:
    node_id = await trains(world)
    asked = ask(world, "kill-rank", node_id, 1)
    await again(world)
    (incident,) = world.incidents()
    assert incident.cause == "drill"
    assert any(
        f"a drill ({asked.id}): ann requested kill-rank on rank 1 on {node_id}" in words
        for words in evidence_of(incident)
    )
    # The evidence also names the observed fault.
    assert any("rank 1 on" in words and "signal 9" in words for words in evidence_of(incident))
    assert world.job().failures == ()
    assert world.failures() == (0, 0, 0)
    assert len(kills(world)) == 1
    ended = drill(world)
    assert (ended.state, ended.incident_id, ended.generation) == ("recovered", incident.id, 1)
    with world.database.read() as session:
        assert implications.of_node(session, node_id) == ()


async def test_an_ended_instance_is_replaced_and_the_drill_is_told_as_the_cause(world: World) -> None:
    node_id = await trains(world)
    ask(world, "terminate-instance", node_id)
    await again(world)
    assert ("strike_member", "group", node_id) in world.operator.calls
    (incident,) = world.incidents()
    assert (incident.cause, incident.instance_ids) == ("drill", (node_id,))
    assert world.failures() == (0, 0, 0)
    assert world.nodes()[node_id].state == NodeState.GONE
    assert drill(world).state == "recovered"


async def test_an_agent_that_comes_back_in_time_is_absorbed(world: World) -> None:
    node_id = await trains(world)
    ask(world, "kill-agent", node_id)
    for _ in range(10):
        await world.train(1)
    assert [(who, message.rank) for who, message in kills(world)] == [(node_id, None)]
    assert drill(world).state == "struck"
    while drill(world).state != "absorbed":
        await world.train(1)
    assert (world.job().generation, world.incidents()) == (1, ())


async def test_a_drill_does_not_strike_a_job_that_recovers(world: World) -> None:
    node_id = await trains(world)
    world.kill_rank(world.team()[2])
    await world.until(lambda: world.job().state == JobState.PREPARING)
    ask(world, "kill-rank", node_id, 1)
    await world.until(lambda: world.job().state == JobState.RUNNING and world.job().generation == 2)
    await world.tick()
    assert kills(world) == []  # the drill waits, because the incident is still open
    for _ in range(3):
        await world.train(1)
    await world.until(lambda: len(kills(world)) == 1)


async def test_a_drill_that_cannot_strike_in_time_is_not_done(world: World) -> None:
    node_id = await trains(world)
    ask(world, "kill-rank", NodeId("i-gone"), 1)
    await world.until(lambda: drill(world).state == "not_done")
    assert kills(world) == []
    ask(world, "kill-rank", node_id, 1)  # the service accepts the next drill when the first has ended


async def test_a_server_that_dies_before_it_strikes_never_strikes(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    node_id = await trains(world)

    class Death(Exception):
        pass

    def die(*_: object) -> None:
        raise Death

    monkeypatch.setattr(world.runner.executor, "strike", die)
    ask(world, "kill-rank", node_id, 1)
    await world.tick()
    world.start_server()
    for _ in range(20):
        await world.train(1)
    assert (drill(world).state, kills(world)) == ("struck", [])
    assert world.incidents() == ()


async def test_a_rank_that_ends_for_want_of_the_struck_one_and_is_heard_first_is_nobodys_failure(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    node_id = await trains(world)
    struck, other = world.agents[node_id], world.team()[2]
    asked = ask(world, "kill-rank", node_id, 1)
    with monkeypatch.context() as silent:
        silent.setattr(struck, "report", lambda *_: None)
        await world.until(lambda: bool(struck.exits))
        world.now += timedelta(milliseconds=10)
        world.kill_rank(other)
        await world.runner.job_loop.sweep()
        await world.runner.job_loop.idle()
        (incident,) = world.incidents()
        assert (incident.cause, len(world.job().failures)) == ("rank_exit", 1), (
            "nobody knows yet that the drill's rank has ended"
        )
    struck.report()
    await again(world)
    (incident,) = world.incidents()
    assert incident.cause == "drill"
    assert sum("signal 9" in words for words in evidence_of(incident)) == 2
    assert any(f"a drill ({asked.id})" in words for words in evidence_of(incident))
    assert world.job().failures == ()
    assert world.failures() == (0, 0, 0)
    assert drill(world).state == "recovered"


async def test_another_failure_meanwhile_is_not_the_drills(world: World) -> None:
    node_id = await trains(world)
    ask(world, "kill-agent", node_id)
    await world.tick()
    world.kill_rank(world.team()[3])
    await world.until(lambda: world.job().state == JobState.PREPARING)
    assert len(world.job().failures) == 1
    await again(world)
    (incident,) = world.incidents()
    assert incident.cause == "rank_exit"


async def test_a_node_that_fails_by_itself_while_a_drill_is_recovered_from_is_a_failure(world: World) -> None:
    node_id = await trains(world)
    other = world.team()[3]  # this node and the target of the drill hold no shard in common
    asked = ask(world, "terminate-instance", node_id)
    await world.until(lambda: world.job().state == JobState.PREPARING)
    world.terminate(other)
    await again(world)
    (incident,) = world.incidents()
    assert incident.cause == "instance_terminated"
    assert set(incident.instance_ids) == {node_id, other.node_id}
    assert any(asked.id in words for words in evidence_of(incident))
    assert world.failures() == (1, 1, 1), "one node failed; the other was struck"
    assert (drill(world).state, drill(world).incident_id) == ("recovered", incident.id)


async def test_a_rank_that_fails_in_the_launch_after_a_drill_is_a_failure(world: World) -> None:
    node_id = await trains(world)
    ask(world, "kill-rank", node_id, 1)
    await world.until(lambda: world.job().state == JobState.RUNNING and world.job().generation == 2)
    world.kill_rank(world.team()[2])
    await world.until(lambda: world.job().state == JobState.RUNNING and world.job().generation == 3)
    assert len(world.job().failures) == 1, "the breakers remember it, and not the drill's"
    for _ in range(3):
        await world.train(1)
    (incident,) = world.incidents()
    assert incident.cause == "rank_exit"
    assert world.failures() == (1, 1, 0)
    assert (drill(world).state, drill(world).incident_id) == ("recovered", incident.id)
