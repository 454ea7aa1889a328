"""The ledger of a job's time agrees with the time stamps of its ranks.

The tests make random sequences of launches, faults, pauses, hangs and absences of the control plane. The expected times
follow from the stamp of every step and from the times at which an event stopped the ranks. They use no decision of the
control plane.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from hypothesis import example, given, settings
from hypothesis import strategies as st

from control_plane.core import accounting, states
from control_plane.core.observed.spans import Bucket
from control_plane.core.states import ENDED_JOBS, JobState, SecondaryStatus
from everstep.protocol.agent_messages import MemberPhase
from everstep.protocol.ids import Generation
from tests.properties.control_plane.simulated import SimulatedJob, Simulation

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


class Stamped(Simulation):
    """A simulation whose ranks complete one step per second and stamp each step in the middle of its second."""

    def __init__(self) -> None:
        super().__init__()
        self.jobs = self.jobs[:1]
        self.launches: dict[Generation, Launch] = {}

    @property
    def job(self) -> SimulatedJob:
        return self.jobs[0]

    def second(self, *, is_stepping: bool = False) -> None:
        if (
            is_stepping
            and (plan := self.job.plan) is not None
            and (team := self.running(self.job))
            and not any(agent.exits for agent in team)
        ):
            launch = self.launches.setdefault(plan.generation, Launch(plan.base_step))
            step = max(boundary for agent in team for boundary in agent.boundary.values()) + 1
            launch.stamps[step] = self.seconds + 0.5
            for agent in team:
                agent.stamp = partial(self.stamp, plan.generation)
            self.train(self.job, 1)
        self.step()
        self.note()

    def note(self) -> None:
        """If the job pauses or stops, record that its ranks have stopped."""
        if self.job.record.state in (JobState.PAUSING, JobState.STOPPING):
            self.stop_ranks()

    def stamp(self, generation: Generation, step: int) -> float:
        return self.launches[generation].stamps.get(step, 0.0)

    def stop_ranks(self) -> None:
        for launch in self.launches.values():
            launch.stopped_at = launch.stopped_at or self.seconds

    def play(self, what: str, amount: int) -> None:
        match what:
            case "train":
                for _ in range(amount):
                    self.second(is_stepping=True)
            case "wait":
                for _ in range(amount):
                    self.second()
            case "kill" | "terminate" if team := self.running(self.job):
                self.stop_ranks()
                self.kill_rank(team[0]) if what == "kill" else self.terminate(team[0].node_id)
            case "pause":
                self.ask(self.job, "pause")
            case "resume":
                self.ask(self.job, "resume")
            case "restart":
                self.restart(amount)

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
def test_only_the_time_in_which_ranks_made_new_steps_is_training(story: list[Event]) -> None:
    world = Stamped()
    for what, amount in story:
        world.play(what, amount)
        record = world.job.record
        spent = {bucket: record.microseconds.get(bucket, 0) / 1_000_000 for bucket in Bucket}
        trained = spent[Bucket.TRAIN] + spent[Bucket.STALL]
        if not any(launch.stamps for launch in world.launches.values()):
            assert trained == 0, "no rank has made a step"
        tolerance = 6.0 + SECONDS_PER_FAULT * len(world.job.incidents)
        assert trained <= world.trained_seconds() + tolerance
        if record.state not in ENDED_JOBS:
            uncounted = world.seconds - accounting.accounted_until(record) + spent[Bucket.UNACCOUNTED]
            assert trained >= world.trained_seconds() - tolerance - uncounted
        check_status(world)


def check_status(world: Stamped) -> None:
    """Assert that a job shows the status Training only after its newest launch has completed a step."""
    record = world.job.record
    shown = states.secondary_status(
        record.state,
        has_started=record.started_at is not None,
        has_stepped=record.max_boundary > 0,
        is_stepping=record.boundary > record.base_step,
    )
    if shown is SecondaryStatus.TRAINING:
        assert world.launches[record.generation].stamps
    if shown is SecondaryStatus.STARTING and record.state is JobState.RUNNING:
        assert all(agent.phase in (MemberPhase.RUNNING, MemberPhase.EXITED) for agent in world.team(world.job))
        assert not any(step < record.boundary for launch in world.launches.values() for step in launch.stamps)
