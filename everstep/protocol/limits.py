"""Defines the limits of the values in messages: a length for text, bytes and lists, and a range for numbers.

Each limit is above what an honest sender can send. A sender cuts text of unknown length with `cut`.

    class of text     characters
    Name              visible ASCII: codes and ids
    Id                any; `agent_messages` checks the ids that the control plane stores
    all others        any, because ranks, users and AWS write them. Readers must neutralize them for display

A pattern costs as much time as ten other fields, so only fields of rare messages have one.

Invariant: every field of every message from an agent, a rank or a peer has one of these types, or the type of an
identifier or of a byte string of fixed length.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Final, TypeAlias

from msgspec import Meta

MAX_NAME_CHARACTERS: Final = 64
"""The size of the database's columns."""
MAX_TEXT_CHARACTERS: Final = 8192
MAX_LONG_TEXT_CHARACTERS: Final = 16 * 1024
"""Limits stacks, a rank's last lines, and one printed line."""
MAX_PATH_CHARACTERS: Final = 4096
MAX_ITEMS: Final = 1 << 16
MAX_RANKS_PER_NODE: Final = 64
MAX_FAULTS: Final = 256

MAX_STEP: Final = 2**52
MAX_RANK_STEP: Final = 2**48
"""Largest step from a rank. Sums of such steps stay below MAX_STEP."""

if TYPE_CHECKING:
    Id = str
    RankNumber = int
    GenerationNumber = int
    StepNumber = int
    PageStep = int
else:
    Id = Annotated[str, Meta(max_length=MAX_NAME_CHARACTERS, extra={"is_id": True})]
    RankNumber = Annotated[int, Meta(ge=-1, le=2**32 - 1)]
    GenerationNumber = Annotated[int, Meta(ge=-1, le=2**32 - 1)]
    StepNumber = Annotated[int, Meta(ge=-1, le=MAX_STEP)]
    PageStep = Annotated[int, Meta(ge=-1, le=MAX_RANK_STEP)]
"""The header of a slot has 32 bits per rank and generation."""

VISIBLE: Final = r"\A[!-~]*\Z"
Name: TypeAlias = Annotated[str, Meta(max_length=MAX_NAME_CHARACTERS, pattern=VISIBLE)]
Address: TypeAlias = Annotated[
    str,
    Meta(
        max_length=45,
        pattern=r"\A(?:(?:(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])(?:\.(?!\Z)|\Z)){4}|(?=.*:.*:)[0-9A-Fa-f:.]+\Z)",
    ),
]
"""An IPv4 address, or an IPv6 address without a zone."""
Text: TypeAlias = Annotated[str, Meta(max_length=MAX_TEXT_CHARACTERS, extra={"is_text": True})]
LongText: TypeAlias = Annotated[str, Meta(max_length=MAX_LONG_TEXT_CHARACTERS, extra={"is_text": True})]
Path: TypeAlias = Annotated[str, Meta(max_length=MAX_PATH_CHARACTERS, extra={"is_text": True})]
"""A path, the name of a device or a metric, or an S3 object's bucket, key, ETag or URI."""
HexDigest: TypeAlias = Annotated[str, Meta(max_length=64, extra={"is_text": True})]
"""A SHA-256, or empty. The caller must compare it with a digest of the content."""

Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**53)]
"""Every JSON reader represents it exactly."""
Word: TypeAlias = Annotated[int, Meta(ge=0, extra={"is_word": True})]
"""Any unsigned integer of 64 bits."""
SlotNumber: TypeAlias = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
"""Index in a list; -1: none."""
Port: TypeAlias = Annotated[int, Meta(ge=0, le=2**16 - 1)]
ExitCode: TypeAlias = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=1e9)]
"""A duration, or a time of a monotonic clock."""
Microseconds: TypeAlias = Annotated[int, Meta(ge=0, le=10**15)]
UnixSeconds: TypeAlias = Annotated[float, Meta(ge=0, le=2.0**33)]
"""A Unix time that `datetime` and the database can hold, up to 2242."""
UnixMilliseconds: TypeAlias = Annotated[int, Meta(ge=0, le=2**43)]
"""A Unix time that `datetime` can hold, up to 2248."""
Percent: TypeAlias = Annotated[float, Meta(ge=0, le=100)]
MetricValue: TypeAlias = Annotated[float, Meta(extra={"is_any": True})]
"""Any number, also NaN and infinities, because scripts log them."""

MAX_HOLDERS: Final = 16
"""Suffices for 8 copies, and for a parity group of 15 nodes."""

MAX_CONCURRENT_UPLOADS: Final = 4
"""Limit of `MaxUploadsInFlight` of a job."""
MAX_SHARED_OBJECTS: Final = 4096
"""Maximum number of frozen objects, and of replicated objects, of one shard: those of 1 TiB of frozen parameters."""

FewItems: Final = Meta(max_length=MAX_FAULTS)
UploadItems: Final = Meta(max_length=MAX_RANKS_PER_NODE * (MAX_CONCURRENT_UPLOADS + 2))
SharedItems: Final = Meta(max_length=MAX_SHARED_OBJECTS)
RankItems: Final = Meta(max_length=MAX_RANKS_PER_NODE)
HolderItems: Final = Meta(max_length=MAX_HOLDERS)
Items: Final = Meta(max_length=MAX_ITEMS)
MessageBytes: TypeAlias = Annotated[bytes, Meta(max_length=1 << 20)]
"""Bounded by the limit of a message between agents, or from a rank."""


def cut(text: str, limit: int = MAX_TEXT_CHARACTERS) -> str:
    """Return text with at most `limit` characters and valid UTF-8: halves of surrogate pairs become escapes."""
    sendable = text[: limit + 1].encode(errors="backslashreplace").decode()
    return sendable if len(sendable) <= limit else f"{sendable[: limit - 1]}…"


def require_short(names: Iterable[str], limit: int) -> None:
    """Raise ValueError, and make the decoding of a message fail, if a name has more than `limit` characters."""
    for name in names:
        if len(name) > limit:
            raise ValueError(f"a name has more than {limit} characters")
