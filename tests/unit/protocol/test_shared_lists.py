"""A connection carries a list of shared objects once per change. The receiver always restores the whole report."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.protocol.agent_messages import AgentReport, MemberPhase, MemberReport, UploadedShard
from everstep.protocol.codec import MAX_MESSAGE_BYTES, decode, encode
from everstep.protocol.errors import MalformedMessage
from everstep.protocol.ids import Generation, JobName, NodeId, Rank, RunId, Step
from everstep.protocol.manifest import SharedObject
from everstep.protocol.plan import ObjectReference
from everstep.protocol.shared_lists import SharedLists

LIST = tuple(
    SharedObject(key=f"jobs/gpt/run=1/frozen/{n:064x}.safetensors", object_bytes=1 << 28, sha256=f"{n:064x}")
    for n in range(150)
)


def upload(rank: int, step: int, frozen: tuple[SharedObject, ...], replicated: tuple[SharedObject, ...] = ()):
    return UploadedShard(
        rank=Rank(rank),
        step=Step(step),
        origin_generation=Generation(1),
        object=ObjectReference(bucket="bucket", key=f"run=1/gen=1/step={step}/u/rank={rank}.safetensors"),
        object_bytes=1,
        etag="e",
        payload_bytes=1,
        payload_digest=bytes(16),
        layout_hash=bytes(16),
        frozen=frozen,
        replicated=replicated,
    )


def report(sequence: int, *uploads: UploadedShard) -> AgentReport:
    member = MemberReport(
        job=JobName("gpt"), run=RunId("1"), generation=Generation(1), phase=MemberPhase.RUNNING, uploads=uploads
    )
    return AgentReport(node_id=NodeId("i-1"), sequence=sequence, member=member)


def test_the_list_of_eight_ranks_is_sent_once() -> None:
    sender, receiver = SharedLists(), SharedLists()
    whole = report(1, *(upload(rank, 4, LIST) for rank in range(8)))
    first, again = sender.shorten(whole), sender.shorten(whole)
    assert len(encode(whole)) > 200_000
    assert len(encode(first)) < 40_000
    assert len(encode(again)) < 4_000
    assert [receiver.complete(each) for each in (first, again)] == [whole, whole]


def test_a_new_connection_carries_the_list_again() -> None:
    whole = report(1, upload(0, 4, LIST))
    SharedLists().shorten(whole)
    sender, receiver = SharedLists(), SharedLists()
    assert receiver.complete(sender.shorten(whole)) == whole


def test_a_list_that_left_the_reports_is_sent_again() -> None:
    """If a report no longer contains a list, both ends drop the list. A later report sends it in full again."""
    sender, receiver = SharedLists(), SharedLists()
    for whole in (
        report(1, upload(0, 4, LIST)),
        report(2),
        report(3, upload(0, 8, LIST)),
        report(4, upload(0, 8, LIST)),
    ):
        assert receiver.complete(sender.shorten(whole)) == whole


def test_a_report_without_digest_is_complete() -> None:
    whole = report(1, upload(0, 4, LIST[:1]), upload(1, 4, ()))
    assert SharedLists().complete(whole) == whole


def test_lists_that_were_not_sent_are_refused() -> None:
    sent = msgspec.structs.replace(upload(0, 4, ()), lists=bytes(16))
    with pytest.raises(MalformedMessage, match="rank 0 names lists"):
        SharedLists().complete(report(1, sent))


@pytest.mark.security
def test_digests_keep_no_more_lists_than_one_message_carries() -> None:
    """A hostile agent sends another long list in each report, and names all earlier lists by digest."""
    count = MAX_MESSAGE_BYTES // len(msgspec.msgpack.encode(objects(0)))
    receiver, uploads = SharedLists(), [upload(0, 0, ())]
    for number in range(count):
        latest = msgspec.structs.replace(upload(0, number, objects(number)), lists=bytes([number]))
        receiver.complete(report(number, *uploads, latest))
        uploads.append(msgspec.structs.replace(latest, frozen=()))
    more = [msgspec.structs.replace(upload(0, count, objects(each)), lists=b"more%d" % each) for each in range(2)]
    with pytest.raises(MalformedMessage, match="do not fit one message"):
        receiver.complete(report(count, *uploads, *more))


def objects(number: int) -> tuple[SharedObject, ...]:
    return tuple(
        SharedObject(key="k" * 4096, object_bytes=1, sha256=f"{number * 256 + each:064x}") for each in range(256)
    )


@pytest.mark.security
def test_uploads_with_equal_lists_share_one_copy() -> None:
    """A hostile agent names one long list in as many uploads as a report can have."""
    first, *more = (
        msgspec.structs.replace(upload(0, step, LIST if not step else ()), lists=b"a") for step in range(384)
    )
    found = SharedLists().complete(report(1, first, *more))
    assert found.member is not None
    assert {id(each.frozen) for each in found.member.uploads} == {id(first.frozen)}
    with pytest.raises(MalformedMessage, match="length <= 384"):
        decode(encode(report(1, first, *more, first)), AgentReport)


def test_lists_of_a_newer_release_arrive_whole() -> None:
    """The digest of a newer sender covers fields that the receiver ignores, so the receiver uses it as a name only."""
    sender, receiver = SharedLists(), SharedLists()
    whole = report(1, upload(0, 4, LIST[:2]))
    for _ in range(2):
        sent = sender.shorten(whole)
        assert sent.member is not None
        renamed = [msgspec.structs.replace(each, lists=b"a newer digest") for each in sent.member.uploads]
        member = msgspec.structs.replace(sent.member, uploads=tuple(renamed))
        assert receiver.complete(msgspec.structs.replace(sent, member=member)) == whole


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 2)), max_size=4), max_size=8),
    st.sets(st.integers(0, 7)),
)
def test_the_receiver_has_every_report_whole_across_reconnections(
    reports: list[list[tuple[int, int, int]]], reconnections: set[int]
) -> None:
    sender, receiver = SharedLists(), SharedLists()
    for sequence, uploads in enumerate(reports):
        if sequence in reconnections:
            sender, receiver = SharedLists(), SharedLists()
        whole = report(sequence, *(upload(rank, 4, LIST[:some], LIST[:other]) for rank, some, other in uploads))
        assert receiver.complete(sender.shorten(whole)) == whole
