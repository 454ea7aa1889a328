"""Tests jobs that continue on fewer nodes, and grow again when nodes arrive."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from control_plane.core import accounting
from control_plane.core.observed.facts import NodeRequest, Requested
from control_plane.core.observed.spans import Bucket
from control_plane.core.states import JobState, NodeState
from control_plane.db import implications, jobs, nodes, revisions
from control_plane.db.revisions import Change
from everstep.protocol.ids import NodeId
from tests.sim.world import FLEET, World, evidence_of


async def small(world: World, *, nodes: int = 4, least: int = 2, **changes: object) -> None:
    """Start a job, terminate one of its nodes while AWS has no replacement, and train on the remaining nodes."""
    world.operator.capacity = nodes
    world.submit(nodes=nodes, min_node_count=least, patience_seconds=10, **changes)
    await world.running()
    await world.train(10)
    lose(world, 1)
    await world.until(lambda: world.job().generation == 2 and world.job().state == JobState.RUNNING)
    assert len(world.plan().nodes) == nodes - 1


def lose(world: World, place: int) -> None:
    """Terminate a node of the job while AWS has no instance to replace it."""
    agent = world.team()[place]
    world.operator.capacity = len([each for each in world.agents if each != agent.node_id])
    world.terminate(agent)


async def asked_to_stop(world: World) -> None:
    """Train until the control plane requests an agreed stop, with which it begins to grow the job."""
    world.is_stopped = False
    for _ in range(120):
        await world.train(1)
        if world.is_stopped:
            return
    raise AssertionError(world.job().reason)


async def test_a_plan_says_whether_the_number_of_nodes_may_change(world: World) -> None:
    world.submit(nodes=4, min_node_count=2)
    await world.running()
    assert world.plan().is_elastic


async def test_a_plan_of_a_fixed_number_of_nodes_is_not_elastic(world: World) -> None:
    world.submit(nodes=2, min_node_count=2, max_node_count=2)
    await world.running()
    assert not world.plan().is_elastic


async def test_a_small_job_grows_once_at_an_agreed_stop(world: World) -> None:
    await small(world, nodes=4)
    lose(world, 1)
    await world.until(lambda: world.job().generation == 3 and world.job().state == JobState.RUNNING)
    await world.train(1)
    assert world.job().reason.startswith("trains on 2 of 4 nodes from step ")
    world.operator.capacity = None
    await asked_to_stop(world)
    world.finish()
    await world.until(lambda: world.job().generation == 4 and world.job().state == JobState.RUNNING)
    assert len(world.plan().nodes) == 4, "one stop for both nodes"
    grown = world.incidents()[-1]
    assert (grown.cause, grown.node_count_before, grown.node_count_after) == ("grown", 2, 4)
    assert world.failures() == (2, 1, 2), "growth is no failure"


async def test_a_shrunk_job_has_an_incident_of_its_own_kind_and_counts_by_its_throughput(world: World) -> None:
    await small(world, nodes=4)
    shrunk = world.incidents()[-1]
    assert (shrunk.cause, shrunk.node_count_before, shrunk.node_count_after) == ("shrunk", 4, 3)
    assert "no node came within 10 s" in evidence_of(shrunk)
    await world.train(1)
    before = dict(world.job().accounting)
    for _ in range(40):
        await world.train(1)
    spent = {name: world.job().accounting[name] - before.get(name, 0) for name in ("train", "shortage")}
    assert spent["train"] == pytest.approx(3 * spent["shortage"], rel=0.01)
    assert accounting.ettr_ratio(world.job().accounting) is not None


async def test_a_job_waits_below_its_fewest_nodes(world: World) -> None:
    await small(world, nodes=3)
    lose(world, 1)
    for _ in range(60):
        await world.tick()
    assert (world.job().state, world.job().generation) == (JobState.PREPARING, 2)
    assert "needs at least 2 nodes to continue" in world.job().reason
    world.operator.capacity = None
    await world.until(lambda: world.job().generation == 3 and world.job().state == JobState.RUNNING)


async def test_capacity_that_returns_before_the_smaller_plan_is_used(world: World) -> None:
    world.operator.capacity = 4
    world.submit(min_node_count=2, patience_seconds=10)
    await world.running()
    await world.train(10)
    world.terminate(world.team()[1])
    await world.until(lambda: world.job().generation == 2 and world.job().state == JobState.RUNNING)
    assert len(world.plan().nodes) == 4
    assert world.incidents()[-1].cause == "instance_terminated"


async def test_a_stop_that_is_requested_while_the_job_waits_or_is_small_ends_it(world: World) -> None:
    await small(world, nodes=4)
    lose(world, 1)
    await world.until(lambda: world.job().state == JobState.PREPARING)
    with world.database.write() as session:
        jobs.request_stop(session, jobs.get(session, "gpt").run_id, world.now)
    await world.until(lambda: world.job().state == JobState.STOPPING)
    assert len(world.plan().nodes) == 2, "it trained on so that no step is lost"
    world.finish()
    await world.upload(11)
    await world.until(lambda: world.job().state == JobState.STOPPED)


async def test_a_small_job_pauses_and_resumes_on_all_its_nodes(world: World) -> None:
    await small(world, nodes=4)
    await world.train(5)
    with world.database.write() as session:
        jobs.request_pause(session, jobs.get(session, "gpt").run_id, world.now)
    await world.until(lambda: world.job().state == JobState.PAUSING)
    boundary = world.job().boundary
    world.finish()
    await world.upload(boundary)
    await world.until(lambda: world.job().state == JobState.QUEUED)
    world.operator.capacity = None
    with world.database.write() as session:
        jobs.withdraw_pause(session, jobs.get(session, "gpt").run_id, world.now)
    await world.until(lambda: world.job().generation == 3 and world.job().state == JobState.RUNNING)
    assert len(world.plan().nodes) == 4
    assert world.job().memo["missing_count"] == 0


async def test_a_node_that_is_lost_during_the_growth_is_an_ordinary_recovery(world: World) -> None:
    await small(world, nodes=4)
    world.operator.capacity = None
    await asked_to_stop(world)
    world.operator.end_instance(world.team()[1].node_id)
    await world.until(lambda: world.job().generation == 3 and world.job().state == JobState.RUNNING)
    assert len(world.plan().nodes) == 4, "a recovery uses all nodes that are there"
    assert world.incidents()[-1].cause == "instance_terminated"


async def test_a_user_who_stops_the_job_during_the_growth_is_obeyed(world: World) -> None:
    await small(world, nodes=4)
    world.operator.capacity = None
    await asked_to_stop(world)
    with world.database.write() as session:
        jobs.request_stop(session, jobs.get(session, "gpt").run_id, world.now)
    boundary = world.job().boundary
    world.finish()
    await world.upload(boundary)
    await world.until(lambda: world.job().state == JobState.STOPPED)
    assert world.job().generation == 2


async def test_a_script_that_ends_during_the_growth_completes_the_job(world: World) -> None:
    await small(world, nodes=4)
    world.operator.capacity = None
    await asked_to_stop(world)
    for agent in world.team():
        agent.is_told_to_stop = False  # simulate that the script ended before the stop request arrived
    world.finish()
    await world.until(lambda: world.job().state == JobState.COMPLETED)


async def test_a_restarted_control_plane_completes_the_growth(world: World) -> None:
    await small(world, nodes=4)
    world.operator.capacity = None
    await asked_to_stop(world)
    world.start_server()
    world.finish()
    await world.until(lambda: world.job().generation == 3 and world.job().state == JobState.RUNNING)
    assert len(world.plan().nodes) == 4


async def test_a_job_grows_beyond_its_first_number_of_nodes_while_nobody_waits(world: World) -> None:
    world.submit(nodes=3, max_node_count=5, patience_seconds=10)
    await world.running()
    assert 3 <= len(world.plan().nodes) < 5
    await asked_to_stop(world)
    world.finish()
    await world.until(lambda: world.job().generation == 2 and world.job().state == JobState.RUNNING)
    assert len(world.plan().nodes) == 5
    assert Bucket.SHORTAGE not in world.job().accounting
    for _ in range(40):
        await world.train(1)
    assert world.job().generation == 2, "it grows no further"


async def test_a_job_without_limits_of_its_own_neither_shrinks_nor_grows(world: World) -> None:
    world.operator.capacity = 4
    world.submit(nodes=4, patience_seconds=0)
    await world.running()
    await world.train(3)
    lose(world, 1)
    for _ in range(60):
        await world.tick()
    assert world.job().state == JobState.PREPARING
    assert "continue" not in world.job().reason


@pytest.fixture
def full(tmp_path: Path) -> Iterator[World]:
    """Yield a simulated cluster whose fleet cannot grow beyond six nodes."""
    world = World(tmp_path, nodes=6, spares=0, max_size=6)
    yield world
    world.close()


async def returned(world: World, name: str = "gpt") -> None:
    """Train until the control plane requests the stop at which the job returns nodes.

    Then end the ranks, and wait for the next generation.
    """
    generation = world.job(name).generation
    world.is_stopped = False
    for _ in range(60):
        await world.train(1, name)
        if world.is_stopped:
            break
    world.finish(name)
    await world.until(lambda: world.job(name).generation == generation + 1 and world.job(name).state == "running")


async def test_a_job_resumes_with_fewer_nodes_after_its_patience(world: World) -> None:
    await small(world, nodes=4)
    await world.train(5)
    with world.database.write() as session:
        jobs.request_pause(session, jobs.get(session, "gpt").run_id, world.now)
    await world.until(lambda: world.job().state == JobState.PAUSING)
    boundary = world.job().boundary
    world.finish()
    await world.upload(boundary)
    await world.until(lambda: world.job().state == JobState.QUEUED)
    for _ in range(60):
        await world.tick()
    with world.database.write() as session:
        jobs.withdraw_pause(session, jobs.get(session, "gpt").run_id, world.now)
    resumed_at = world.now
    await world.until(lambda: world.job().generation == 3 and world.job().state == JobState.RUNNING)
    assert (world.now - resumed_at).total_seconds() >= 10, "the time of the pause is no patience"
    assert world.job().memo["missing_count"] == 1, "training counts by its throughput"
    assert len(world.plan().nodes) == 3
    await world.train(1)
    assert world.job().reason.startswith("trains on 3 of 4 nodes from step ")


async def test_a_queued_job_starts_with_the_free_nodes_and_claims_the_others(full: World) -> None:
    full.submit("first", nodes=4)
    await full.running("first")
    full.submit("small", nodes=4, min_node_count=2, patience_seconds=10)
    await full.tick()
    assert full.job("small").reason == (
        "place 1 of 1 in the queue: needs 4 nodes (or 2 after its patience); jobs use 4 of at most 6 nodes"
    )
    await full.until(lambda: full.job("small").state == JobState.RUNNING)
    assert len(full.plan("small").nodes) == 2
    full.submit("later", nodes=2)
    await full.train(3, "small")
    full.finish("first")
    await full.until(lambda: full.job("later").state == JobState.RUNNING, limit=1000)
    assert len(full.plan("later").nodes) == 2, "the older job claims 4 of the 6 nodes, and 2 remain"
    assert sum(node.run_id == full.job("small").run_id for node in full.nodes().values()) == 4


async def test_a_job_returns_nodes_beyond_its_first_number_to_a_job_that_waits(full: World) -> None:
    full.submit("grown", nodes=3, max_node_count=6, patience_seconds=0)
    await full.running("grown")
    if len(full.plan("grown").nodes) < 6:
        await returned(full, "grown")
    assert len(full.plan("grown").nodes) == 6
    generation = full.job("grown").generation
    await full.train(3, "grown")
    full.submit("waits", nodes=2)
    await returned(full, "grown")
    assert len(full.plan("grown").nodes) == 4, "the other job needs 2 nodes, so the job keeps 4"
    assert full.plan("grown").base_step == full.incidents("grown")[-1].reached_step
    incident = full.incidents("grown")[-1]
    assert (incident.cause, incident.node_count_before, incident.node_count_after) == ("returned", 6, 4)
    assert "continues on 4 of 6 nodes: it returned nodes" in " ".join(full.events())
    assert full.job("grown").generation == generation + 1
    await full.until(lambda: full.job("waits").state == JobState.RUNNING)
    for _ in range(20):
        await full.train(1, "grown")
    assert full.job("grown").generation == generation + 1, "it grows no further, because no node is free"
    with full.database.read() as session:
        assert not implications.of_fleet(session, FLEET), "a returned node has no fault in its history"


async def test_a_preemptible_job_shrinks_to_its_minimum_for_a_higher_priority(full: World) -> None:
    full.submit("low", nodes=6, min_node_count=3, preemptible=True, patience_seconds=0)
    await full.running("low")
    await full.train(5, "low")
    full.submit("high", nodes=3, priority=5)
    await returned(full, "low")
    assert len(full.plan("low").nodes) == 3
    assert full.incidents("low")[-1].cause == "returned"
    await full.until(lambda: full.job("high").state == JobState.RUNNING)
    assert full.job("low").state == JobState.RUNNING, "it need not pause"
    await full.train(2, "low")
    full.finish("high")
    await full.until(lambda: full.job("high").state == JobState.COMPLETED)
    await returned(full, "low")
    assert len(full.plan("low").nodes) == 6, "it grows back"


async def test_a_job_returns_the_nodes_in_a_recovery_that_comes_first(full: World) -> None:
    full.submit("low", nodes=6, min_node_count=3, preemptible=True, patience_seconds=0)
    await full.running("low")
    await full.train(5, "low")
    full.submit("high", nodes=3, priority=5)
    full.is_stopped = False
    await full.until(lambda: full.is_stopped)
    full.kill_rank(full.team("low")[0])
    await full.until(lambda: full.job("low").generation == 2 and full.job("low").state == JobState.RUNNING)
    assert len(full.plan("low").nodes) == 3
    assert full.plan("low").base_step == 5
    await full.until(lambda: full.job("high").state == JobState.RUNNING)


async def test_a_job_whose_training_stands_still_returns_its_nodes_in_the_recovery(full: World) -> None:
    full.submit("low", nodes=6, min_node_count=3, preemptible=True, patience_seconds=0)
    await full.running("low")
    await full.train(5, "low")
    full.submit("high", nodes=3, priority=5)
    for agent in full.team("low"):
        agent.cpu_share = 1.0  # the ranks use the CPU, so their stacks do not prove a hang
    await full.until(lambda: full.job("low").generation == 2 and full.job("low").state == JobState.RUNNING, limit=2000)
    assert len(full.plan("low").nodes) == 3
    assert full.plan("low").base_step == 5
    await full.until(lambda: full.job("high").state == JobState.RUNNING)


async def test_a_restarted_control_plane_completes_the_return(full: World) -> None:
    full.submit("low", nodes=6, min_node_count=3, preemptible=True, patience_seconds=0)
    await full.running("low")
    await full.train(5, "low")
    full.submit("high", nodes=3, priority=5)
    full.is_stopped = False
    await full.until(lambda: full.is_stopped)
    full.start_server()
    full.finish("low")
    await full.until(lambda: full.job("low").generation == 2)
    full.start_server()
    await full.until(lambda: full.job("low").state == JobState.RUNNING)
    assert len(full.plan("low").nodes) == 3
    assert full.plan("low").base_step == full.incidents("low")[-1].reached_step
    await full.until(lambda: full.job("high").state == JobState.RUNNING)


async def grown_to_six(full: World) -> None:
    full.submit("grown", nodes=3, max_node_count=6, patience_seconds=0)
    await full.running("grown")
    if len(full.plan("grown").nodes) < 6:
        await returned(full, "grown")
    assert len(full.plan("grown").nodes) == 6
    await full.train(3, "grown")


def drain(full: World, node_id: NodeId) -> None:
    with full.database.write() as session:
        assert nodes.ask(session, node_id, Requested(request=NodeRequest.DRAIN, node_id=node_id, by="ann"))


async def test_a_job_returns_no_node_that_the_waiting_job_cannot_use(full: World) -> None:
    await grown_to_six(full)
    drained = full.plan("grown").nodes[5].node_id
    drain(full, drained)
    full.submit("waits", nodes=2)
    await returned(full, "grown")
    assert drained in {node.node_id for node in full.plan("grown").nodes}
    await full.until(lambda: full.job("waits").state == JobState.RUNNING)
    assert len(full.plan("grown").nodes) == 4, "one stop released enough nodes"


async def test_a_job_with_a_lower_limit_returns_the_node_that_a_person_drains(full: World) -> None:
    await grown_to_six(full)
    generation = full.job("grown").generation
    drained = full.plan("grown").nodes[1].node_id
    drain(full, drained)
    with full.database.write() as session:
        job = jobs.get(session, "grown")
        spec = replace(job.spec, max_node_count=5)
        change = Change(field="ElasticConfig.MaxNodeCount", before="6", after="5", needs_generation=False)
        revisions.revise(session, job, spec=spec, priority=0, tags={}, changes=(change,), now=full.now)
    await returned(full, "grown")
    assert drained not in {node.node_id for node in full.plan("grown").nodes}
    await full.until(lambda: full.nodes()[drained].state == NodeState.HELD)
    await full.train(3, "grown")
    assert full.job("grown").generation == generation + 1, "one stop for both"
