"""While an administrator pauses automation, the loops only observe. They command no agent and change nothing in AWS."""

from __future__ import annotations

import pytest

from control_plane.accounts.reasons import sentences
from control_plane.core.states import JobState
from control_plane.db import automation
from control_plane.db.automation import PauseRecord
from control_plane.loop.checkpoint_keeper import CheckpointKeeper
from control_plane.loop.orphan_keeper import OrphanKeeper
from tests.sim.world import World

WORDS = "ann paused all automatic actions: AWS has an incident"


def pause(world: World) -> None:
    with world.database.write() as session:
        reason = "AWS has an incident"
        assert automation.pause(session, PauseRecord(paused_at=world.now, paused_by="ann", reason=reason))


def resume(world: World) -> None:
    with world.database.write() as session:
        assert automation.resume(session)


def state_of_fleet(world: World) -> tuple[str, str]:
    fleet = next(iter(world.runner.observer.read_fleet_rows("main").fleets.values()))
    return fleet.state, sentences(fleet.reasons)


async def trains(world: World) -> None:
    world.submit()
    await world.running()
    await world.train(10)


async def test_a_lost_node_is_replaced_only_after_the_pause_also_after_a_restart(world: World) -> None:
    await trains(world)
    pause(world)
    calls, said, nodes = len(world.operator.calls), len(world.said), world.nodes()
    world.terminate(world.team()[1])
    for _ in range(20):
        await world.tick()
    world.start_server()
    for _ in range(60):
        await world.tick()
    job = world.job()
    assert (job.state, job.generation) == (JobState.RUNNING, 1)
    assert job.reason.startswith(f"{WORDS}: Everstep decides nothing; it observes: ")
    assert state_of_fleet(world) == ("frozen", f"frozen: {WORDS}")
    assert world.operator.calls[calls:] == []
    assert world.said[said:] == []
    assert {node.id: node.state for node in world.nodes().values()} == {node.id: node.state for node in nodes.values()}
    resume(world)
    await world.until(lambda: world.job().state == JobState.RUNNING and world.job().generation == 2)
    assert state_of_fleet(world)[0] == "active"


async def test_training_and_checkpoints_continue_during_a_pause(world: World) -> None:
    await trains(world)
    pause(world)
    await world.train(5)
    await world.upload(world.job().committed_step)
    assert (world.job().boundary, len(world.checkpoints())) == (15, 1)


async def test_a_queued_job_waits_for_the_end_of_the_pause(world: World) -> None:
    pause(world)
    world.submit()
    for _ in range(40):
        await world.tick()
    assert (world.job().state, world.job().reason) == (JobState.QUEUED, f"{WORDS}: Everstep decides nothing")
    resume(world)
    await world.running()


@pytest.mark.parametrize("read", ["read_fleet", "read_job"])
async def test_no_call_and_no_decision_of_a_pass_that_read_no_pause_leaves_after_it(world: World, read: str) -> None:
    """A pause of the automation stops a decision, even if it is stored after the decision's reads.

    The later transactions of the loop find the pause, so the loop neither calls AWS nor stores the decision.
    """
    await trains(world)
    calls = len(world.operator.calls)
    if read == "read_fleet":
        world.terminate(world.team()[1])
    else:
        world.kill_rank(world.team()[1])
    observer = world.runner.observer

    def pause_after(original):
        def reading(*arguments):
            found = original(*arguments)
            with world.database.read() as session:
                is_paused = automation.find(session) is not None
            if not is_paused:
                pause(world)
            return found

        return reading

    setattr(observer, read, pause_after(getattr(observer, read)))
    for _ in range(20):
        await world.tick()
    assert world.operator.calls[calls:] == []
    assert (world.job().state, world.job().generation) == (JobState.RUNNING, 1)


@pytest.mark.parametrize("keeper", [CheckpointKeeper, OrphanKeeper])
def test_no_keeper_reads_or_deletes_objects_during_a_pause(world: World, keeper) -> None:
    pause(world)
    # The keeper has no object store, so any access would raise an error.
    assert not keeper(world.database, None, lambda: world.now).delete_due()
