"""People send requests while a job trains.

A job releases nodes on request without losing a step. The control plane makes no recovery decisions for a job that a
person has taken over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from sqlalchemy import update

from control_plane.accounts.reasons import sentence
from control_plane.cloud.errors import Throttled
from control_plane.core.actions import GroupAction, RebootMember
from control_plane.core.observed.facts import NodeRequest, Requested
from control_plane.core.states import JobState, NodeState
from control_plane.db import events, jobs, nodes
from control_plane.db.leases import Lease
from control_plane.db.models import FleetRow
from control_plane.loop import records
from everstep.protocol.agent_messages import HaltRanks, NodeFault, StopTraining
from everstep.protocol.ids import Generation, NodeId
from tests.sim.world import World, evidence_of


def ask(world: World, request: NodeRequest, node_id: NodeId) -> None:
    with world.database.write() as session:
        assert nodes.ask(session, node_id, Requested(request=request, node_id=node_id, by="ann", note="a new kernel"))


async def trains(world: World) -> NodeId:
    world.submit()
    await world.running()
    await world.train(10)
    return world.team()[1].node_id


async def left(world: World) -> None:
    """End all ranks at their agreed stop, and run the loops until the job trains in generation 2."""
    await world.until(lambda: world.is_stopped)
    world.finish()
    await world.until(lambda: world.job().state == JobState.RUNNING and world.job().generation == 2)


async def test_a_drained_node_is_left_at_an_agreed_stop_and_held(world: World) -> None:
    node_id = await trains(world)
    ask(world, NodeRequest.DRAIN, node_id)
    await left(world)
    await world.until(lambda: world.nodes()[node_id].state == NodeState.HELD)
    node = world.nodes()[node_id]
    assert (node.hold, node.request, node.reason) == (
        "person",
        None,
        Requested(request=NodeRequest.DRAIN, node_id=node_id, by="ann", note="a new kernel"),
    )
    assert world.plan().base_step == world.job().max_boundary == 10
    await world.train(1)
    await world.train(1)
    (incident,) = world.incidents()
    assert (incident.cause, incident.lost_steps, evidence_of(incident)) == ("requested", 0, (sentence(node.reason),))
    assert world.failures() == (1, 0, 0)
    assert world.job().failures == ()
    await world.tick(600)
    assert world.nodes()[node_id].state == NodeState.HELD
    assert node_id in {member.instance_id for member in world.operator.describe_group("group").members}


async def test_what_befalls_a_node_is_told_to_the_people_of_the_job_that_has_it(world: World) -> None:
    with world.database.write() as session:
        session.execute(update(FleetRow).values(project="default"))
    world.submit("merger", project="finance")
    await world.running("merger")
    await world.train(10, "merger")
    agent = world.team("merger")[1]
    world.terminate(agent)
    await world.until(lambda: world.job("merger").generation == 2 and world.job("merger").state == JobState.RUNNING)
    with world.database.read() as session:
        told = {
            project: events.page(session, events.EventFilter(project=project), limit=1_000)
            for project in ("default", "finance")
        }
    assert not [event.message for event in told["default"] if "merger" in event.message or event.node_id is not None]
    of_nodes = [(event.node_id, event.message) for event in told["finance"] if event.type == "NodeStateChanged"]
    assert len([message for _, message in of_nodes if message == "spare → assigned: works for merger"]) == 5
    assert any(node_id == agent.node_id and message.startswith("assigned → ") for node_id, message in of_nodes)


async def test_a_replaced_node_is_left_and_then_ended_and_another_one_comes(world: World) -> None:
    node_id = await trains(world)
    world.wish(hold_failed_instances=True)  # this setting has no effect, because it applies only to failed nodes
    ask(world, NodeRequest.REPLACE, node_id)
    await left(world)
    await world.until(lambda: world.nodes()[node_id].state == NodeState.GONE)
    assert [call for call in world.operator.calls if call[0] == "terminate_member"] == [
        ("terminate_member", node_id, True)
    ]
    await world.until(lambda: sum(node.state == NodeState.SPARE for node in world.nodes().values()) == 1)
    assert world.incidents()[0].cause == "requested"


async def test_a_rebooted_node_is_left_and_works_again(world: World) -> None:
    node_id = await trains(world)
    ask(world, NodeRequest.REBOOT, node_id)
    await left(world)
    await world.until(lambda: ("reboot_member", "group", node_id) in world.operator.calls)
    await world.until(lambda: world.nodes()[node_id].state == NodeState.SPARE)
    assert world.nodes()[node_id].request is None


async def test_a_reboot_that_was_decided_upon_before_the_server_died_is_made_by_the_next_one(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await trains(world)
    spare = world.spare().node_id
    asked: list[GroupAction] = []

    def dies(_lease: Lease, actions: Sequence[GroupAction], _changed: Callable[[], None]) -> None:
        asked.extend(actions)

    monkeypatch.setattr(world.runner.executor, "change_group", dies)
    ask(world, NodeRequest.REBOOT, spare)
    await world.until(lambda: any(isinstance(action, RebootMember) for action in asked))
    world.start_server()
    rebooted = ("reboot_member", "group", spare)
    await world.until(lambda: rebooted in world.operator.calls or world.nodes()[spare].state != NodeState.REBOOTING)
    assert (rebooted in world.operator.calls, world.nodes()[spare].state) == (True, NodeState.REBOOTING)
    await world.until(lambda: world.nodes()[spare].state == NodeState.SPARE)
    assert world.operator.calls.count(rebooted) == 1


async def test_a_reboot_that_ec2_throttles_is_asked_for_again_by_the_next_server_too(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await trains(world)
    spare, reboot, failures = (
        world.spare().node_id,
        world.operator.reboot_member,
        [Throttled("RequestLimitExceeded")] * 2,
    )

    def throttled(group: str, node_id: NodeId) -> None:
        if failures:
            raise failures.pop()
        reboot(group, node_id)

    monkeypatch.setattr(world.operator, "reboot_member", throttled)
    ask(world, NodeRequest.REBOOT, spare)
    await world.until(lambda: len(failures) == 1)
    world.start_server()
    await world.until(lambda: world.nodes()[spare].state == NodeState.SPARE)
    assert not failures
    assert world.operator.calls.count(("reboot_member", "group", spare)) == 1


async def test_without_another_node_the_job_trains_on_and_the_request_waits(tmp_path) -> None:
    world = World(tmp_path, spares=0, max_size=4)
    try:
        node_id = await trains(world)
        ask(world, NodeRequest.DRAIN, node_id)
        for _ in range(20):
            await world.train(1)
        assert not any(isinstance(message, StopTraining) for _, message in world.said)
        assert world.job().state == JobState.RUNNING
        assert "a user requested to drain" in world.job().reason
        assert world.nodes()[node_id].request.request is NodeRequest.DRAIN
    finally:
        world.close()


@pytest.mark.parametrize(
    ("wanted", "state"), [("hold", NodeState.HELD), ("drain", NodeState.HELD), ("replace", NodeState.GONE)]
)
async def test_an_idle_node_waits_for_nobody(world: World, wanted: str, state: NodeState) -> None:
    await trains(world)
    spare = world.spare().node_id
    ask(world, NodeRequest(wanted), spare)
    await world.until(lambda: world.nodes()[spare].state == state)
    assert not world.is_stopped


async def test_what_is_asked_of_a_spare_keeps_it_from_jobs(world: World) -> None:
    await trains(world)
    spare = world.spare().node_id
    ask(world, NodeRequest.HOLD, spare)
    world.terminate(world.team()[1])
    await world.until(lambda: world.job().state == JobState.RUNNING and world.job().generation == 2)
    assert spare not in {node.node_id for node in world.plan().nodes}


async def test_a_request_that_is_called_off_in_time_changes_nothing(world: World) -> None:
    node_id = await trains(world)
    spare = world.spare()
    spare.is_deaf = True  # The spare is disconnected, so no node can replace the requested one.
    spare.disconnect()
    ask(world, NodeRequest.DRAIN, node_id)
    await world.train(1)
    with world.database.write() as session:
        assert nodes.call_off(session, node_id)
    spare.is_deaf = False
    for _ in range(10):
        await world.train(1)
    assert (world.job().generation, world.is_stopped) == (1, False)


async def test_a_request_that_comes_during_a_pass_is_not_lost(world: World) -> None:
    """A decision of the fleet loop that assigns a node does not overwrite a new request about this node.

    The test stores the request after the loop has read the node's row.
    """
    world.submit()
    await world.until(lambda: len(world.agents) == 5)
    spare = world.spare().node_id
    ask(world, NodeRequest.HOLD, spare)
    core = records.node_record(world.nodes()[spare])
    columns = records.node_update(
        replace(core, request=None, state=NodeState.ASSIGNED), before="spare", had_request=False
    )
    assert "request" not in columns
    assert records.node_update(replace(core, request=None), before="spare", had_request=True)["request"] is None


# Takeovers: jobs that a person controls instead of Everstep


def take_over(world: World) -> None:
    with world.database.write() as session:
        assert jobs.take_over(session, jobs.get(session, "gpt").run_id, "ann", world.now)


def hand_back(world: World) -> None:
    with world.database.write() as session:
        assert jobs.hand_back(session, jobs.get(session, "gpt").run_id)


async def test_a_job_that_is_taken_over_is_observed_and_nothing_is_decided_until_it_is_handed_back(
    world: World,
) -> None:
    await trains(world)
    take_over(world)
    await world.train(5)
    world.kill_rank(world.team()[1])
    said = len(world.said)
    for _ in range(20):
        await world.tick()
    job = world.job()
    assert (job.state, job.generation, job.boundary) == (JobState.RUNNING, 1, 15)
    assert job.reason.startswith("taken over by ann: Everstep decides nothing; it observes: rank 1 on")
    assert world.said[said:] == []
    assert world.incidents() == ()
    hand_back(world)
    await world.until(lambda: world.job().state == JobState.RUNNING and world.job().generation == 2)
    assert world.incidents()[0].cause == "rank_exit"


async def test_what_aws_ends_is_recorded_and_no_other_node_is_given(world: World) -> None:
    lost = await trains(world)
    take_over(world)
    world.terminate(world.agents[lost])
    await world.until(lambda: world.nodes()[lost].state == NodeState.GONE)
    for _ in range(20):
        await world.tick()
    run = world.job().run_id
    assert sum(node.run_id == run for node in world.nodes().values()) == 3
    assert world.job().generation == 1
    hand_back(world)
    await world.until(lambda: world.job().state == JobState.RUNNING and world.job().generation == 2)


async def test_a_stop_waits_until_the_job_is_handed_back(world: World) -> None:
    await trains(world)
    take_over(world)
    with world.database.write() as session:
        jobs.request_stop(session, jobs.get(session, "gpt").run_id, world.now)
    for _ in range(5):
        await world.train(1)
    assert not world.is_stopped
    hand_back(world)
    await world.until(lambda: world.is_stopped)


async def test_a_fault_of_a_node_moves_nobody_while_a_person_looks_after_the_job(world: World) -> None:
    node_id = await trains(world)
    take_over(world)
    world.agents[node_id].node_faults = (NodeFault(code="gpu_lost", message="GPU 3", is_permanent=False),)
    for _ in range(5):
        await world.train(1)
    assert not world.is_stopped
    assert f"{node_id} is impaired" in world.job().reason


async def test_ranks_of_a_generation_that_has_ended_are_halted_all_the_same(world: World) -> None:
    """A person has taken a job over from Everstep.

    The control plane still halts ranks of the job's ended generations.
    """
    node_id = await trains(world)
    world.agents[node_id].is_deaf = True
    world.agents[node_id].disconnect()
    world.cut.add(node_id)
    await world.until(lambda: world.job().state == JobState.PREPARING)
    take_over(world)
    world.agents[node_id].is_deaf = False
    world.cut.clear()
    world.said.clear()
    await world.until(lambda: any(node == node_id and isinstance(message, HaltRanks) for node, message in world.said))
    assert {type(message) for _, message in world.said} == {HaltRanks}
    assert {message.generation for _, message in world.said if isinstance(message, HaltRanks)} == {Generation(1)}
