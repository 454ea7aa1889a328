"""Records the answers of the API in random stories of the simulation (`tests.sim`).

Such a record is a *moment*. A story without lies is played, and after some of its acts a moment is recorded.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from control_plane.db import jobs, metrics
from everstep.protocol.agent_messages import MetricBatch, MetricPoint
from everstep.protocol.ids import Generation, RunId, Step
from everstep.protocol.rank_messages import OWN_METRICS
from tests.dashboard.answers import Answers, answers
from tests.dashboard.printed import print_run
from tests.sim.acts import KINDS
from tests.sim.simulation import Simulation, story_of
from tests.sim.simulation import tell as play
from tests.sim.world import World

MOMENTS: Final = 2
"""Number of moments of one story."""
MOST_POINTS: Final = 200
"""Maximum number of steps whose metrics one moment adds to a job."""


@dataclass(frozen=True, kw_only=True)
class Moment:
    """The state of the fleet at one time in a random story, as the API describes it."""

    seed: int
    number: int
    """Number of this record in its story, from 0."""
    now: float
    """Server time in Unix seconds."""
    acts: list[str]
    """Kinds of the acts before this record, oldest first."""
    answers: Answers


def tell(seed: int, before_record: Callable[[World], None] = lambda world: None) -> list[Moment]:
    """Play the story of a seed. Return its moments, the last one from the end. Equal seeds give equal stories."""
    chance = random.Random(seed)
    story = story_of(seed, with_lies=False)
    story = replace(
        story,
        acts=story.acts[: chance.choice((3, 8, 14))],
        steps_per_tick=chance.choice((1, 3, 40)),
        jobs=tuple(
            replace(
                job, settings={**job.settings, "checkpoint_every_steps": 50, "max_attempts": chance.choice((1, 30))}
            )
            for job in story.jobs
        ),
    )
    recorded = {chance.randrange(len(story.acts) - 1), len(story.acts) - 1}
    moments: list[Moment] = []
    logged: dict[str, int] = {}

    async def course(simulation: Simulation) -> None:
        world = simulation.world
        world.wish(price_usd_per_hour=chance.choice((None, 12.5, 98.32)), hold_failed_instances=chance.random() < 0.5)
        await simulation.wait(chance.choice((2, 16, 30)))
        for number, act in enumerate(story.acts):
            KINDS[act.kind][1](simulation, act)
            for _ in range(act.wait):
                await simulation.tick(chance.choice((0.5, 1.0, 3.0, 10.0)))
            if number not in recorded:
                continue
            before_record(world)
            for job in simulation.jobs():
                print_run(world, job.name, {})
                _log(world, job, logged)
            kinds = [each.kind for each in story.acts[: number + 1]]
            now = world.now.timestamp()
            moments.append(Moment(seed=seed, number=len(moments), now=now, acts=kinds, answers=answers(world)))

    play(story, course)
    return moments


def _log(world: World, job: jobs.SavedJob, logged: dict[str, int]) -> None:
    """Store the metrics of the newest steps of a job. `logged` has the number of steps with metrics of each run."""
    first = logged.get(job.run_id, 0)
    points = tuple(
        MetricPoint(
            generation=Generation(job.generation),
            step=Step(number + 1),
            values={"loss": 8 / (number + 2), f"{OWN_METRICS}step_seconds": 1.0 + number % 3},
            at_seconds=world.now.timestamp() - (job.boundary - number),
        )
        for number in range(max(first, job.boundary - MOST_POINTS), job.boundary)
    )
    if points:
        batch = MetricBatch(run=RunId(job.run_id), first_number=first, points=points)
        with world.database.write() as session:
            metrics.store(session, "agent", batch)
        logged[job.run_id] = first + len(points)
