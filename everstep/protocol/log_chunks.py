"""Defines how the lines that ranks print are stored: in chunks of timestamped lines, per node and generation.

    <log key>gen=<g>/node=<node id>/<first>-<milliseconds>.jsonl                a log chunk, stored by the node itself
    <log key>gen=<g>/node=<node id>/<first>-<milliseconds>.<holder>.jsonl       a tail, stored by another node

    {"first":120,"positions":{"0.stdout":9118,…}}             head
    {"t":1763672500123,"r":0,"s":"stdout","m":"…","b":9135}   line
    {"t":1763672590001,"r":-1,"s":"end","m":"","b":0}         end record: the node has stored all its lines

    first       number of the first line; its Unix time is the <milliseconds> of the key
    positions   per stream: offset in bytes at which the chunk begins
    t, r, s     Unix milliseconds, rank, stream
    m, b        text, offset of the byte after the line in its stream

A node numbers the lines of a generation 0, 1, 2 …, across all of its ranks. It stores its newest chunk repeatedly until
the chunk reaches its size or age limit. Stored lines never change.

A *tail* contains a node's newest lines, which its holders received with replicas and store when a generation ends.
Tails and chunks may overlap. Lines of a lost node between its last chunk and its first tail are lost.

Invariant: times of one node and generation never decrease, and a line number always means the same line.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from everstep.protocol.errors import UNDECODABLE, MalformedMessage
from everstep.protocol.ids import NodeId, Rank
from everstep.protocol.limits import Count, LongText, UnixMilliseconds

FLUSH_SECONDS: Final = 1.0
"""Seconds of rank output that a lost node can lose while the object store is reachable (`log_flush_seconds`)."""
LINE_BYTES: Final = 16 * 1024
"""Maximum size of a stored line. The node stores a longer line in pieces."""
SUFFIX: Final = ".jsonl"
LINE_MEMORY: Final = 128
"""Characters that limits of held lines count for each line besides its text, because a rank may print empty lines only.
"""
MAX_CHUNK_BYTES: Final = 8 * 1024 * 1024
"""Maximum size of a chunk that the control plane reads. Agents complete a chunk well below it."""


class ChunkHead(msgspec.Struct, frozen=True, kw_only=True):
    """The first row of a log chunk."""

    first: int
    positions: dict[str, int]
    """Bytes of each rank's stdout and stderr that precede the chunk, by `<rank>.<stream>`."""


class LogLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One printed line, or a piece of a long line."""

    at_ms: UnixMilliseconds = msgspec.field(name="t")
    rank: Rank = msgspec.field(name="r")
    stream: Literal["stdout", "stderr", "end"] = msgspec.field(name="s")
    """`end` marks the last record of a node."""
    text: LongText = msgspec.field(name="m")
    """The text without its line feed. Invalid UTF-8 becomes U+FFFD."""
    end: Count = msgspec.field(name="b")
    is_piece: bool = msgspec.field(name="p", default=False)
    """Whether the next record continues this line."""
    is_gap: bool = msgspec.field(name="g", default=False)
    """Whether the record replaces output that the node could not store. The text contains the amount."""
    overwrites: bool = msgspec.field(name="o", default=False)
    """Whether the rank overwrites the line, as a progress bar does. It replaces the stream's previous such line."""


@dataclass(frozen=True, slots=True, order=True)
class ChunkName:
    """The values in the object name of a log chunk."""

    node_id: NodeId
    first: int
    at_ms: int
    """Unix time. None of the chunk's lines is older."""

    @property
    def path(self) -> str:
        """Return the part of the chunk's S3 key that follows `gen=<g>/`."""
        return f"node={self.node_id}/{self.first:012d}-{self.at_ms}{SUFFIX}"


@dataclass(frozen=True, slots=True, order=True)
class TailName:
    """The values in the object name of a tail."""

    node_id: NodeId
    first: int
    at_ms: int
    """Unix time. None of the lines is older."""
    holder: NodeId

    @property
    def path(self) -> str:
        """Return the part of the tail's S3 key that follows `gen=<g>/`."""
        return f"node={self.node_id}/{self.first:012d}-{self.at_ms}.{self.holder}{SUFFIX}"


_encoder = msgspec.json.Encoder()
_heads = msgspec.json.Decoder(ChunkHead)
_lines = msgspec.json.Decoder(LogLine)


def held_characters(lines: Iterable[LogLine]) -> int:
    """Return the characters that limits of held lines count: those of the texts, and `LINE_MEMORY` for each line."""
    return sum(len(line.text) + LINE_MEMORY for line in lines)


def parse_name(path: str) -> ChunkName | None:
    """Return the parsed name of a log chunk, or None if `path`, an S3 key after `gen=<g>/`, is not a log chunk's."""
    node, _, file = path.partition("/")
    first, _, at = file.removesuffix(SUFFIX).partition("-")
    is_chunk = node.startswith("node=") and file.endswith(SUFFIX) and first.isdecimal() and at.isdecimal()
    return ChunkName(NodeId(node.removeprefix("node=")), int(first), int(at)) if is_chunk else None


def parse_tail(path: str) -> TailName | None:
    """Return the parsed name of a tail, or None if `path`, an S3 key after `gen=<g>/`, is not a tail's."""
    node, _, file = path.partition("/")
    stem, _, holder = file.removesuffix(SUFFIX).partition(".")
    chunk = parse_name(f"{node}/{stem}{SUFFIX}") if holder and file.endswith(SUFFIX) else None
    return TailName(chunk.node_id, chunk.first, chunk.at_ms, NodeId(holder)) if chunk is not None else None


def encode_head(head: ChunkHead) -> bytes:
    """Encode the head of a log chunk as the chunk's first row."""
    return _encoder.encode(head) + b"\n"


def encode_lines(lines: Iterable[LogLine]) -> bytes:
    """Encode log lines as rows of a log chunk."""
    return b"".join(_encoder.encode(line) + b"\n" for line in lines)


def decode_lines(data: bytes) -> list[LogLine]:
    """Decode the rows of a log chunk that follow its head. Raises MalformedMessage if a row is not a valid line."""
    try:
        return [_lines.decode(row) for row in data.splitlines()]
    except UNDECODABLE as error:
        raise MalformedMessage(f"a row of a log chunk is malformed: {error}") from error


def decode_chunk(data: bytes) -> tuple[ChunkHead | None, list[LogLine], int]:
    """Decode the beginning of a log chunk, whose end may be incomplete if the writing process died.

    Returns:
        The head (None if it is incomplete), the intact lines, and the number of bytes that both occupy in `data`.
    """
    head, good = None, 0
    lines: list[LogLine] = []
    for row in data.splitlines(keepends=True):
        try:
            if not row.endswith(b"\n"):
                break
            if head is None:
                head = _heads.decode(row)
            else:
                lines.append(_lines.decode(row))
        except UNDECODABLE:
            break
        good += len(row)
    return head, lines, good
