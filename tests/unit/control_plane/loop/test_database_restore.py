"""Restores a backup while the agents live on: no number and no key is used twice, and training resumes."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from sqlalchemy import update

from control_plane.core.states import JobState
from control_plane.db import backups, checks, events, jobs
from control_plane.db.models import JobRow
from control_plane.db.session import Database
from control_plane.db_commands import restore
from everstep.protocol.agent_messages import ExitClass, Load, MemberPhase, Prepare
from tests.sim.world import World


async def moved_on(world: World) -> None:
    """Fail a rank, and let the next generation train."""
    generation = world.job().generation
    world.kill_rank(world.team()[2])
    await world.until(lambda: world.job().state == JobState.RUNNING and world.job().generation > generation)
    await world.train(5)


def restore_at(world: World, file: Path, url: str) -> int:
    """Stop the server, restore the backup to another database, and start a server on it.

    Return the number above which new generations are numbered. The agents live on and reconnect.
    """
    world.close()
    world.now += timedelta(seconds=30)
    first, _ = restore(file, url, lambda: world.objects, world.now)
    world.database = Database(url)
    world.start_server()
    return first


def loads(world: World) -> dict[int, set[tuple[bytes, bytes]]]:
    """Return the nodes and the key of every plan that agents received, by generation.

    The key is the secret that all agents of the generation share. A generation has more than one entry if two plans
    have its number.
    """
    found: dict[int, set[tuple[bytes, bytes]]] = {}
    for _, message in world.said:
        if isinstance(message, Load):
            nodes = "/".join(node.node_id for node in message.plan.nodes)
            found.setdefault(message.plan.generation, set()).add((nodes.encode(), message.key))
    return found


async def test_agents_of_later_generations_resume_from_their_memory(
    world: World, tmp_path: Path, empty_database_url: str
) -> None:
    """Training resumes from the agents' memory, although the backup is two generations old.

    The restored database lacks generations 2 and 3. The manifest of a checkpoint in S3 lists both, so the control plane
    adds them again. It can then use the newest step of generation 3, which the agents still have in memory, as the
    base.
    """
    world.submit()
    await world.running()
    await world.train(5)
    backups.back_up(world.database, tmp_path / "backup")
    with world.database.read() as session:
        seen = events.newest_id(session)
    await moved_on(world)
    await moved_on(world)
    await world.upload(15)
    await world.train(5)
    assert world.job().generation == 3
    assert [(each.generation, each.step) for each in world.checkpoints()] == [(3, 15)]
    before = loads(world)

    first = restore_at(world, tmp_path / "backup", empty_database_url)
    assert world.job().generation == 1
    assert [(each.generation, each.step) for each in world.checkpoints()] == [(3, 15)]
    await world.until(lambda: world.job().state == JobState.RUNNING and world.job().generation > first)
    assert world.plan().parent == 3
    assert world.plan().base_step == 20
    await world.train(5)

    after = loads(world)
    assert all(len(each) == 1 for each in after.values()), "a generation number was used twice"
    keys = [key for each in after.values() for _, key in each]
    assert len(set(keys)) == len(keys) == len(before) + 1, "a key was used twice"
    promised = [message.generation for _, message in world.said if isinstance(message, Prepare)]
    assert promised == sorted(promised), "an agent was asked for a lower generation"
    with world.database.read() as session:
        later = events.newest_id(session)
    assert later > seen + 1_000_000, "events after the restore could have the ids of lost events"
    assert checks.check(world.database) == ()


async def test_ranks_of_the_generation_in_the_backup_train_on(
    world: World, tmp_path: Path, empty_database_url: str
) -> None:
    world.submit()
    await world.running()
    await world.train(5)
    backups.back_up(world.database, tmp_path / "backup")
    await world.train(5)
    first = restore_at(world, tmp_path / "backup", empty_database_url)
    for _ in range(20):
        await world.tick()
    await world.train(5)
    assert {agent.phase for agent in world.team()} == {MemberPhase.RUNNING}
    assert (world.job().generation, world.job().committed_step) == (1, 14)
    await moved_on(world)
    assert world.job().generation == first + 1
    assert world.plan().base_step >= 14


async def test_a_person_who_has_taken_over_a_job_keeps_its_ranks(
    world: World, tmp_path: Path, empty_database_url: str
) -> None:
    world.submit()
    await world.running()
    await world.train(5)
    with world.database.write() as session:
        session.execute(update(JobRow).values(taken_over_by="somebody", taken_over_at=world.now))
    backups.back_up(world.database, tmp_path / "backup")
    restore_at(world, tmp_path / "backup", empty_database_url)
    for _ in range(20):
        await world.tick()
    await world.train(5)
    assert not any(each.exit_class is ExitClass.HALTED for agent in world.team() for each in agent.exits.values())
    assert world.job().committed_step == 9


async def test_without_a_manifest_the_job_restarts_from_the_newest_checkpoint_of_the_backup(
    world: World, tmp_path: Path, empty_database_url: str
) -> None:
    """Nothing names the later generations, so their steps are abandoned, although the agents hold them."""
    world.submit()
    await world.running()
    await world.train(5)
    await world.upload(5)
    backups.back_up(world.database, tmp_path / "backup")
    await moved_on(world)
    await moved_on(world)
    first = restore_at(world, tmp_path / "backup", empty_database_url)
    await world.until(lambda: world.job().state == JobState.RUNNING and world.job().generation > first)
    assert (world.plan().parent, world.plan().base_step) == (1, 5)
    with world.database.read() as session:
        assert jobs.get_run(session, world.job().run_id).issued_generation > first
