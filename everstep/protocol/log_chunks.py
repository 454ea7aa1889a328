"""What ranks print, as it is kept and sent: lines with their time, in chunks, one writer per node and generation.

    <log key>gen=<g>/node=<node id>/<first>-<milliseconds>.jsonl                a chunk, by the node itself
    <log key>gen=<g>/node=<node id>/<first>-<milliseconds>.<holder>.jsonl       a tail, by a node that holds its shards

    {"first":120,"positions":{"0.stdout":9118,…}}             the head: number of the first line; how far each stream was read before it
    {"t":1763672500123,"r":0,"s":"stdout","m":"…","b":9135}   a line: time in ms, rank, stream, text, where it ends in its stream
    {"t":1763672590001,"r":-1,"s":"end","m":"","b":0}         the last line of a node that has shipped everything

A node numbers its lines of a generation 0, 1, 2 …, whatever rank they are of; so one number says how far somebody has
read a node. A chunk grows until it is long or old enough and is stored again each time; what was stored of it never
changes.

A tail has the node's newest lines. Chunks may have some or all of them: a holder stores a tail whenever the generation
ends, for the node may be lost. Readers take from tails what the chunks of a lost node lack. Lines between the two are
lost.

Invariant: times of one node and generation never decrease; a line number means the same line for ever.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from everstep.protocol.ids import NodeId, Rank

FLUSH_SECONDS: Final = 1.0
"""`log_flush_seconds`: how much of its ranks' output a node that is lost takes with it at most, while the object store can be reached."""
LINE_BYTES: Final = 16 * 1024
"""A longer line is kept in pieces."""
NO_RANK: Final = Rank(-1)
SUFFIX: Final = ".jsonl"


class ChunkHead(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of a chunk."""

    first: int
    positions: dict[str, int]
    """By `<rank>.<stream>`, bytes."""


class LogLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line, or a piece of a long one."""

    at_ms: int = msgspec.field(name="t")
    """Unix time at which it was read."""
    rank: Rank = msgspec.field(name="r")
    stream: Literal["stdout", "stderr", "end"] = msgspec.field(name="s")
    """`end`: nothing follows."""
    text: str = msgspec.field(name="m")
    """Without its line feed; what is not UTF-8 is U+FFFD."""
    end: int = msgspec.field(name="b")
    """Byte after it in its stream."""
    is_piece: bool = msgspec.field(name="p", default=False)
    """The line goes on."""
    is_gap: bool = msgspec.field(name="g", default=False)
    """The node could not keep what was here; the text says how much."""


@dataclass(frozen=True, slots=True, order=True)
class ChunkName:
    """What the name of a chunk says."""

    node_id: NodeId
    first: int
    at_ms: int
    """No line of it is older."""

    @property
    def path(self) -> str:
        """Return the name below `gen=<g>/`."""
        return f"node={self.node_id}/{self.first:012d}-{self.at_ms}{SUFFIX}"


@dataclass(frozen=True, slots=True, order=True)
class TailName:
    """What the name of a tail says."""

    node_id: NodeId
    """Whose lines they are."""
    first: int
    at_ms: int
    """No line of it is older."""
    holder: NodeId
    """Who has stored it."""

    @property
    def path(self) -> str:
        """Return the name below `gen=<g>/`."""
        return f"node={self.node_id}/{self.first:012d}-{self.at_ms}.{self.holder}{SUFFIX}"


_encoder = msgspec.json.Encoder()
_heads = msgspec.json.Decoder(ChunkHead)
_lines = msgspec.json.Decoder(LogLine)


def parse_name(path: str) -> ChunkName | None:
    """Return what a name below `gen=<g>/` says, or None if it is no chunk's."""
    node, _, file = path.partition("/")
    first, _, at = file.removesuffix(SUFFIX).partition("-")
    is_chunk = node.startswith("node=") and file.endswith(SUFFIX) and first.isdecimal() and at.isdecimal()
    return ChunkName(NodeId(node.removeprefix("node=")), int(first), int(at)) if is_chunk else None


def parse_tail(path: str) -> TailName | None:
    """Return what a name below `gen=<g>/` says, or None if it is no tail's."""
    node, _, file = path.partition("/")
    stem, _, holder = file.removesuffix(SUFFIX).partition(".")
    chunk = parse_name(f"{node}/{stem}{SUFFIX}") if holder and file.endswith(SUFFIX) else None
    return TailName(chunk.node_id, chunk.first, chunk.at_ms, NodeId(holder)) if chunk is not None else None


def encode_head(head: ChunkHead) -> bytes:
    """Return the first line of a chunk."""
    return _encoder.encode(head) + b"\n"


def encode_lines(lines: Iterable[LogLine]) -> bytes:
    """Return lines as they are appended to a chunk."""
    return b"".join(_encoder.encode(line) + b"\n" for line in lines)


def decode_lines(data: bytes) -> list[LogLine]:
    """Return lines without a head.

    Args:
        data: as `encode_lines` made it.

    Returns:
        The lines.

    Raises:
        msgspec.MsgspecError: they are not such lines.
    """
    return [_lines.decode(row) for row in data.splitlines()]


def decode_chunk(data: bytes) -> tuple[ChunkHead | None, list[LogLine], int]:
    """Return what is whole of a chunk.

    Args:
        data: as stored, or as a process that died has left it.

    Returns:
        The head, or None if not even that is whole; the lines; and how many bytes of `data` they take.
    """
    head, lines, good = None, [], 0
    for row in data.splitlines(keepends=True):
        try:
            if not row.endswith(b"\n"):
                break
            if head is None:
                head = _heads.decode(row)
            else:
                lines.append(_lines.decode(row))
        except (msgspec.MsgspecError, UnicodeDecodeError):
            break
        good += len(row)
    return head, lines, good
