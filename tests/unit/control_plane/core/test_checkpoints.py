"""A checkpoint is complete once the shards of all ranks are uploaded. Checkpoints beyond a job's limit are surplus."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from control_plane.core import checkpoints
from control_plane.core.checkpoints import CheckpointRetention, KeptCheckpoint
from control_plane.core.job.view import current_reports
from control_plane.core.observed.steps import CheckpointRecord, initial_generation
from everstep.protocol.agent_messages import RunningUpload
from everstep.protocol.ids import Generation, Rank, Step
from everstep.protocol.manifest import SharedObject, decode_manifest, encode_manifest
from everstep.protocol.plan import ObjectReference
from tests.unit.control_plane.core.cluster import SimulatedJob, Simulation, fresh

MAX_STEP = Step(2**52)


def uploaded() -> tuple[Simulation, SimulatedJob]:
    simulation = fresh()
    job = simulation.jobs[0]
    simulation.train(job, 3)
    simulation.upload(job)
    return simulation, job


def due(simulation: Simulation, job: SimulatedJob, reports=None, *, committed: Step = MAX_STEP):
    assert job.plan is not None
    found = current_reports(simulation.nodes(), job.spec.run, job.record.generation) if reports is None else reports
    return checkpoints.due(job.plan, found, job.lineage, job.checkpoints, committed=committed)


def test_a_complete_set_is_put_once_under_its_generation_and_step() -> None:
    simulation, job = uploaded()
    (put,) = due(simulation, job)
    assert put.at.key == f"k/run={job.spec.run}/gen=1/step=3/manifest.json"
    assert (put.manifest.step, put.manifest.parent_chain) == (3, ((1, 0),))
    assert [shard.rank for shard in put.manifest.shards] == [0, 1, 2, 3]
    assert put.manifest.frozen == ()
    simulation.step()
    assert [checkpoint.step for checkpoint in job.checkpoints] == [3]
    assert due(simulation, job) == ()


def test_shards_of_another_number_of_ranks_complete_no_set() -> None:
    simulation, job = uploaded()
    (lineage,) = job.lineage
    reports = {agent.node_id: report for agent in simulation.running(job) if (report := agent.member()) is not None}
    for world_size, count in ((4, 1), (3, 0), (0, 1)):  # 0: a restored database does not know the number
        history = (replace(lineage, world_size=world_size),)
        assert len(checkpoints.due(job.plan, reports, history, (), committed=MAX_STEP)) == count


def test_the_manifest_names_each_frozen_object_once() -> None:
    simulation, job = uploaded()
    objects = [SharedObject(key="another/object", object_bytes=1, sha256=digit * 64) for digit in "cba"]
    for agent in simulation.running(job):
        agent.uploads = tuple(
            msgspec.structs.replace(upload, frozen=(objects[upload.rank % 2], objects[2])) for upload in agent.uploads
        )
    (put,) = due(simulation, job)
    folder = f"k/run={job.spec.run}/frozen"
    assert [each.key for each in put.manifest.frozen] == [f"{folder}/{digit * 64}.safetensors" for digit in "abc"]
    assert decode_manifest(encode_manifest(put.manifest)) == put.manifest


def test_the_manifest_names_each_replicated_object_once_in_the_folder_of_the_step() -> None:
    simulation, job = uploaded()
    objects = [SharedObject(key="another/object", object_bytes=1, sha256=digit * 64) for digit in "cba"]
    for agent in simulation.running(job):
        agent.uploads = tuple(
            msgspec.structs.replace(upload, replicated=(objects[upload.rank % 2], objects[2]))
            for upload in agent.uploads
        )
    (put,) = due(simulation, job)
    folder = put.at.key.replace("manifest.json", "replicated")
    assert [each.key for each in put.manifest.replicated] == [f"{folder}/{digit * 64}.safetensors" for digit in "abc"]
    assert decode_manifest(encode_manifest(put.manifest)) == put.manifest
    assert "/gen=" in folder


@pytest.mark.parametrize(
    "change",
    [
        lambda key: ("foreign", key),
        lambda key: ("b", "run=victim/gen=1/step=3/u/rank=0.safetensors"),
        lambda key: ("b", f"other/{key}"),
        lambda key: ("b", key.replace("gen=1", "gen=2")),
        lambda key: ("b", key.replace("step=3", "step=4")),
        lambda key: ("b", key.replace("/u/", "/u/../v/")),
        lambda key: ("b", key.replace("rank=0", "rank=1")),
        lambda key: ("b", key.replace("u/rank=0.safetensors", "manifest.json")),
    ],
)
def test_no_manifest_names_an_object_outside_its_own_folder(change) -> None:
    simulation, job = uploaded()
    (agent,) = [each for each in simulation.running(job) if 0 in each.boundary]
    before = agent.uploads
    foreign = [
        msgspec.structs.replace(upload, object=ObjectReference(bucket=bucket, key=key))
        for upload in before
        if upload.rank == 0
        for bucket, key in [change(upload.object.key)]
    ]
    agent.uploads = (*foreign, *(upload for upload in before if upload.rank != 0))
    assert due(simulation, job) == ()
    agent.uploads = (*before, *foreign)
    (put,) = due(simulation, job)
    assert put.manifest.shards[0].key == f"k/run={job.spec.run}/gen=1/step=3/u/rank=0.safetensors"


def test_a_report_about_a_rank_outside_the_plan_is_ignored() -> None:
    simulation, job = uploaded()
    agent = simulation.running(job)[0]
    key = f"k/run={job.spec.run}/gen=1/step=3/u/rank=4.safetensors"
    stray = msgspec.structs.replace(agent.uploads[0], rank=Rank(4), object=ObjectReference(bucket="b", key=key))
    agent.uploads = (*agent.uploads, stray)
    (put,) = due(simulation, job)
    assert [shard.rank for shard in put.manifest.shards] == [0, 1, 2, 3]


def test_one_that_a_person_has_deleted_is_not_put_again() -> None:
    simulation, job = uploaded()
    assert job.plan is not None
    reports = current_reports(simulation.nodes(), job.spec.run, job.record.generation)
    assert (
        checkpoints.due(job.plan, reports, job.lineage, job.checkpoints, {(Generation(1), Step(3))}, committed=MAX_STEP)
        == ()
    )
    assert (
        checkpoints.due(job.plan, reports, job.lineage, job.checkpoints, {(Generation(1), Step(2))}, committed=MAX_STEP)
        != ()
    )


def test_the_progress_of_an_upload_counts_finished_and_running_shards() -> None:
    simulation, job = uploaded()
    reports = current_reports(simulation.nodes(), job.spec.run, job.record.generation)
    assert checkpoints.uploading(Generation(1), reports) is None
    done = sum(upload.object_bytes for report in reports.values() for upload in report.uploads)
    running = {
        node_id: msgspec.structs.replace(
            report,
            running_uploads=tuple(
                RunningUpload(
                    rank=upload.rank, step=Step(4), object_name="", stored_bytes=upload.rank, object_bytes=100
                )
                for upload in report.uploads
            ),
        )
        for node_id, report in reports.items()
    }
    found = checkpoints.uploading(Generation(1), running)
    assert found is not None
    assert (found.step, found.stored_bytes, found.total_bytes, found.slowest.rank) == (4, 0 + 1 + 2 + 3, 400, 0)
    (first, *_) = running
    running[first] = msgspec.structs.replace(
        running[first],
        running_uploads=(),
        uploads=tuple(msgspec.structs.replace(upload, step=Step(4)) for upload in running[first].uploads),
    )
    found = checkpoints.uploading(Generation(1), running)
    assert found is not None
    ended = sum(upload.object_bytes for upload in running[first].uploads)
    left = [upload.rank for report in running.values() for upload in report.running_uploads]
    assert 0 < ended < done
    assert (found.stored_bytes, found.total_bytes) == (ended + sum(left), ended + 100 * len(left))
    assert found.slowest.rank == min(left)


def test_a_missing_shard_makes_none() -> None:
    simulation, job = uploaded()
    simulation.running(job)[2].uploads = ()
    assert due(simulation, job) == ()


def with_steps(simulation: Simulation, job: SimulatedJob, steps: range) -> None:
    """Let all agents report uploads of these steps."""
    for agent in simulation.running(job):
        agent.uploads = tuple(
            msgspec.structs.replace(
                upload,
                step=Step(step),
                object=ObjectReference(bucket="b", key=upload.object.key.replace("step=3", f"step={step}")),
            )
            for upload in agent.uploads
            for step in steps
        )


@pytest.mark.security
def test_a_step_that_the_job_has_not_committed_makes_none() -> None:
    simulation, job = uploaded()
    assert due(simulation, job, committed=Step(2)) == ()
    assert len(due(simulation, job, committed=Step(3))) == 1


@pytest.mark.security
def test_invented_steps_make_few_manifests_of_the_newest_steps() -> None:
    """Hostile agents report hundreds of uploads of old steps."""
    simulation, job = uploaded()
    assert job.plan is not None
    with_steps(simulation, job, range(1, 90))
    assert [put.manifest.step for put in due(simulation, job, committed=Step(60))] == [58, 59, 60]
    job.plans[job.plan.generation] = msgspec.structs.replace(
        job.plan, checkpoint=msgspec.structs.replace(job.plan.checkpoint, max_uploads=4, third_slot=True)
    )
    assert [put.manifest.step for put in due(simulation, job, committed=Step(60))] == [55, 56, 57, 58, 59, 60]


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
    step: int, *, generation: int = 1, at: float = 0.0, needed: bool = False, pinned: bool = False, **facts: bool
) -> KeptCheckpoint:
    return KeptCheckpoint(
        generation=generation, step=step, completed_at=at, is_needed=needed or pinned, is_counted=not pinned, **facts
    )


def surplus(kept: list[KeptCheckpoint], now: float = 0.0, **limits: int) -> tuple[tuple[int, int], ...]:
    """Return generation and step of each checkpoint beyond the limit, if only the newest checkpoint is verified."""
    newest = max(kept, key=lambda each: each.key[::-1], default=None)
    verified = [replace(each, is_verified=each is newest) for each in kept]
    return checkpoints.surplus(verified, CheckpointRetention(**limits), now)


def test_what_is_beyond_a_number_goes_oldest_first() -> None:
    assert surplus([kept(20), kept(10), kept(30), kept(40)], max_count=2) == ((1, 10), (1, 20))
    assert surplus([kept(10), kept(20)], max_count=2) == ()
    assert surplus([kept(10, generation=2), kept(10), kept(20)], max_count=1) == ((1, 10), (2, 10))


def test_the_newest_and_the_needed_never_go() -> None:
    assert surplus([kept(10)], 1e9, max_age_seconds=1) == ()
    assert surplus([], max_count=1, max_age_seconds=1) == ()
    assert surplus([kept(10, needed=True), kept(20), kept(30)], 1, max_count=1, max_age_seconds=1) == ((1, 20),)
    assert surplus([kept(10), kept(20), kept(30, pinned=True)], max_count=1) == ((1, 10),)


def test_old_ones_go_and_both_limits_count() -> None:
    every = [kept(10, at=0.0), kept(20, at=50.0), kept(30, at=100.0)]
    assert surplus(every, 60.0, max_age_seconds=60) == (), "at its limit"
    assert surplus(every, 100.0, max_age_seconds=60) == ((1, 10),)
    assert surplus(every, 100.0, max_count=1, max_age_seconds=1_000) == ((1, 10), (1, 20))


def test_the_first_checkpoint_past_each_multiple_stays() -> None:
    every = [kept(step) for step in (5, 12, 18, 21, 29, 41, 55)]
    assert surplus(every, max_count=1, keep_every_steps=20) == ((1, 5), (1, 12), (1, 18), (1, 29))
    assert surplus(every, keep_every_steps=20) == (), "nothing limits the others"


def test_nothing_goes_before_a_later_checkpoint_is_verified() -> None:
    limits = CheckpointRetention(max_count=1)
    every = [kept(10), kept(20, is_verified=True), kept(30)]
    assert checkpoints.surplus(every, limits, 0.0) == ((1, 10),), "20 is not superseded by a verified one"
    assert checkpoints.to_verify(every, limits, 0.0) == (1, 30)
    assert checkpoints.to_verify([*every[:2], replace(every[2], is_verified=True)], limits, 0.0) is None
    assert checkpoints.to_verify([every[0]], limits, 0.0) is None, "there is nothing to delete"
    assert checkpoints.to_verify([], limits, 0.0) is None
    unlimited = CheckpointRetention()
    found = [checkpoints.to_verify(every, unlimited, 0.0, [step]) for step in (19, 20, 29, 30)]
    assert found == [None, (1, 30), (1, 30), None], "the trash from step 20 on waits for a later verified one"


def test_a_verified_checkpoint_that_the_job_cannot_restore_supersedes_nothing() -> None:
    every = [kept(10), kept(20), kept(30, is_verified=True, is_restorable=False)]
    assert checkpoints.surplus(every, CheckpointRetention(max_count=1), 0.0) == ()
    assert checkpoints.to_verify(every, CheckpointRetention(max_count=1), 0.0) == (1, 20)


def test_a_damaged_checkpoint_counts_for_no_limit_and_goes_once_it_is_superseded() -> None:
    broken = kept(20, is_restorable=False)
    assert surplus([kept(10), broken, kept(30)], max_count=2) == ((1, 20),)
    assert checkpoints.surplus([kept(10), broken, kept(30)], CheckpointRetention(max_count=2), 0.0) == ()


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        pytest.param({}, [], id="nothing set"),
        pytest.param({"every_steps": 5, "interval_seconds": 60}, [], id="two fixed intervals"),
        pytest.param({"max_overhead": 0.01, "max_bytes_per_second": 1}, [], id="automatic with a limit"),
        pytest.param({"max_overhead": 0.01, "every_steps": 5}, ["MaxOverhead"], id="automatic and fixed"),
        pytest.param({"max_bytes_per_second": 1, "every_steps": 5}, ["MaxUploadBytesPerSecond"], id="not automatic"),
        pytest.param({"max_uploads": 2}, ["MaxUploadsInFlight"], id="two uploads in two slots"),
        pytest.param({"max_uploads": 2, "has_third_slot": True}, [], id="two uploads in three slots"),
        pytest.param({"has_third_slot": True}, [], id="one upload in three slots"),
    ],
)
def test_settings_of_checkpoints_that_contradict_each_other(changes: dict[str, Any], fields: list[str]) -> None:
    values = {"every_steps": 0, "interval_seconds": None, "max_overhead": None, "max_bytes_per_second": None, **changes}
    found = checkpoints.contradictions(**values)
    assert [name for name, _ in found] == [f"CheckpointConfig.{field}" for field in fields]


def test_an_incomplete_or_known_step_does_not_hide_a_later_one() -> None:
    simulation, job = uploaded()
    assert job.plan is not None
    (known,) = due(simulation, job)
    for agent in simulation.running(job):
        agent.uploads = tuple(
            msgspec.structs.replace(
                upload,
                step=Step(step),
                object=ObjectReference(bucket="b", key=upload.object.key.replace("step=3", f"step={step}")),
            )
            for upload in agent.uploads
            for step in ((2, 3, 5) if upload.rank else (3, 5))
        )
    job.checkpoints = [
        CheckpointRecord(generation=Generation(1), step=Step(3), bucket="b", shards=known.manifest.shards)
    ]
    assert [put.manifest.step for put in due(simulation, job)] == [5]


def test_the_upload_time_is_that_of_the_slowest_shard_of_the_newest_step() -> None:
    simulation, job = uploaded()
    reports = current_reports(simulation.nodes(), job.spec.run, job.record.generation)
    times = iter([(3, 0.5), (4, 0.25), (4, 0.5), (3, 2.0)])
    timed = {
        node_id: msgspec.structs.replace(
            report,
            uploads=tuple(
                msgspec.structs.replace(upload, step=Step(step), upload_seconds=seconds)
                for upload in report.uploads
                for step, seconds in [next(times)]
            ),
        )
        for node_id, report in reports.items()
    }
    assert checkpoints.upload_seconds(timed) == 0.5
    unknown = {
        node_id: msgspec.structs.replace(
            report, uploads=tuple(msgspec.structs.replace(upload, upload_seconds=0.0) for upload in report.uploads)
        )
        for node_id, report in reports.items()
    }
    assert checkpoints.upload_seconds(unknown) is None


def test_of_running_uploads_the_newest_step_and_its_least_stored_fraction_count() -> None:
    simulation, job = uploaded()
    (first, *_) = current_reports(simulation.nodes(), job.spec.run, job.record.generation).values()
    sizes = [(0, 4, 1, 100), (1, 5, 30, 100), (2, 5, 40, 400), (3, 5, 0, 0)]
    running = [
        RunningUpload(rank=Rank(rank), step=Step(step), object_name="", stored_bytes=stored, object_bytes=size)
        for rank, step, stored, size in sizes
    ]
    for count, slowest in ((3, 2), (4, 3)):
        report = msgspec.structs.replace(first, uploads=(), running_uploads=tuple(running[:count]))
        found = checkpoints.uploading(Generation(1), {job.plan.nodes[0].node_id: report} if job.plan else {})
        assert found is not None
        assert (found.step, found.stored_bytes, found.total_bytes, found.slowest.rank) == (5, 70, 500, slowest)


def test_a_checkpoint_is_restorable_with_all_its_shards_on_the_path() -> None:
    simulation, job = uploaded()
    (put,) = due(simulation, job)
    sound = CheckpointRecord(generation=Generation(1), step=Step(3), bucket="b", shards=put.manifest.shards)
    stray = msgspec.structs.replace(put.manifest.shards[0], origin_generation=Generation(7))
    mixed = replace(sound, step=Step(4), shards=(stray, *put.manifest.shards[1:]))
    wrong = replace(sound, step=Step(5), is_wrong=True)
    assert checkpoints.restorable([sound, mixed, wrong], job.lineage, Generation(1)) == (sound,)
    assert checkpoints.newest_restorable([sound, mixed, wrong], job.lineage, Generation(1)) == sound
    assert checkpoints.newest_restorable([mixed, wrong], job.lineage, Generation(1)) is None


def test_the_chain_of_parents_ends_before_the_checkpoint_of_another_job() -> None:
    simulation, job = uploaded()
    assert job.plan is not None
    reports = current_reports(simulation.nodes(), job.spec.run, job.record.generation)
    lineage = (initial_generation(4), *job.lineage)
    (put,) = checkpoints.due(job.plan, reports, lineage, [], committed=MAX_STEP)
    assert put.manifest.parent_chain == ((1, 0),)
