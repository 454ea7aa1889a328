"""Input that is nested deeper than a decoder recurses is refused with the errors of the protocol."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

import msgspec
import pytest

from everstep.protocol.codec import LENGTH, decode, encode
from everstep.protocol.errors import CorruptObject, CorruptSlot, MalformedMessage
from everstep.protocol.ids import Generation, JobName, Rank, RunId
from everstep.protocol.log_chunks import ChunkHead, decode_chunk, decode_lines, encode_head
from everstep.protocol.parity import Contribution, pack_contributions, unpack_contributions
from everstep.protocol.rank_messages import RankHello
from everstep.protocol.safetensors import plan_restore
from everstep.protocol.slot import TensorEntry, unpack_index
from everstep.protocol.slot_values import values_of

DEPTH = 200_000
HELLO = RankHello(job=JobName("job"), run=RunId("0" * 32), generation=Generation(1), rank=Rank(0), pid=1)
SHARD = Contribution(
    rank=Rank(0), payload_bytes=1, digest=bytes(16), layout_hash=bytes(16), index_offset=0, index_bytes=1
)
ENTRY = msgspec.msgpack.encode(TensorEntry("a", "float32", (1,), 0, 4))
PACKED = b"\x91" * DEPTH + b"\xc0"
JSON = b'{"x":' + b"[" * DEPTH + b"]" * DEPTH + b"}"


def with_field(packed: bytes, at: int = 0) -> bytes:
    """Add a deeply nested field, which no version defines, to a packed map of at most 14 fields."""
    return packed[:at] + bytes([packed[at] + 1]) + packed[at + 1 :] + b"\xa1x" + PACKED


@pytest.mark.security
@pytest.mark.parametrize(
    ("read", "refusal"),
    [
        (lambda: decode(with_field(encode(HELLO), 2), RankHello), MalformedMessage),
        (lambda: unpack_index(b"\x81\xa7tensors\x91" + bytes([ENTRY[0] + 1]) + ENTRY[1:] + PACKED, 64), CorruptSlot),
        (lambda: plan_restore(JSON, LENGTH.size + len(JSON)), CorruptObject),
        (lambda: unpack_contributions(b"\x91" + with_field(pack_contributions([SHARD])[1:])), MalformedMessage),
        (lambda: decode_lines(JSON), MalformedMessage),
    ],
)
def test_deep_nesting_is_refused(read: Callable[[], object], refusal: type[Exception]) -> None:
    with pytest.raises(refusal):
        read()


@pytest.mark.security
def test_deep_nesting_in_values_and_log_rows_ends_what_can_be_read() -> None:
    assert values_of(with_field(b"\x80")).pretrained == {}
    head = ChunkHead(first=7, positions={})
    assert decode_chunk(encode_head(head) + JSON + b"\n") == (head, [], len(encode_head(head)))


@pytest.mark.security
def test_a_log_line_of_an_impossible_time_is_refused() -> None:
    latest, row = (msgspec.json.encode({"t": at, "r": 0, "s": "stdout", "b": 1, "m": "text"}) for at in (2**43, 2**53))
    assert datetime.fromtimestamp(decode_lines(latest)[0].at_ms / 1000, UTC).year == 2248
    head = ChunkHead(first=7, positions={})
    with pytest.raises(MalformedMessage):
        decode_lines(row)
    assert decode_chunk(encode_head(head) + row + b"\n")[1] == []
