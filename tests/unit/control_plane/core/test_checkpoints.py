"""Conditions under which uploaded shards become a checkpoint."""

from __future__ import annotations

import msgspec

from control_plane.core import checkpoints
from control_plane.core.checkpoints import KeptCheckpoint
from control_plane.core.evidence import current_reports
from everstep.protocol.ids import Generation, Step
from tests.properties.control_plane.simulated import SimulatedJob, Simulation, fresh


def uploaded() -> tuple[Simulation, SimulatedJob]:
    simulation = fresh()
    job = simulation.jobs[0]
    simulation.train(job, 3)
    simulation.upload(job)
    return simulation, job


def due(simulation: Simulation, job: SimulatedJob, reports=None):
    assert job.plan is not None
    found = current_reports(simulation.nodes(), job.spec.run, job.record.generation) if reports is None else reports
    return checkpoints.due(job.plan, found, job.lineage, job.checkpoints)


def test_a_complete_set_is_put_once_under_its_generation_and_step() -> None:
    simulation, job = uploaded()
    (put,) = due(simulation, job)
    assert put.at.key == f"k/run={job.spec.run}/gen=1/step=3/manifest.json"
    assert (put.manifest.step, put.manifest.parent_chain) == (3, ((1, 0),))
    assert [shard.rank for shard in put.manifest.shards] == [0, 1, 2, 3]
    simulation.step()
    assert [checkpoint.step for checkpoint in job.checkpoints] == [3]
    assert due(simulation, job) == ()


def test_one_that_a_person_has_deleted_is_not_put_again() -> None:
    simulation, job = uploaded()
    assert job.plan is not None
    reports = current_reports(simulation.nodes(), job.spec.run, job.record.generation)
    assert checkpoints.due(job.plan, reports, job.lineage, job.checkpoints, {(Generation(1), Step(3))}) == ()
    assert checkpoints.due(job.plan, reports, job.lineage, job.checkpoints, {(Generation(1), Step(2))}) != ()


def test_a_missing_shard_makes_none() -> None:
    simulation, job = uploaded()
    simulation.running(job)[2].uploads = ()
    assert due(simulation, job) == ()


def test_shards_that_are_off_the_path_make_none() -> None:
    simulation, job = uploaded()
    agent = simulation.running(job)[0]
    agent.uploads = tuple(msgspec.structs.replace(upload, origin_generation=Generation(7)) for upload in agent.uploads)
    assert due(simulation, job) == ()


def test_uploads_of_an_ended_generation_make_none() -> None:
    simulation, job = uploaded()
    simulation.kill_rank(simulation.running(job)[0])
    reports = current_reports(simulation.nodes(), job.spec.run, Generation(2))
    assert due(simulation, job, reports) == ()


def kept(
    step: int, *, generation: int = 1, at: float = 0.0, needed: bool = False, pinned: bool = False
) -> KeptCheckpoint:
    return KeptCheckpoint(
        generation=generation, step=step, completed_at=at, is_needed=needed or pinned, is_counted=not pinned
    )


def test_what_is_beyond_a_number_goes_oldest_first() -> None:
    assert checkpoints.surplus([kept(20), kept(10), kept(30), kept(40)], 2, None, 0.0) == ((1, 10), (1, 20))
    assert checkpoints.surplus([kept(10), kept(20)], 2, None, 0.0) == ()
    assert checkpoints.surplus([kept(10, generation=2), kept(10), kept(20)], 1, None, 0.0) == ((1, 10), (2, 10))


def test_the_newest_and_the_needed_never_go() -> None:
    assert checkpoints.surplus([kept(10)], None, 1, 1e9) == ()
    assert checkpoints.surplus([], 1, 1, 1e9) == ()
    assert checkpoints.surplus([kept(10, needed=True), kept(20), kept(30)], 1, 1, 1e9) == ((1, 20),)
    assert checkpoints.surplus([kept(10), kept(20), kept(30, pinned=True)], 1, None, 0.0) == ((1, 10),)


def test_old_ones_go_and_both_limits_count() -> None:
    every = [kept(10, at=0.0), kept(20, at=50.0), kept(30, at=100.0)]
    assert checkpoints.surplus(every, None, 60, 100.0) == ((1, 10),)
    assert checkpoints.surplus(every, 1, 1_000, 100.0) == ((1, 10), (1, 20))
