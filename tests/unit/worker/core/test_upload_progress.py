"""The text about an upload that makes no progress names the rank and the object."""

from __future__ import annotations

from everstep.protocol.agent_messages import RunningUpload
from everstep.protocol.ids import Rank, Step
from worker.core.upload_progress import STALL_SECONDS, UploadProgress

BEGUN = UploadProgress(rank=Rank(3), step=Step(7), moved_at=0.0)


def test_each_part_and_each_attempt_is_progress() -> None:
    assert BEGUN.stall(STALL_SECONDS - 1) == ""
    assert "step 7 of rank 3" in BEGUN.stall(STALL_SECONDS)
    attempt = BEGUN.begun("s3://bucket/key", 1000, 50.0)
    assert attempt.stall(STALL_SECONDS) == ""
    stored = attempt.stored(300, 100.0).stored(200, 120.0)
    assert stored.stall(120.0 + STALL_SECONDS - 1) == ""
    assert stored.stall(120.0 + STALL_SECONDS) == (
        "the upload of step 7 of rank 3 makes no progress for 60 s to s3://bucket/key, 500 of 1,000 bytes stored; "
        "check the node's connection to S3"
    )
    assert stored.report == RunningUpload(
        rank=Rank(3), step=Step(7), object_name="s3://bucket/key", stored_bytes=500, object_bytes=1000
    )
    assert stored.begun("s3://bucket/other", 1000, 130.0).stored_bytes == 0


def test_digests_before_the_first_byte_are_progress() -> None:
    digested = BEGUN.digested(STALL_SECONDS)
    assert digested.stall(2 * STALL_SECONDS - 1) == ""
    assert digested.stall(2 * STALL_SECONDS) != ""


def test_an_upload_that_waits_for_another_rank_names_the_awaited_object() -> None:
    sent = BEGUN.begun("s3://bucket/own", 1000, 10.0).stored(1000, 20.0)
    waiting = sent.waiting("s3://bucket/a", 30.0)
    assert waiting.waiting("s3://bucket/a", 80.0).stall(90.0) == (
        "the upload of step 7 of rank 3 has waited 60 s for s3://bucket/a, which another rank writes; "
        "check the uploads of the other ranks"
    )
    assert waiting.waiting("s3://bucket/b", 80.0).stall(90.0) == ""
    assert "check the node's connection" in waiting.begun("s3://bucket/a", 10, 90.0).stall(150.0)
