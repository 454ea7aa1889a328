"""The checkpoint keeper deletes checkpoints beyond a job's limit.

It never deletes a checkpoint that is the newest, that a person has pinned, or from which a job would resume. If a
server dies during a deletion, the next server completes the deletion.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import msgspec
import pytest

from control_plane.cloud.errors import CloudUnavailable
from control_plane.core.orphans import KEPT_SECONDS
from control_plane.db import checkpoints, jobs
from control_plane.db.leases import Leaser
from control_plane.loop.checkpoint_keeper import CheckpointKeeper, delete
from control_plane.loop.orphan_keeper import OrphanKeeper
from control_plane.loop.verifier import Verifier
from everstep.protocol.ids import Step
from everstep.protocol.manifest import SharedObject, encode_manifest
from everstep.protocol.plan import ObjectReference
from tests.postgresql import BOTH_ENGINES
from tests.unit.control_plane.api.conftest import BUCKET, START, refused
from tests.unit.control_plane.api.test_results import Job


def keeper(service) -> CheckpointKeeper:
    return CheckpointKeeper(service.database, service.objects, service.clock)


def collect(service) -> None:
    """Run the loop that deletes checkpoints and the loop that verifies them, until both have no work left."""
    for _ in range(3):
        keeper(service).delete_due()
        Verifier(service.database, service.objects, service.clock).verify_next()
    keeper(service).delete_due()


def steps(client) -> list[int]:
    return [each["Step"] for each in client.list_checkpoints(TrainingJobName="gpt")["Checkpoints"]]


def keys(service, job: Job) -> set[str]:
    """Return the steps that still have at least one object in S3."""
    place = ObjectReference(bucket=BUCKET, key=f"projects/default/jobs/gpt/run={job.run}/checkpoints/")
    found = {info.reference.key.partition("step=")[2].partition("/")[0] for info in service.objects.list(place)}
    return found - {""}


@pytest.mark.parametrize("engine", BOTH_ENGINES)
@pytest.mark.covers("CreateTrainingJob.CheckpointConfig.MaxCount")
def test_the_newest_so_many_stay_and_each_that_goes_is_told_once(service, client, make):
    job = make(MaxCount=2)
    for step in (10, 20, 30, 40):
        job.checkpoint(step)
    for _ in range(2):
        collect(service)
    assert steps(client) == [40, 30]
    assert keys(service, job) == {"40", "30"}
    told = [
        event["Message"]
        for event in client.list_events(TrainingJobName="gpt")["Events"]
        if event["Type"] == "CheckpointDeleted"
    ]
    assert [message.partition(" was")[0] for message in told] == [
        "The checkpoint of step 10",
        "The checkpoint of step 20",
    ]


def test_pinned_ones_are_kept_besides(service, client, make):
    job = make(MaxCount=1)
    for step in (10, 20, 30):
        job.checkpoint(step)
    client.pin_checkpoint(TrainingJobName="gpt", Step=10)
    collect(service)
    assert steps(client) == [30, 10]
    client.unpin_checkpoint(TrainingJobName="gpt", Step=10)
    collect(service)
    assert steps(client) == [30]


@pytest.mark.covers("CreateTrainingJob.CheckpointConfig.MaxAgeInSeconds")
def test_old_ones_go_but_never_the_newest(service, client, make):
    job = make(MaxAgeInSeconds=60)
    job.checkpoint(5)
    job.checkpoint(10)
    job.checkpoint(20)
    client.pin_checkpoint(TrainingJobName="gpt", Step=5)
    collect(service)
    assert steps(client) == [20, 10, 5]
    service.clock.advance(timedelta(days=9).total_seconds())
    collect(service)
    assert steps(client) == [20, 5]


def test_what_a_job_would_be_restored_from_stays_though_a_newer_one_is_there(service, client, make):
    """The keeper keeps the checkpoint from which a job would resume, even if a newer one exists.

    The newer checkpoint is on an abandoned branch of the job's history, so the job cannot resume from it.
    """
    job = make(MaxCount=1)
    job.checkpoint(10)
    job.launch(2, base=10)
    job.checkpoint(30)  # Generation 1 made this step after step 10, from which generation 2 resumed.
    collect(service)
    assert steps(client) == [30, 10]


def test_checkpoints_off_the_path_take_no_place_of_usable_ones(service, client, make):
    """Generation 2 restarts from step 50, so steps 90 and 100 are abandoned."""
    job = make(MaxCount=2)
    for step in (50, 90, 100):
        job.checkpoint(step)
    job.launch(2, base=50)
    for step in (60, 70, 80):
        job.checkpoint(step, generation=2)
        collect(service)
    listed = client.list_checkpoints(TrainingJobName="gpt")["Checkpoints"]
    assert [(each["Generation"], each["Step"]) for each in listed] == [(1, 100), (1, 90), (2, 80), (2, 70)]
    for step in (110, 120):
        job.checkpoint(step, generation=2)
    collect(service)
    assert steps(client) == [120, 110]


@pytest.mark.parametrize("engine", BOTH_ENGINES)
def test_the_initial_state_of_an_unfinished_job_stays(service, client, make, source):
    job = make(MaxCount=1)
    for step in (10, 20, 30, 40):
        job.checkpoint(step)
    request = {"TrainingJobName": "next", "Source": source, "EntryPoint": "train.py", "NodeCount": 2}
    dependent = client.create_training_job(InitialCheckpoint={"TrainingJobName": "gpt", "Step": 20}, **request)["RunId"]
    collect(service)
    assert steps(client) == [40, 20]
    with refused("ConflictException", match="step 20 of 'gpt' is the initial state of 'next'; wait until"):
        client.delete_checkpoint(TrainingJobName="gpt", Step=20)
    job.end(dependent)
    collect(service)
    assert steps(client) == [40]


@pytest.mark.parametrize("engine", BOTH_ENGINES)
@pytest.mark.parametrize("config", [{}, {"EverySteps": 5}])
def test_without_a_limit_all_stay_and_none_is_looked_at(service, client, make, config, monkeypatch):
    job = make(**config)
    for step in (10, 20):
        job.checkpoint(step)
    with monkeypatch.context() as unread:
        unread.setattr(checkpoints, "of_run", None)
        unread.setattr(jobs, "get_run", None)
        keeper(service).delete_due()
    assert steps(client) == [20, 10]


@pytest.mark.covers("UpdateTrainingJob.CheckpointConfig.MaxCount", "UpdateTrainingJob.CheckpointConfig.MaxAgeInSeconds")
def test_a_limit_can_be_given_and_taken_back_later(service, client, make):
    job = make()
    for step in (10, 20, 30):
        job.checkpoint(step)
    client.update_training_job(TrainingJobName="gpt", CheckpointConfig={"MaxCount": 2})
    assert client.describe_training_job(TrainingJobName="gpt")["CheckpointConfig"]["MaxCount"] == 2
    collect(service)
    assert steps(client) == [30, 20]
    client.update_training_job(TrainingJobName="gpt", CheckpointConfig={"MaxCount": 0})
    assert "MaxCount" not in client.describe_training_job(TrainingJobName="gpt")["CheckpointConfig"]
    client.update_training_job(TrainingJobName="gpt", CheckpointConfig={"MaxAgeInSeconds": 60})
    assert client.describe_training_job(TrainingJobName="gpt")["CheckpointConfig"]["MaxAgeInSeconds"] == 60
    client.update_training_job(TrainingJobName="gpt", CheckpointConfig={"MaxAgeInSeconds": 0})
    assert "MaxAgeInSeconds" not in client.describe_training_job(TrainingJobName="gpt")["CheckpointConfig"]


@pytest.mark.covers(
    "CreateTrainingJob.CheckpointConfig.StorePatienceSeconds", "UpdateTrainingJob.CheckpointConfig.StorePatienceSeconds"
)
def test_the_patience_with_a_store_is_shown_unless_it_is_the_default(service, client, make):
    make(StorePatienceSeconds=60)
    assert client.describe_training_job(TrainingJobName="gpt")["CheckpointConfig"]["StorePatienceSeconds"] == 60
    client.update_training_job(TrainingJobName="gpt", CheckpointConfig={"StorePatienceSeconds": 1800})
    assert "StorePatienceSeconds" not in client.describe_training_job(TrainingJobName="gpt")["CheckpointConfig"]


@pytest.mark.parametrize("after", ["nothing", "the manifest"])
def test_a_server_that_dies_while_deleting_leaves_it_to_the_next_one(service, client, make, after, monkeypatch):
    job = make(MaxCount=1)
    job.checkpoint(10)
    job.checkpoint(20)
    keeper(service).delete_due()
    Verifier(service.database, service.objects, service.clock).verify_next()
    calls = []
    real = service.objects.delete

    def dying(bucket: str, keys: list[str]) -> None:
        calls.append(keys)
        if after == "nothing" or len(calls) > 1:
            raise CloudUnavailable("no answer")
        real(bucket, keys)

    with monkeypatch.context() as patch:
        patch.setattr(service.objects, "delete", dying)
        keeper(service).delete_due()
    assert calls[0] == [
        f"projects/default/jobs/gpt/run={job.run}/checkpoints/run={job.run}/gen=1/step=10/manifest.json"
    ]
    with service.database.read() as session:
        state = {each.step: each.state for each in checkpoints.of_run(session, job.run)}
    assert state == {10: checkpoints.DELETING, 20: checkpoints.COMPLETE}
    keeper(service).delete_due()
    assert steps(client) == [20]
    assert keys(service, job) == {"20"}


def test_nothing_is_begun_with_while_a_job_is_restored(service, client, make):
    job = make(MaxCount=1)
    job.checkpoint(10)
    job.checkpoint(20)
    with service.database.write() as session:
        lease = Leaser("test", 3.0, lambda: 0.0).claim(session, "job", job.run)
        jobs.transition(session, lease, before="running", after="loading", now=START, reason="restores")
    keeper(service).delete_due()
    assert steps(client) == [20, 10]


def test_nothing_is_deleted_before_a_later_checkpoint_is_read_back(service, client, make):
    job = make(MaxCount=1)
    for step in (10, 20, 30):
        job.checkpoint(step)
    for _ in range(3):
        keeper(service).delete_due()
    listed = client.list_checkpoints(TrainingJobName="gpt")["Checkpoints"]
    assert [(each["Step"], each["Verification"]) for each in listed] == [
        (30, "Verifying"),
        (20, "NotVerified"),
        (10, "NotVerified"),
    ]


def test_a_damaged_newest_checkpoint_supersedes_nothing_and_the_next_intact_one_does(service, client, make):
    job = make(MaxCount=1)
    for step in (10, 20):
        job.checkpoint(step)
    job.put("checkpoints", f"run={job.run}/gen=1/step=20/u/rank=1.safetensors", b"not what was put")
    collect(service)
    listed = client.list_checkpoints(TrainingJobName="gpt")["Checkpoints"]
    assert [(each["Step"], each["Verification"]) for each in listed] == [(20, "Damaged"), (10, "NotVerified")]
    assert "rank 1" in listed[0]["VerificationMessage"]
    job.checkpoint(30)
    collect(service)
    assert steps(client) == [30]


@pytest.mark.covers(
    "CreateTrainingJob.CheckpointConfig.KeepEverySteps", "UpdateTrainingJob.CheckpointConfig.KeepEverySteps"
)
def test_checkpoints_at_multiples_are_kept_until_that_is_taken_back(service, client, make):
    job = make(MaxCount=1, KeepEverySteps=20)
    for step in (10, 21, 30, 42, 50):
        job.checkpoint(step)
    collect(service)
    assert steps(client) == [50, 42, 21]
    client.update_training_job(TrainingJobName="gpt", CheckpointConfig={"KeepEverySteps": 0})
    collect(service)
    assert steps(client) == [50]


def frozen_contents(service, job: Job) -> set[bytes]:
    """Return the content of each frozen object (an S3 object with tensors that training does not change).

    The tests use contents of six bytes, which an object stores after its header.
    """
    place = ObjectReference(
        bucket=BUCKET, key=f"projects/default/jobs/gpt/run={job.run}/checkpoints/run={job.run}/frozen/"
    )
    return {service.objects.get(info.reference)[-6:] for info in service.objects.list(place)}


def test_frozen_objects_stay_while_a_checkpoint_or_a_running_upload_can_need_them(service, client, make):
    job = make()
    for step, content in ((10, b"before"), (20, b"before"), (30, b"after!"), (40, b"after!")):
        job.checkpoint(step, frozen=content)
    for step in (10, 20):
        client.delete_checkpoint(TrainingJobName="gpt", Step=step)
    collect(service)
    assert keys(service, job) - {""} == {"30", "40"}
    assert frozen_contents(service, job) == {b"before", b"after!"}, "an upload can have found the object already"
    job.write(jobs.change, ended_at=START, reason="done")
    client.delete_checkpoint(TrainingJobName="gpt", Step=30)
    collect(service)
    assert frozen_contents(service, job) == {b"before", b"after!"}, "step 40 needs one, and no pass has seen the other"
    orphans = OrphanKeeper(service.database, service.objects, service.clock)
    service.clock.advance(2 * KEPT_SECONDS + 1)
    orphans.delete_due()
    assert frozen_contents(service, job) == {b"after!"}
    client.delete_checkpoint(TrainingJobName="gpt", Step=40)
    collect(service)
    assert frozen_contents(service, job) == set()


def test_a_deletion_leaves_frozen_objects_of_other_runs(service, client, make):
    """A deletion keeps the frozen objects of another run, even if a stored manifest of this run names them.

    A server that did not check reported keys may have stored such a manifest, because an agent chooses the keys.
    """
    job = make()
    manifest = job.checkpoint(10, frozen=b"before")
    folder = f"projects/default/jobs/gpt/run={job.run}/checkpoints/run=victim/frozen"
    victim = ObjectReference(bucket=BUCKET, key=f"{folder}/{'0' * 64}.safetensors")
    service.objects.put(victim, b"needed")
    shards = tuple(
        msgspec.structs.replace(shard, key=shard.key.replace(f"checkpoints/run={job.run}/", "checkpoints/run=victim/"))
        for shard in manifest.shards
    )
    foreign = (SharedObject(key=victim.key, object_bytes=6, sha256="0" * 64),)
    stored = encode_manifest(msgspec.structs.replace(manifest, step=Step(20), shards=shards, frozen=foreign))
    with service.database.read() as session:
        (row,) = checkpoints.of_run(session, job.run)
    key = row.manifest_key.replace("step=10", "step=20")
    job.write(checkpoints.record, replace(row, step=20, manifest_key=key, manifest=stored))
    job.write(jobs.change, ended_at=START, reason="done")
    for step in (10, 20):
        client.delete_checkpoint(TrainingJobName="gpt", Step=step)
    assert frozen_contents(service, job) == set()
    assert service.objects.get(victim) == b"needed"


def test_an_invalid_manifest_keeps_no_other_run_from_deletions_and_verifications(service, client, make, source):
    job = make(MaxCount=1)
    for step in (10, 20):
        job.checkpoint(step)
    invalid = Job(service, client, source, TrainingJobName="invalid")
    invalid.launch(1)
    invalid.invalid_checkpoint(10, checkpoints.DELETING)
    invalid.invalid_checkpoint(20, checkpoints.COMPLETE)
    client.verify_checkpoint(TrainingJobName="invalid", Step=20)
    collect(service)
    assert steps(client) == [20]
    (damaged,) = client.list_checkpoints(TrainingJobName="invalid", MinStep=20)["Checkpoints"]
    assert damaged["VerificationMessage"].startswith("the stored manifest is invalid: not a checkpoint manifest")


class Interleaved:
    """A database that runs other work before the first write transaction."""

    def __init__(self, database, work: Callable[[], object]) -> None:
        self.read, self.real, self.work = database.read, database, [work]

    def write(self):
        if self.work:
            self.work.pop()()
        return self.real.write()


@pytest.mark.parametrize("engine", BOTH_ENGINES)
def test_two_deletions_at_the_same_time_leave_no_frozen_objects(service, make):
    job = make()
    for step in (10, 20):
        job.checkpoint(step, frozen=b"before")
    job.write(jobs.change, ended_at=START, reason="done")
    with service.database.write() as session:
        first, second = (
            checkpoints.set_state(session, job.run, each, checkpoints.DELETING)
            for each in checkpoints.of_run(session, job.run)
        )
    database = Interleaved(service.database, lambda: delete(service.database, service.objects, job.run, second, START))
    delete(database, service.objects, job.run, first, START)
    assert frozen_contents(service, job) == set()


def test_the_orphan_keeper_deletes_frozen_objects_that_a_deletion_left(service, client, make, monkeypatch):
    job = make()
    job.checkpoint(10, frozen=b"before")
    job.write(jobs.change, ended_at=START, reason="done")
    service.clock.advance(2 * KEPT_SECONDS + 1)
    orphans = OrphanKeeper(service.database, service.objects, service.clock)
    orphans.delete_due()
    real = service.objects.delete

    def fail_for_frozen(bucket: str, keys: list[str]) -> None:
        if "/frozen/" in keys[0]:
            raise CloudUnavailable("no answer")
        real(bucket, keys)

    with monkeypatch.context() as patch:
        patch.setattr(service.objects, "delete", fail_for_frozen)
        client.delete_checkpoint(TrainingJobName="gpt", Step=10)
    assert (steps(client), frozen_contents(service, job)) == ([], {b"before"})
    assert (orphans.delete_due(), orphans.delete_due()) == (1, 0)
    assert frozen_contents(service, job) == set()


def test_replicated_objects_live_as_long_as_their_checkpoint(service, client, make):
    job = make()
    manifest = job.checkpoint(10, frozen=b"before", is_replicated=True)
    place = manifest.replicated[0].key.rpartition("/")[0]
    job.put("checkpoints", f"run={job.run}/gen=1/step=12/replicated/{'0' * 64}.safetensors", b"unused")
    job.launch(2, base=10)
    service.clock.advance(2 * KEPT_SECONDS + 1)

    def contents():
        folder = ObjectReference(bucket=BUCKET, key=f"{place.rpartition('gen=1')[0]}gen=1/")
        return {info.reference.key.rpartition("/")[2] for info in service.objects.list(folder)}

    assert OrphanKeeper(service.database, service.objects, service.clock).delete_due() == 1, "no checkpoint has step 12"
    assert contents() == {"manifest.json", "rank=0.safetensors", "rank=1.safetensors"} | {
        manifest.replicated[0].key.rpartition("/")[2]
    }
    job.write(jobs.change, ended_at=START, reason="done")
    with service.database.write() as session:
        (stored,) = checkpoints.of_run(session, job.run)
        record = checkpoints.set_state(session, job.run, stored, checkpoints.DELETING)
    delete(service.database, service.objects, job.run, record, START)
    assert contents() == set()


def test_orphans_of_a_running_job_are_no_frozen_objects(service, make):
    job = make()
    job.checkpoint(10, frozen=b"before")
    job.put("checkpoints", f"run={job.run}/frozen/{'0' * 64}.safetensors", b"unused")
    job.launch(2, base=10)
    service.clock.advance(2 * KEPT_SECONDS + 1)
    OrphanKeeper(service.database, service.objects, service.clock).delete_due()
    assert frozen_contents(service, job) == {b"before", b"unused"}
