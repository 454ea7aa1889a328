"""Tests checkpoints that a person requests, and the loop that verifies stored checkpoints."""

from __future__ import annotations

import re
from collections import Counter
from contextlib import closing, nullcontext
from datetime import timedelta

import msgspec
import pytest

from control_plane.api.routes.checkpoints import PATIENCE
from control_plane.cloud.errors import CloudUnavailable
from control_plane.core.verification import FIRST_PAUSE_SECONDS
from control_plane.db import checkpoints, jobs
from control_plane.db.tokens import Role
from control_plane.loop.shard_verification import IDLE_BYTES, KnownContents, verify_shard
from control_plane.loop.verifier import Verifier
from everstep.protocol.errors import CorruptObject
from everstep.protocol.plan import ObjectReference
from tests.unit.control_plane.api.conftest import BUCKET, START, refused
from tests.unit.control_plane.api.test_results import Job, tiny_shard

GPT = {"TrainingJobName": "gpt"}


@pytest.fixture
def job(service, client, fleet, source):
    """Return a running job, which trains in its first generation."""
    job = Job(service, client, source)
    job.launch(1)
    job.write(jobs.transition, before="queued", after="running", now=START, reason="trains", started_at=START)
    return job


def listed(client):
    return {checkpoint["Step"]: checkpoint for checkpoint in client.list_checkpoints(**GPT)["Checkpoints"]}


def kept(client):
    """Return the step of the last checkpoint, as DescribeProtection reports it."""
    return client.describe_protection(**GPT)["LastCheckpoint"]["Step"]


def keys(service, job, step):
    folder = ObjectReference(
        bucket=BUCKET, key=f"projects/default/jobs/gpt/run={job.run}/checkpoints/run={job.run}/gen=1/step={step}/"
    )
    return [info.reference.key.rpartition("/")[2] for info in service.objects.list(folder)]


# Tests of requested checkpoints


def wanted(service):
    with service.database.read() as session:
        job = jobs.get(session, "gpt")
        return job.checkpoint_wanted_step, job.checkpoint_wanted_at


@pytest.mark.covers("CreateCheckpoint.TrainingJobName")
def test_a_checkpoint_is_asked_for_once_and_is_there_once_it_is(service, client, job):
    job.write(jobs.change, committed_step=9)
    first = client.create_checkpoint(**GPT)
    assert (first["Step"], first["Status"], wanted(service)) == (9, "Requested", (9, START))
    job.write(jobs.change, committed_step=12)
    service.clock.advance(5)
    again = client.create_checkpoint(**GPT)
    assert (again["Step"], again["Status"], wanted(service)) == (9, "Requested", (9, START)), "one is on its way"
    job.checkpoint(12)
    done = client.create_checkpoint(**GPT)
    assert (done["Step"], done["Status"], wanted(service)) == (12, "Complete", (9, START))
    job.write(jobs.change, committed_step=15)
    assert (client.create_checkpoint(**GPT)["Step"], wanted(service)[0]) == (15, 15)
    said = [event["Type"] for event in client.list_events(**GPT)["Events"]]
    assert said.count("CheckpointRequested") == 2


def test_one_that_never_came_is_asked_for_anew(service, client, job):
    job.write(jobs.change, committed_step=9)
    client.create_checkpoint(**GPT)
    job.write(jobs.change, committed_step=90)
    service.clock.advance(PATIENCE.total_seconds() + 1)
    assert client.create_checkpoint(**GPT)["Step"] == 90
    assert wanted(service) == (90, START + PATIENCE + timedelta(seconds=1))


def test_a_checkpoint_of_a_path_that_was_left_does_not_count(service, client, job):
    job.checkpoint(50)
    job.launch(2, base=0)
    job.write(jobs.change, committed_step=9)
    assert (client.create_checkpoint(**GPT)["Step"], client.create_checkpoint(**GPT)["Status"]) == (9, "Requested")


def test_a_job_that_does_not_train_makes_none_and_says_why(service, client, job):
    with refused("ConflictException", match="has not committed a step yet"):
        client.create_checkpoint(**GPT)
    job.write(jobs.change, committed_step=9)
    job.write(jobs.transition, before="running", after="queued", now=START, reason="paused by a user")
    with refused("ConflictException", match="is not training: paused by a user"):
        client.create_checkpoint(**GPT)
    job.checkpoint(9)
    assert client.create_checkpoint(**GPT)["Status"] == "Complete", "what it stands on is in S3"
    job.write(jobs.change, committed_step=10, ended_at=START, reason="done")
    with refused("ConflictException", match="has ended: done"):
        client.create_checkpoint(**GPT)


# Tests of the verification of stored checkpoints


@pytest.fixture
def verifier(service):
    return Verifier(service.database, service.objects, service.clock)


def object_of(service, job, manifest, rank):
    return ObjectReference(bucket=BUCKET, key=manifest.shards[rank].key)


@pytest.mark.covers("VerifyCheckpoint.TrainingJobName", "VerifyCheckpoint.Step")
def test_an_intact_checkpoint_is_found_so(service, client, job, verifier):
    job.checkpoint(8)
    assert listed(client)[8]["Verification"] == "NotVerified"
    assert not verifier.verify_next(), "nothing was asked for"
    service.clock.advance(7)
    assert client.verify_checkpoint(**GPT, Step=8)["Verification"] == "Verifying"
    client.verify_checkpoint(**GPT, Step=8)
    assert verifier.verify_next()
    assert not verifier.verify_next()
    found = listed(client)[8]
    assert (found["Verification"], "VerificationMessage" in found) == ("Intact", False)
    assert found["VerificationTime"] == START + timedelta(seconds=7)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda body: body[:-1] + b"y", "rank 1: the object's content hashes to"),
        (lambda body: body[:-1], "rank 1: the object has"),
        (lambda body: body + b"x", "rank 1: the object has"),
        (lambda body: b"\xff" * 8 + body[8:], "rank 1: the object announces a header of"),
        (lambda body: body[:8] + b"[" + body[9:], "rank 1: the object's header is not a checkpoint header"),
        (lambda body: b"", "rank 1: the object has 0 bytes"),
        (lambda body: re.sub(rb'"job":"[^"]', b'"job":"?', body, count=1), "rank 1: the object's SHA-256 is"),
        (None, "rank 1: s3://"),
    ],
)
def test_a_damaged_one_is_found_so_and_a_repair_too(service, client, job, verifier, damage, said):
    job.checkpoint(4)
    manifest = job.checkpoint(8)
    assert kept(client) == 8
    place = object_of(service, job, manifest, 1)
    good = service.objects.get(place)
    if damage is None:
        service.objects.delete(BUCKET, [place.key])
    else:
        service.objects.put(place, damage(good))
    client.verify_checkpoint(**GPT, Step=8)
    verifier.verify_next()
    found = listed(client)[8]
    assert found["Verification"] == "Damaged"
    assert found["VerificationMessage"].startswith(said)
    assert "rank 0" not in found["VerificationMessage"]
    assert kept(client) == 4
    service.objects.put(place, good)
    client.verify_checkpoint(**GPT, Step=8)
    assert kept(client) == 4
    verifier.verify_next()
    assert listed(client)[8]["Verification"] == "Intact"
    assert kept(client) == 8


def test_another_shard_of_the_same_size_is_not_this_one(service, client, job, verifier):
    manifest = job.checkpoint(8)
    service.objects.put(object_of(service, job, manifest, 1), service.objects.get(object_of(service, job, manifest, 0)))
    client.verify_checkpoint(**GPT, Step=8)
    verifier.verify_next()
    message = listed(client)[8]["VerificationMessage"]
    assert message == "rank 1: the object's header describes another shard than the manifest"


@pytest.mark.parametrize("content", [b"{}", b" " * 100_000], ids=["shorter", "longer"])
def test_a_manifest_that_was_altered_is_told(service, client, job, verifier, content):
    """The verifier reads one byte more than the manifest has, because its owner may replace it by any object."""
    job.checkpoint(8)
    job.put("checkpoints", f"run={job.run}/gen=1/step=8/manifest.json", content)
    client.verify_checkpoint(**GPT, Step=8)
    verifier.verify_next()
    assert listed(client)[8]["VerificationMessage"] == "the manifest in S3 is not the one that was put"


def test_a_server_that_stops_reads_no_checkpoint_to_its_end_and_the_next_one_begins_anew(
    service, client, job, verifier, monkeypatch
):
    job.checkpoint(8)
    client.verify_checkpoint(**GPT, Step=8)
    told = iter((False, False))
    assert not verifier.verify_next(lambda: next(told, True))
    assert next(told, None) is None, "it was reading"
    assert listed(client)[8]["Verification"] == "Verifying"
    assert verifier.verify_next()
    assert listed(client)[8]["Verification"] == "Intact"


def test_a_cloud_that_does_not_answer_is_no_verdict(service, client, job, verifier, monkeypatch):
    job.checkpoint(8)
    client.verify_checkpoint(**GPT, Step=8)
    with monkeypatch.context() as broken:

        def fail(reference):
            raise CloudUnavailable("no answer")

        broken.setattr(service.objects, "head", fail)
        assert not verifier.verify_next()
        service.clock.advance(3)
        assert not verifier.verify_next(), "the next attempt is not due"
    found = listed(client)[8]
    assert (found["Verification"], found["VerificationWaitingSince"]) == ("Waiting", START)
    assert found["VerificationMessage"].endswith("because S3 does not answer: no answer")
    service.clock.advance(FIRST_PAUSE_SECONDS)
    verifier.verify_next()
    assert listed(client)[8]["Verification"] == "Intact"


@pytest.mark.parametrize("is_replicated", [False, True])
@pytest.mark.parametrize("idle_bytes", [0, IDLE_BYTES])
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda body: body, ""),
        (lambda body: body[:-1] + b"?", "rank 0: projects/"),
        (lambda body: body.replace(b"base", b"BASE"), "rank 0: projects/"),
        (lambda body: body[:-1], "rank 0: projects/"),
        (None, "rank 0: s3://"),
    ],
    ids=["intact", "data", "header", "cut", "missing"],
)
def test_shared_objects_are_verified_with_each_shard(service, client, job, idle_bytes, damage, said, is_replicated):
    """A damaged shared object makes each shard that refers to it damaged.

    If `idle_bytes` is 0, the verifier closes its connections to the objects between two tensors.
    """
    verifier = Verifier(service.database, service.objects, service.clock, idle_bytes=idle_bytes)
    manifest = job.checkpoint(8, frozen=b"frozen" * 40, is_replicated=is_replicated)
    place = ObjectReference(bucket=BUCKET, key=manifest.shared[0].key)
    if damage is None:
        service.objects.delete(BUCKET, [place.key])
    else:
        service.objects.put(place, damage(service.objects.get(place)))
    client.verify_checkpoint(**GPT, Step=8)
    verifier.verify_next()
    found = listed(client)[8]
    assert found["Verification"] == ("Damaged" if said else "Intact")
    assert found.get("VerificationMessage", "").startswith(said)
    assert not said or "; rank 1: " in found["VerificationMessage"]


def test_a_verification_reads_a_shared_object_once(service, client, job, verifier, monkeypatch):
    """For a second shard with the same shared object, the verifier reads at most two chunks of this object again.

    The shared object contains 24 MiB of each shard's payload. The payload is verified in chunks. Its first and last
    chunk with bytes of the shared object also contain bytes that only this shard has, so the verifier reads these two
    chunks again.
    """
    size = 24 * 1024 * 1024
    manifest = job.checkpoint(8, frozen=bytes(range(256)) * (size // 256))
    read = Counter()
    stream = service.objects.stream

    def counted(where, **between):
        for piece in stream(where, **between):
            read[where.key] += len(piece)
            yield piece

    monkeypatch.setattr(service.objects, "stream", counted)
    client.verify_checkpoint(**GPT, Step=8)
    verifier.verify_next()
    assert listed(client)[8]["Verification"] == "Intact"
    assert size <= read[manifest.frozen[0].key] <= size + 2 * 8 * 1024 * 1024


def test_a_known_chunk_does_not_hide_that_a_shard_has_other_bytes(service, job):
    """The verification finds a shard whose digest does not match the frozen object that the shard names.

    The shard of rank 1 names the same frozen object as the shard of rank 0. The digest of the shard of rank 1 was
    computed with other bytes in place of this object. The verification must fail, although it already knows that the
    frozen object is intact.
    """
    size = 24 * 1024 * 1024
    manifest = job.checkpoint(8, frozen=bytes(size))
    known = KnownContents()
    where = [ObjectReference(bucket=BUCKET, key=shard.key) for shard in manifest.shards]
    verify_shard(service.objects, where[0], manifest.shards[0], lambda: False, known)
    assert known.intact == {manifest.frozen[0].key}
    verify_shard(service.objects, where[1], manifest.shards[1], lambda: False, known)
    other = bytes(size // 2) + b"x" + bytes(size // 2 - 1)
    header, body = tiny_shard(1, 8, 1, other, named=manifest.frozen[0].sha256)
    service.objects.put(where[1], body)
    changed = msgspec.structs.replace(
        manifest.shards[1], payload_digest=header.payload_digest.hex(), object_bytes=len(body), sha256=""
    )
    with pytest.raises(CorruptObject, match="hashes to"):
        verify_shard(service.objects, where[1], changed, lambda: False, known)


def test_a_frozen_object_does_not_hide_a_damaged_replicated_object_of_the_same_name(service, job):
    size = 24 * 1024 * 1024
    content = bytes(size)
    frozen = job.checkpoint(4, frozen=content)
    replicated = job.checkpoint(8, frozen=content, is_replicated=True)
    assert frozen.frozen[0].sha256 == replicated.replicated[0].sha256
    place = ObjectReference(bucket=BUCKET, key=replicated.replicated[0].key)
    data = service.objects.get(place)
    service.objects.put(place, data[: size // 2] + b"x" + data[size // 2 + 1 :])
    known = KnownContents()
    for manifest, outcome in ((frozen, nullcontext()), (replicated, pytest.raises(CorruptObject, match="hashes to"))):
        where = ObjectReference(bucket=BUCKET, key=manifest.shards[0].key)
        with outcome:
            verify_shard(service.objects, where, manifest.shards[0], lambda: False, known)


# Tests of pinned and deleted checkpoints


@pytest.mark.covers(
    "PinCheckpoint.Step",
    "UnpinCheckpoint.TrainingJobName",
    "UnpinCheckpoint.Step",
    "DeleteCheckpoint.TrainingJobName",
    "DeleteCheckpoint.Step",
)
def test_a_pinned_checkpoint_is_not_deleted(service, client, job):
    for step in (4, 8):
        job.checkpoint(step)
    assert client.pin_checkpoint(**GPT, Step=4)["IsPinned"]
    client.pin_checkpoint(**GPT, Step=4)
    with refused("ConflictException", match="step 4 is pinned"):
        client.delete_checkpoint(**GPT, SkipTrash=True, Step=4)
    job.write(jobs.change, ended_at=START, reason="done")
    with refused("ConflictException", match="pinned: step 4; unpin"):
        client.delete_training_job(**GPT, DeleteObjects=True)
    assert not client.unpin_checkpoint(**GPT, Step=4)["IsPinned"]
    assert client.delete_checkpoint(**GPT, SkipTrash=True, Step=4)["Status"] == "Deleted"
    said = [event["Type"] for event in client.list_events(**GPT)["Events"]]
    assert [kind for kind in said if kind.startswith("Checkpoint")] == [
        "CheckpointPinned",
        "CheckpointUnpinned",
        "CheckpointDeleted",
    ]


def test_the_newest_that_a_live_job_would_be_restored_from_stays(service, client, job):
    for step in (4, 8):
        job.checkpoint(step)
    with refused("ConflictException", match="newest from which 'gpt' can restore"):
        client.delete_checkpoint(**GPT, SkipTrash=True, Step=8)
    client.delete_checkpoint(**GPT, SkipTrash=True, Step=4)
    assert (keys(service, job, 4), len(keys(service, job, 8))) == ([], 3)
    assert list(listed(client)) == [8]
    job.write(jobs.change, ended_at=START, reason="done")
    client.delete_checkpoint(**GPT, SkipTrash=True, Step=8)
    assert (keys(service, job, 8), listed(client)) == ([], {})


def test_of_a_path_that_was_left_the_newest_may_go(service, client, job):
    for step in (4, 8):
        job.checkpoint(step)
    job.launch(2, base=4)
    client.delete_checkpoint(**GPT, SkipTrash=True, Step=8)
    with refused("ConflictException", match="can restore"):
        client.delete_checkpoint(**GPT, SkipTrash=True, Step=4)


def test_nothing_is_deleted_while_a_job_is_being_restored(service, client, job):
    for step in (4, 8):
        job.checkpoint(step)
    job.write(jobs.transition, before="running", after="loading", now=START, reason="loads")
    with refused("ConflictException", match="is restoring"):
        client.delete_checkpoint(**GPT, SkipTrash=True, Step=4)


def test_a_deletion_that_broke_off_goes_on_and_what_is_deleted_does_not_come_back(service, client, job, monkeypatch):
    manifest = job.checkpoint(4)
    job.checkpoint(8)
    with monkeypatch.context() as broken:

        def fail(bucket, some):
            raise CloudUnavailable("no answer")

        broken.setattr(service.objects, "delete", fail)
        with closing(service.client()) as impatient, refused("ServiceUnavailableException"):
            impatient.delete_checkpoint(**GPT, SkipTrash=True, Step=4)
    assert listed(client)[4]["Status"] == "Deleting"
    with refused("ConflictException", match="is deleting"):
        client.pin_checkpoint(**GPT, Step=4)
    assert client.delete_checkpoint(**GPT, SkipTrash=True, Step=4)["Status"] == "Deleted"
    assert client.delete_checkpoint(**GPT, SkipTrash=True, Step=4)["Status"] == "Deleted", (
        "asked again, because the answer was lost"
    )
    with service.database.read() as session:
        tombstone = checkpoints.find(session, job.run, step=4, generation=1)
    assert (tombstone.state, tombstone.manifest) == ("deleted", None)
    job.checkpoint(4)  # the checkpoint is stored again, as when an agent repeats its report
    assert 4 not in listed(client)
    assert manifest.step == 4


@pytest.mark.covers("PinCheckpoint.TrainingJobName", "PinCheckpoint.Step", "PinCheckpoint.Generation")
def test_two_of_one_step_are_told_apart_by_their_generation(service, client, job):
    job.checkpoint(4)
    job.launch(2, base=0)
    job.checkpoint(4, generation=2)
    assert client.pin_checkpoint(**GPT, Step=4)["Generation"] == 2
    assert client.pin_checkpoint(**GPT, Step=4, Generation=1)["Generation"] == 1
    with refused("ResourceNotFoundException", match="step 4 of generation 3"):
        client.pin_checkpoint(**GPT, Step=4, Generation=3)


def test_of_two_of_one_step_the_one_that_is_left_is_meant(service, client, job):
    job.checkpoint(8)
    job.launch(2, base=0)
    job.checkpoint(8, generation=2)
    job.checkpoint(16, generation=2)
    step = {"TrainingJobName": "gpt", "Step": 8}
    assert client.delete_checkpoint(**step, SkipTrash=True)["Generation"] == 2
    assert client.pin_checkpoint(**step)["Generation"] == 1
    client.unpin_checkpoint(**step)
    assert client.delete_checkpoint(**step, SkipTrash=True)["Generation"] == 1
    assert client.delete_checkpoint(**step, SkipTrash=True)["Status"] == "Deleted", "the same once more changes nothing"


@pytest.mark.covers("DescribeCheckpoint.TrainingJobName", "DescribeCheckpoint.Step", "DescribeCheckpoint.Generation")
def test_one_checkpoint_is_described_also_after_its_deletion(service, client, job):
    job.checkpoint(4)
    job.checkpoint(8)
    job.launch(2, base=0)
    job.checkpoint(8, generation=2)
    job.checkpoint(12, generation=2)
    listed = {(each["Step"], each["Generation"]): each for each in client.list_checkpoints(**GPT)["Checkpoints"]}
    with closing(service.client(service.token(Role.VIEWER, "default"))) as viewer:
        described = viewer.describe_checkpoint(**GPT, Step=8)
        assert viewer.describe_checkpoint(**GPT, Step=8, Generation=1)["S3Uri"] == listed[8, 1]["S3Uri"]
    assert {key: described[key] for key in listed[8, 2]} == listed[8, 2], "the newest generation, as it is listed"
    client.delete_checkpoint(**GPT, SkipTrash=True, Step=8, Generation=2)
    assert client.describe_checkpoint(**GPT, Step=8)["Generation"] == 1, "one that is not deleted comes first"
    client.delete_checkpoint(**GPT, SkipTrash=True, Step=8, Generation=1)
    assert client.describe_checkpoint(**GPT, Step=8)["Status"] == "Deleted"
    assert 8 not in {each["Step"] for each in client.list_checkpoints(**GPT)["Checkpoints"]}
    with refused("ResourceNotFoundException", match="step 5"):
        client.describe_checkpoint(**GPT, Step=5)
    with (
        closing(service.client(service.token(Role.SUBMITTER, "speech"))) as stranger,
        refused("ResourceNotFoundException"),
    ):
        stranger.describe_checkpoint(**GPT, Step=8)


def test_others_may_not(service, client, job):
    job.checkpoint(4)
    with closing(service.client(service.token(Role.VIEWER, "default"))) as reader:
        for ask in (reader.pin_checkpoint, reader.unpin_checkpoint, reader.verify_checkpoint, reader.delete_checkpoint):
            with refused("AccessDeniedException"):
                ask(**GPT, Step=4)
        with refused("AccessDeniedException"):
            reader.create_checkpoint(**GPT)
    with (
        closing(service.client(service.token(Role.SUBMITTER, "speech"))) as stranger,
        refused("ResourceNotFoundException"),
    ):
        stranger.delete_checkpoint(**GPT, SkipTrash=True, Step=4)
