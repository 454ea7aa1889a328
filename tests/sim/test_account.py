"""The ledger of a job's time agrees with the time stamps of its ranks.

The tests make random sequences of launches, faults, pauses, hangs and absences of the control plane. The expected times
follow from the stamp of every step and from the times at which an event stopped the ranks. They use no decision of the
control plane.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

from hypothesis import example, given, settings
from hypothesis import strategies as st

from control_plane.core import states
from control_plane.core.observed.spans import Bucket
from control_plane.core.states import ENDED_JOBS, JobState, SecondaryStatus
from control_plane.db.jobs import SavedJob
from tests.sim.acts import KINDS
from tests.sim.simulation import Simulation, tell
from tests.sim.story import Act, JobShape, Story

SECONDS_PER_FAULT = 6.0
"""Largest error of the ledger per fault, in seconds.

The ledger counts a loss from the node's last report, which is up to a second old. A lease of three seconds and
one decision per second add to the error. The last second is a margin.
"""

Event = tuple[str, int]
EVENTS = st.one_of(
    st.tuples(st.just("train"), st.integers(1, 12)),
    st.tuples(st.just("wait"), st.integers(1, 20)),
    st.tuples(st.sampled_from(["kill", "terminate", "pause", "resume"]), st.just(0)),
    st.tuples(st.just("restart"), st.integers(1, 60)),
)


@dataclass
class Launch:
    """The steps of one generation, with time stamps by the ranks' own clock."""

    base: int
    stamps: dict[int, float] = field(default_factory=dict)
    stopped_at: float | None = None


class Stamped:
    """A simulated job whose ranks complete one step per second and stamp each step in the middle of its second."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        simulation.is_idle = True
        self.launches: dict[int, Launch] = {}

    @property
    def job(self) -> SavedJob:
        return self.simulation.jobs()[0]

    @property
    def seconds(self) -> float:
        return self.simulation.now.timestamp()

    async def second(self, *, is_stepping: bool = False) -> None:
        plan = self.simulation.plan(self.job)
        if is_stepping and plan is not None and (team := self.simulation.stepping(self.job)):
            launch = self.launches.setdefault(plan.generation, Launch(plan.base_step))
            step = max(boundary for agent in team for boundary in agent.boundary.values()) + 1
            launch.stamps[step] = self.seconds + 0.5
            for agent in team:
                agent.stamp = partial(self.stamp, plan.generation)
            self.simulation.train(self.job, 1)
        await self.simulation.tick()
        if self.job.state in (JobState.PAUSING, JobState.STOPPING):
            self.stop_ranks()

    def stamp(self, generation: int, step: int) -> float:
        return self.launches[generation].stamps.get(step, 0.0)

    def stop_ranks(self) -> None:
        for launch in self.launches.values():
            launch.stopped_at = launch.stopped_at or self.seconds

    async def play(self, what: str, amount: int) -> None:
        world = self.simulation.world
        match what:
            case "train":
                for _ in range(amount):
                    await self.second(is_stepping=True)
            case "wait":
                for _ in range(amount):
                    await self.second()
            case "kill" | "terminate" if team := self.simulation.stepping(self.job):
                self.stop_ranks()
                world.kill_rank(team[0]) if what == "kill" else world.terminate(team[0])
            case "pause" | "resume":
                KINDS[what][1](self.simulation, Act(kind=what))
            case "restart":
                world.now += timedelta(seconds=amount)
                world.operator.advance(timedelta(seconds=amount))
                world.start_server()

    def trained_seconds(self) -> float:
        """Return how many seconds the ranks worked on new steps.

        The time follows from the stamps of the steps and from the times at which an event stopped the ranks.
        """
        total, reached = 0.0, 0
        for launch in self.launches.values():
            new = [at for step, at in launch.stamps.items() if step > launch.base and step >= reached]
            if new:
                total += (launch.stopped_at or self.seconds) - min(new)
            reached = max(reached, *launch.stamps, 0)
        return total


@settings(max_examples=6)
@given(st.lists(EVENTS, min_size=1, max_size=5))
@example([("wait", 30)])
@example([("wait", 30), ("train", 12), ("kill", 0), ("wait", 25), ("train", 5)])
@example([("wait", 15), ("train", 8), ("terminate", 0), ("wait", 8), ("kill", 0), ("wait", 20), ("train", 5)])
@example([("wait", 12), ("train", 8), ("pause", 0), ("wait", 10), ("resume", 0), ("wait", 25), ("train", 5)])
@example([("wait", 12), ("restart", 60), ("train", 12), ("kill", 0), ("restart", 30), ("wait", 20), ("train", 6)])
def test_only_the_time_in_which_ranks_made_new_steps_is_training(events: list[Event]) -> None:
    async def course(simulation: Simulation) -> None:
        stamped = Stamped(simulation)
        for what, amount in events:
            await stamped.play(what, amount)
            check_account(stamped)
            check_status(stamped)

    tell(Story(seed=0, jobs=(JobShape(nodes=3, copies=2, settings={"max_attempts": 50}),)), course)


def check_account(stamped: Stamped) -> None:
    job = stamped.job
    spent = {bucket: job.accounting.get(bucket, 0) / 1_000_000 for bucket in Bucket}
    trained = spent[Bucket.TRAIN] + spent[Bucket.STALL]
    if not any(launch.stamps for launch in stamped.launches.values()):
        assert trained == 0, "no rank has made a step"
    tolerance = 6.0 + SECONDS_PER_FAULT * len(stamped.simulation.world.incidents())
    assert trained <= stamped.trained_seconds() + tolerance
    if job.state not in ENDED_JOBS:
        until = (job.accounted_until or job.created_at).timestamp()
        uncounted = stamped.seconds - until + spent[Bucket.UNACCOUNTED]
        assert trained >= stamped.trained_seconds() - tolerance - uncounted


def check_status(stamped: Stamped) -> None:
    """Assert that a job shows the status Training only after its newest launch has completed a step."""
    job = stamped.job
    shown = states.secondary_status(
        JobState(job.state),
        has_started=job.started_at is not None,
        has_stepped=job.max_boundary > 0,
        is_stepping=job.boundary > job.base_step,
    )
    if shown is SecondaryStatus.TRAINING:
        assert stamped.launches[job.generation].stamps
