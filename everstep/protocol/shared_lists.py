"""Sends the lists of shared objects in an agent's reports once per connection, and names them by digest afterwards.

    first report     UploadedShard(frozen, replicated, lists=digest)
    later reports    UploadedShard(lists=digest), if the previous report had these lists

An agent repeats its finished uploads in every report. On a node with eight ranks, the lists can have several hundred
kilobytes.

Invariant: both ends of a connection begin without lists, and each end stores exactly the lists of the last report. The
first report of a connection contains all lists, so the receiver can always replace a digest by its list. The lists of
a report therefore fit one message, and uploads with equal lists share one copy.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import xxhash
from msgspec.structs import replace

from everstep.protocol.agent_messages import AgentReport, UploadedShard
from everstep.protocol.codec import MAX_MESSAGE_BYTES
from everstep.protocol.errors import MalformedMessage
from everstep.protocol.manifest import SharedObject

_OBJECT_BYTES = len(msgspec.msgpack.encode(SharedObject(key="", object_bytes=0, sha256="")))
_Lists = tuple[tuple[SharedObject, ...], tuple[SharedObject, ...]]


class SharedLists:
    """The lists in a connection's last report. The sender calls `shorten`, the receiver `complete`."""

    def __init__(self) -> None:
        self._known: dict[bytes, _Lists] = {}
        self._bytes: dict[bytes, int] = {}
        """Lower bounds of the sizes of received lists."""

    def shorten(self, report: AgentReport) -> AgentReport:
        """Return the report with digests for known lists. The caller must send all returned reports in order."""
        known = dict(self._known)

        def shortened(upload: UploadedShard) -> UploadedShard:
            if not (upload.frozen or upload.replicated):
                return upload
            lists = upload.frozen, upload.replicated
            digest = _digest(lists)
            is_known = digest in known
            known[digest] = used[digest] = lists
            if is_known:
                return replace(upload, frozen=(), replicated=(), lists=digest)
            return replace(upload, lists=digest)

        used: dict[bytes, _Lists] = {}
        result = _with_uploads(report, shortened)
        self._known = used
        return result

    def complete(self, report: AgentReport) -> AgentReport:
        """Return the report with all lists. Raises MalformedMessage if the last report lacked a digest, or the lists of
        this report together do not fit one message.
        """
        known, sizes = dict(self._known), dict(self._bytes)

        def completed(upload: UploadedShard) -> UploadedShard:
            if not upload.lists:
                return upload
            if upload.frozen or upload.replicated:
                # Do not verify the digest `upload.lists`. It only identifies the lists in later reports, and a newer
                # sender computes it over fields that this process ignores.
                known[upload.lists] = upload.frozen, upload.replicated
                sizes[upload.lists] = _least_bytes(known[upload.lists])
            if upload.lists not in known:
                raise MalformedMessage(f"rank {upload.rank} names lists of shared objects that were not sent")
            frozen, replicated = used[upload.lists] = known[upload.lists]
            return replace(upload, frozen=frozen, replicated=replicated, lists=b"")

        used: dict[bytes, _Lists] = {}
        result = _with_uploads(report, completed)
        self._known, self._bytes = used, {digest: sizes[digest] for digest in used}
        if sum(self._bytes.values()) > MAX_MESSAGE_BYTES:
            raise MalformedMessage("the lists of shared objects in a report do not fit one message")
        return result


def _least_bytes(lists: _Lists) -> int:
    """Return a lower bound of the size of the encoded lists."""
    return sum(_OBJECT_BYTES + len(each.key) + len(each.sha256) for some in lists for each in some)


def _with_uploads(report: AgentReport, change: Callable[[UploadedShard], UploadedShard]) -> AgentReport:
    if report.member is None or not report.member.uploads:
        return report
    uploads = tuple(change(upload) for upload in report.member.uploads)
    return replace(report, member=replace(report.member, uploads=uploads))


def _digest(lists: _Lists) -> bytes:
    return xxhash.xxh3_128_digest(msgspec.msgpack.encode(lists))
