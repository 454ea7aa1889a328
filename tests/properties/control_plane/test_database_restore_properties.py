"""A restored database reuses no generation number, whatever happened after the backup, and training resumes.

The simulation's agents and instances live on while the control plane's data return to an earlier point. S3 keeps every
manifest.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from control_plane.core.actions import Decision, PutManifest, SendLoad
from control_plane.core.database_restore import BackedUpRun, StoredRun, first_number, issued_number, reconcile
from control_plane.core.observed.steps import CheckpointRecord, GenerationRecord
from control_plane.core.states import ENDED_JOBS, JobState
from everstep.protocol.ids import Generation, RunId
from everstep.protocol.manifest import CheckpointManifest
from everstep.protocol.plan import GenerationPlan
from tests.properties.control_plane.simulated import SimulatedJob, Simulation
from tests.properties.control_plane.test_control_plane_properties import EVENTS, Event, play


@dataclass
class RestoredJob(SimulatedJob):
    """A job whose data may come from a backup."""

    adopted: tuple[GenerationRecord, ...] = ()
    """Generations that only the manifests in S3 name."""

    @property
    def newest_plan(self) -> GenerationPlan | None:
        """Return the plan with which the control plane compares the next placement."""
        return self.plan

    @property
    def lineage(self) -> tuple[GenerationRecord, ...]:
        adopted = {record.generation: record for record in self.adopted}
        known = {record.generation: record for record in super().lineage if record.generation not in adopted}
        return tuple(found for _, found in sorted({**known, **adopted}.items()))


class RestorableSimulation(Simulation):
    """A simulation whose control plane can be restored to the time of `back_up`."""

    def __init__(self) -> None:
        super().__init__()
        self.jobs = [RestoredJob(job.spec, job.record) for job in self.jobs]
        self.manifests: dict[RunId, dict[tuple[int, int], CheckpointManifest]] = {}
        self.sent: dict[tuple[RunId, Generation], GenerationPlan] = {}
        """Every plan that the control plane has sent before or after any restore, by run and generation number."""
        self.backup: tuple[object, ...] = ()

    def pass_over_job(self, job: SimulatedJob) -> Decision:
        decision = super().pass_over_job(job)
        for action in decision.actions:
            match action:
                case SendLoad(plan=plan):
                    assert self.sent.setdefault((plan.run, plan.generation), plan) == plan, "a number was used twice"
                case PutManifest(manifest=manifest):
                    self.manifests.setdefault(manifest.run, {})[manifest.generation, manifest.step] = manifest
                case _:
                    pass
        return decision

    def back_up(self) -> None:
        self.backup = copy.deepcopy((self.table, self.histories, self.rebooted, [vars(job) for job in self.jobs]))

    def restore(self) -> None:
        """Return the control plane's data to the backup, as `everstep db restore` does."""
        table, histories, rebooted, jobs = copy.deepcopy(self.backup)
        self.table, self.histories, self.rebooted = table, histories, rebooted  # type: ignore[assignment]
        self.restart(5)
        for job, backup in zip(self.jobs, jobs, strict=True):  # type: ignore[call-overload]
            vars(job).update(backup)
            self._raise(job)

    def _raise(self, job: SimulatedJob) -> None:
        assert isinstance(job, RestoredJob)
        first = first_number(self.control_seconds, newest_time=0.0)
        number = issued_number(job.record.issued_generation, first)
        job.record = replace(job.record, issued_generation=number)
        if job.record.state in ENDED_JOBS:
            return
        manifests = self.manifests.get(job.spec.run, {}).values()
        complete = {(each.generation, each.step) for each in job.checkpoints}
        stored = StoredRun(manifests=manifests, present={(each.generation, each.step) for each in manifests})
        found = reconcile(stored, BackedUpRun(generations=set(job.plans), complete=complete))
        assert found.missing == ()
        job.adopted = found.generations
        job.checkpoints += [
            CheckpointRecord(generation=each.generation, step=each.step, bucket="b", shards=each.shards)
            for each in found.checkpoints
        ]
        # The simulation's own checks need the plans. The control plane sees only `adopted`.
        job.plans |= {each.generation: self.sent[job.spec.run, each.generation] for each in found.generations}


STORY = st.lists(EVENTS, max_size=8)


@settings(max_examples=12)
@given(STORY, STORY, STORY, st.booleans())
@example([("announce", 0, 5), *[("train", 0, 1)] * 4], [("train for", 0, 5)], [], False)
@example(
    [("announce", 6, 5), ("train", 0, 1), ("false alarm", 6, 5), ("upload", 0, 0), ("person", 0, "stop")],
    [("train for", 0, 5)],
    [("person ends", 0, 0)],
    False,
)
def test_a_restore_reuses_no_number_and_training_resumes(
    before: list[Event], after: list[Event], last: list[Event], is_restored_again: bool
) -> None:
    simulation = RestorableSimulation()
    simulation.settle()
    play(simulation, before)
    simulation.back_up()
    play(simulation, after)
    simulation.restore()
    if is_restored_again:
        play(simulation, last)
        simulation.restore()
    play(simulation, last)
    simulation.settle()
    assert all(job.record.state in {*ENDED_JOBS, JobState.RUNNING} for job in simulation.jobs)


PASSES = 12
"""More passes of the control plane than a replacement of one node takes."""


@pytest.mark.parametrize("is_stopped", [False, True])
@pytest.mark.parametrize("lasts", range(PASSES))
def test_a_restore_to_any_pass_of_a_launch_lets_training_resume(lasts: int, *, is_stopped: bool) -> None:
    """A job replaces a node. The backup is from pass `lasts` of the launch, and the restore follows at any later pass.

    If `is_stopped`, the backup contains a request to stop the job.
    """
    for later in range(PASSES):
        simulation = RestorableSimulation()
        simulation.settle()
        job = simulation.jobs[0]
        for _ in range(3):
            simulation.train(job, 1)
            simulation.step()
        simulation.kill_rank(simulation.running(job)[0])
        for _ in range(lasts):
            simulation.step()
        if is_stopped:
            simulation.ask(job, "stop")
        simulation.back_up()
        for _ in range(later):
            simulation.step()
            if simulation.running(job) and not is_stopped:
                simulation.train(job, 1)
        simulation.restore()
        simulation.settle()
        # The simulation's coordinators report no agreed stop, so a stop that the backup lacks looks like success.
        ends = {JobState.STOPPED, JobState.COMPLETED} if is_stopped else set()
        assert job.record.state in {JobState.RUNNING, *ends}, f"restored {later} passes later"
