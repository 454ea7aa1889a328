"""Courses of events that random stories seldom contain, each with what Everstep promises for it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from control_plane.core import notices
from control_plane.core.incidents import lost_steps
from control_plane.core.observed.nodes import Cause
from control_plane.core.states import ENDED_JOBS, JobState, NodeState
from control_plane.db import jobs
from control_plane.loop import memos
from everstep.protocol.agent_messages import NoticeKind
from everstep.protocol.ids import RunId
from tests.sim.acts import AGENT_LIES, KINDS, LIES
from tests.sim.simulation import SLOW_TICK_SECONDS, Simulation, tell
from tests.sim.story import Act, JobShape, Story

FOUR = JobShape(nodes=4, copies=2, settings={"max_attempts": 50})
THREE = JobShape(nodes=3, copies=3, ranks_per_node=2, settings={"max_attempts": 50})


def story(*shapes: JobShape, seed: int = 0) -> Story:
    return Story(seed=seed, jobs=shapes or (FOUR,))


async def train(simulation: Simulation, ticks: int) -> jobs.SavedJob:
    """Let the first job train for some ticks."""
    await simulation.settle()
    await simulation.wait(ticks)
    return simulation.jobs()[0]


async def until(simulation: Simulation, what: Callable[[], bool], ticks: int = 200) -> None:
    for _ in range(ticks):
        if what():
            return
        await simulation.tick()
    raise AssertionError([(job.state, job.reason) for job in simulation.jobs()])


@pytest.mark.parametrize("kind", sorted(notices.ENDING))
@pytest.mark.parametrize("seconds", [40.0, 600.0])
def test_an_announced_end_costs_no_step(kind: NoticeKind, seconds: float) -> None:
    place = random.randrange(4)

    async def course(simulation: Simulation) -> None:
        await train(simulation, 5)
        run = RunId(simulation.jobs()[0].run_id)
        leaving = simulation.stepping(simulation.jobs()[0])[place]
        simulation.announce(leaving, kind, seconds, is_true=True)
        await until(simulation, lambda: leaving.node_id not in simulation.world.agents, ticks=900)
        await simulation.settle()
        (incident,) = simulation.checks.jobs[run].incidents.values()
        assert (incident.cause, incident.instance_ids, lost_steps(incident)) == (Cause.NOTICE, (leaving.node_id,), 0)
        assert simulation.jobs()[0].generation == 2, "one interruption"

    tell(story(), course)


@pytest.mark.parametrize("has_restarted", [False, True])
@pytest.mark.parametrize("place", range(4))
def test_a_second_loss_during_the_restore_costs_no_committed_step(place: int, *, has_restarted: bool) -> None:
    """The nodes of the other group lack the proposed step, and one of them is lost while all load it."""

    async def course(simulation: Simulation) -> None:
        await train(simulation, 3)
        simulation.is_idle = True
        await simulation.tick()
        job, world = simulation.jobs()[0], simulation.world
        plan = simulation.plan(job)
        assert plan is not None
        committed = max(world.agents[node.node_id].committed for node in plan.nodes) + 1
        nodes = [node.node_id for node in plan.nodes]
        partners = {node for rank in plan.ranks if rank.holders[0] == nodes[place] for node in rank.holders}
        others = sorted(set(nodes) - partners)
        simulation.train(job, 1, is_lagging=lambda holder, rank: holder in others)
        world.terminate(world.agents[nodes[place]])
        if has_restarted:
            world.start_server()
        await until(simulation, lambda: simulation.jobs()[0].generation == 2)
        world.terminate(world.agents[others[place % 2]])
        simulation.is_idle = False
        await simulation.settle()
        assert simulation.jobs()[0].base_step >= committed

    tell(story(), course)


@pytest.mark.parametrize("lasts", range(12))
def test_a_restore_to_any_pass_of_a_launch_lets_training_resume(lasts: int) -> None:
    """A job replaces a rank. The backup is from tick `lasts` of the launch, and the restore follows at a later tick."""
    later = random.randrange(12)

    async def course(simulation: Simulation) -> None:
        await train(simulation, 3)
        KINDS["kill_rank"][1](simulation, Act(kind="kill_rank"))
        await simulation.wait(lasts)
        simulation.back_up()
        await simulation.wait(later)
        simulation.restore_backup()
        await simulation.settle()
        assert simulation.jobs()[0].state == JobState.RUNNING, f"restored {later} ticks later"

    tell(story(), course)


@pytest.mark.parametrize("is_lie", [False, True])
def test_a_spare_that_spoils_all_reduces_joins_no_job(*, is_lie: bool) -> None:
    """The node spoils each sum of a pair, or its agent denies each right one."""
    place = random.randrange(4)

    async def course(simulation: Simulation) -> None:
        world, run_id = simulation.world, (await train(simulation, 5)).run_id
        spares = [agent for agent in world.agents.values() if agent.run is None]
        bad = spares[place]
        bad.spoils_sums, bad.denies_sums = not is_lie, is_lie
        for _ in range(400):
            if world.nodes()[bad.node_id].state == NodeState.HELD:
                break
            await simulation.tick(SLOW_TICK_SECONDS)
        held = {id for id, node in world.nodes().items() if node.state == NodeState.HELD}
        assert held == {bad.node_id}
        for agent in simulation.stepping(simulation.jobs()[0])[:2]:
            world.terminate(agent)
            await until(simulation, lambda: len(simulation.stepping(simulation.jobs()[0])) < FOUR.nodes)
            await until(simulation, lambda: len(simulation.stepping(simulation.jobs()[0])) == FOUR.nodes)
            assert bad not in simulation.stepping(simulation.jobs()[0])
        assert simulation.jobs()[0].run_id == run_id

    tell(replace(story(), spares=4, room=4), course)


def agent_lie(lie: str) -> tuple[str, int]:
    return "agent_lies", AGENT_LIES.index(lie)


@pytest.mark.parametrize(
    ("kind", "amount"), [*map(agent_lie, AGENT_LIES), *((kind, 1) for kind in LIES if kind != "agent_lies")]
)
def test_no_irreversible_act_rests_on_one_lying_part(kind: str, amount: int) -> None:
    """One part lies while a job recovers from the loss of up to two nodes.

    The job repeats no committed step unless a person agrees, and no job ends. `Checks` sees each end of a node.
    """
    place, lost = random.randrange(64), random.randrange(3)

    async def course(simulation: Simulation) -> None:
        await train(simulation, 5)
        for job in simulation.jobs():
            simulation.upload(job)
        await simulation.wait(2)
        LIES[kind][1](simulation, Act(kind=kind, which=place, amount=amount))
        job = simulation.jobs()[0]
        committed, world = job.committed_step, simulation.world
        liars = {agent.node_id for agent in world.agents.values() if agent.lie is not None or agent.fails_load}
        team = [agent for agent in simulation.stepping(job) if agent.node_id not in liars]
        for agent in team[:lost]:
            world.terminate(agent)
        if not lost:
            world.kill_rank(team[0])
        simulation.is_idle = True

        def is_decided() -> bool:
            job = simulation.jobs()[0]
            return memos.repeat_choice_of(job) is not None or (job.generation > 1 and bool(simulation.stepping(job)))

        await until(simulation, is_decided)
        assert all(each.state not in ENDED_JOBS for each in simulation.jobs())
        job = simulation.jobs()[0]
        assert memos.repeat_choice_of(job) is not None or job.base_step >= committed, "steps repeat without consent"

    shapes = [
        JobShape(nodes=each.nodes, copies=each.copies, settings={"max_attempts": 50, "max_repeated_minutes": 0})
        for each in (FOUR, THREE)
    ]
    tell(story(*shapes), course)
