"""A read that failed is not evidence of a wrong checkpoint, a wrong input, or a faulty job."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from botocore.exceptions import ClientError

from everstep import bulk
from everstep.protocol.plan import ObjectReference, SourceArchive
from tests.fakes.storage import MemoryObjectStore
from tests.unit.worker.rank_plans import rank_plan
from tests.unit.worker.storage.test_checkpoints import CHUNKS, RANK, fetch, node, sealed, source_of
from worker.errors import StorageError, StoreDenied, StoreUnavailable
from worker.provisioning.source import SourceArchives
from worker.storage.aws import aws_errors
from worker.storage.checkpoints import upload_shard
from worker.storage.s3 import _errors


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.storage.downloads.full_jitter", lambda *_: 0.0)


async def test_a_store_that_answers_404_for_everything_proves_nothing(tmp_path: Path) -> None:
    objects = MemoryObjectStore("bucket")
    _, slot = await sealed(tmp_path / "a")
    uploaded = await upload_shard(objects, slot, CHUNKS, rank_plan(), rank=RANK)
    objects.objects["bucket"].clear()
    with pytest.raises(StorageError) as failed:
        await fetch(objects, source_of(uploaded), node(tmp_path / "b"))
    assert failed.value.obstacle is not None


def test_a_cut_answer_is_no_damage() -> None:
    with pytest.raises(StoreUnavailable), _errors(ObjectReference(bucket="b", key="k")):
        raise bulk.EndedEarly("S3 ended the response body at byte 7, the range ends at byte 9")


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("AllAccessDisabled", 403, StoreDenied),
        ("AccountProblem", 403, StoreDenied),
        ("MissingAuthenticationToken", 403, StoreDenied),
        ("RequestExpired", 400, StoreDenied),
        ("DecryptionFailure", 400, StoreDenied),
        ("TooManyRequestsException", 400, StoreUnavailable),
        ("RequestLimitExceeded", 400, StoreUnavailable),
        ("ThrottledException", 400, StoreUnavailable),
    ],
)
def test_a_store_out_of_reach_is_an_obstacle(code: str, status: int, kind: type[StorageError]) -> None:
    answer = {"Error": {"Code": code, "Message": "no"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    with pytest.raises(kind) as failed, aws_errors("secret"):
        raise ClientError(answer, "GetSecretValue")
    assert failed.value.obstacle is not None


class GarblingStore(MemoryObjectStore):
    """A store that returns other bytes for its first reads."""

    def __init__(self, *answers: bytes) -> None:
        super().__init__("bucket")
        self.answers = list(answers)

    def get_bytes(self, reference: ObjectReference) -> bytes:
        return self.answers.pop(0) if self.answers else super().get_bytes(reference)


@pytest.mark.parametrize("answers", [(b"<html>",), (b"",), (b"cut",)])
def test_one_garbled_read_does_not_refuse_the_source(tmp_path: Path, answers: tuple[bytes, ...]) -> None:
    store, place = GarblingStore(*answers), ObjectReference(bucket="bucket", key="source")
    store.put_bytes(place, b"archive")
    source = SourceArchive(object=place, sha256=hashlib.sha256(b"archive").hexdigest(), bytes=7)
    archives = SourceArchives(tmp_path, store)
    archives.keep({source.sha256})
    assert archives.get(source).read_bytes() == b"archive"


def test_two_garbled_reads_that_differ_are_an_obstacle(tmp_path: Path) -> None:
    store, place = GarblingStore(b"<html>", b"cut"), ObjectReference(bucket="bucket", key="source")
    source = SourceArchive(object=place, sha256=hashlib.sha256(b"archive").hexdigest(), bytes=7)
    archives = SourceArchives(tmp_path, store)
    archives.keep({source.sha256})
    with pytest.raises(StoreUnavailable):
        archives.get(source)
