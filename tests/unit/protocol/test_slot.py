"""Slot headers and indexes decode to the values that were encoded. Invalid bytes are refused."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.protocol import slot
from everstep.protocol.errors import CorruptSlot, UnknownVersion
from everstep.protocol.ids import Generation, JobName, Rank, RunId, Step
from everstep.protocol.peer_messages import MAX_PEER_MESSAGE_BYTES
from everstep.protocol.slot import (
    HEADER_BYTES,
    SlotHeader,
    SlotIndex,
    SlotState,
    TensorEntry,
    align,
    digest,
    pack_header,
    pack_index,
    unpack_header,
    unpack_index,
)

HEADER = SlotHeader(
    job=JobName("gpt"),
    run=RunId("ab" * 16),
    owner_rank=Rank(3),
    origin_generation=Generation(2),
    step=Step(41),
    state=SlotState.SEALED,
    capacity_bytes=4096,
    payload_bytes=1000,
    index_offset=640,
    index_bytes=360,
    payload_digest=b"d" * 16,
    layout_hash=b"l" * 16,
)


def forged(offset: int, value: bytes) -> bytes:
    """Return the bytes of a slot header that differs from `HEADER` at `offset`, with a matching header digest."""
    page = bytearray(pack_header(HEADER))
    page[offset : offset + len(value)] = value
    page[176:192] = digest(page[:176])
    return bytes(page)


@given(
    st.sampled_from(SlotState),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**63),
    st.integers(0, 2**32 - 1),
    st.tuples(*[st.integers(0, 2**60)] * 4),
    st.binary(min_size=16, max_size=16),
    st.from_regex(r"\A[a-zA-Z0-9]{1,63}\Z"),
)
def test_any_sound_header_comes_back(
    state: SlotState, rank: int, step: int, origin: int, sizes: tuple[int, int, int, int], marks: bytes, job: str
) -> None:
    a, b, c, d = sizes
    header = SlotHeader(
        job=JobName(job),
        run=RunId(marks.hex()),
        owner_rank=Rank(rank),
        origin_generation=Generation(origin),
        step=Step(step),
        state=state,
        capacity_bytes=a + b + c + d,
        payload_bytes=a + b + c,
        index_offset=a,
        index_bytes=b,
        payload_digest=marks,
        layout_hash=marks[::-1],
    )
    assert unpack_header(pack_header(header)) == header


@pytest.mark.parametrize("byte", range(192))
def test_a_flipped_bit_anywhere_makes_it_void(byte: int) -> None:
    page = bytearray(pack_header(HEADER))
    page[byte] ^= 0x10
    with pytest.raises(CorruptSlot):
        unpack_header(bytes(page))


def test_a_torn_write_makes_it_void() -> None:
    old, new = pack_header(HEADER), pack_header(replace(HEADER, step=Step(42), state=SlotState.WRITING))
    for cut in range(1, 192):
        page = new[:cut] + old[cut:]
        if page not in (old, new):
            with pytest.raises(CorruptSlot):
                unpack_header(page)


def test_a_short_page_and_zeros_are_void() -> None:
    with pytest.raises(CorruptSlot):
        unpack_header(pack_header(HEADER)[: HEADER_BYTES - 1])
    with pytest.raises(CorruptSlot, match="magic"):
        unpack_header(bytes(HEADER_BYTES))


def test_an_unknown_version_is_told_from_damage() -> None:
    with pytest.raises(UnknownVersion, match="version 3"):
        unpack_header(forged(8, (3).to_bytes(2, "little")))


@pytest.mark.parametrize(
    ("offset", "value", "what"),
    [
        (10, b"\x03", "state 3"),
        (32, (999).to_bytes(8, "little"), "bounds"),
        (40, (5000).to_bytes(8, "little"), "bounds"),
        (48, (641).to_bytes(8, "little"), "bounds"),
        (56, (361).to_bytes(8, "little"), "bounds"),
        (48, (2**64 - 1).to_bytes(8, "little"), "bounds"),
    ],
)
def test_what_a_true_digest_covers_is_checked_all_the_same(offset: int, value: bytes, what: str) -> None:
    with pytest.raises(CorruptSlot, match=what):
        unpack_header(forged(offset, value))


@pytest.mark.parametrize("header", [replace(HEADER, job=JobName("ä" * 33)), replace(HEADER, run=RunId("ab"))])
def test_what_does_not_fit_is_not_packed(header: SlotHeader) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        pack_header(header)


def index(*entries: TensorEntry, version: int = 1) -> bytes:
    return pack_index(SlotIndex(tensors=entries, values=b"v", version=version))


def entry(offset: int, size: int, name: str = "w") -> TensorEntry:
    """Return an index entry of one tensor of bytes."""
    return TensorEntry(name=name, dtype="uint8", shape=(size,), offset=offset, bytes=size)


def test_an_index_comes_back() -> None:
    packed = index(entry(64, 10, "b"), entry(0, 64, "a"), entry(128, 0, "nothing"))
    assert [each.name for each in unpack_index(packed, 128).tensors] == ["b", "a", "nothing"]


@pytest.mark.parametrize(
    ("packed", "what"),
    [
        (index(entry(0, 129)), "does not fit"),
        (index(entry(0, 65), entry(64, 1)), "overlaps"),
        (index(entry(1, 1)), "does not fit"),
        (index(entry(-64, 64)), "does not fit"),
        (index(entry(0, -1)), "does not fit"),
        (b"", "decode"),
        (b"\xc1", "decode"),
        (index(entry(0, 1)) + b"\x00", "decode"),
        (msgspec.msgpack.encode({"tensors": [], "values": b"", "surprise": 1}), "decode"),
        (msgspec.msgpack.encode({"tensors": [["w", "uint8", [1], "0", 1]], "values": b""}), "decode"),
    ],
)
def test_an_index_that_contradicts_itself_is_refused(packed: bytes, what: str) -> None:
    with pytest.raises(CorruptSlot, match=what):
        unpack_index(packed, 128)


def shaped(dtype: str, shape: tuple[int, ...], size: int) -> bytes:
    """Return a packed index of one tensor at offset 0."""
    return index(TensorEntry(name="w", dtype=dtype, shape=shape, offset=0, bytes=size))


@pytest.mark.parametrize(
    ("dtype", "shape", "size"),
    [
        ("float32", (4, 8), 128),
        ("bfloat16", (), 2),
        ("complex128", (1, 2, 3), 96),
        ("int64", (0, 2**40), 0),
        ("bool", (1,) * 64, 1),
    ],
)
def test_a_tensor_of_the_size_of_its_shape_is_taken(dtype: str, shape: tuple[int, ...], size: int) -> None:
    (tensor,) = unpack_index(shaped(dtype, shape, size), 128).tensors
    assert (tensor.dtype, tensor.shape, tensor.bytes) == (dtype, shape, size)


@pytest.mark.parametrize(
    ("dtype", "shape", "size"),
    [
        ("float32", (4, 8), 124),
        ("float32", (4, 8), 32),
        ("uint8", (64,), 63),
        ("uint8", (), 0),
        ("uint8", (0,), 1),
        ("uint8", (-8, -8), 64),
        ("uint8", (-1,), 64),
        ("uint8", (0, -1), 0),
        ("uint8", (2**62, 2**62, 16), 0),
        ("float64", (0, 2**62), 0),
        ("uint8", (0, 2**63), 0),
        ("uint8", (2**32, 2**32), 0),
        ("uint8", (1,) * 65, 1),
        ("float31", (1,), 4),
        ("", (1,), 1),
        ("Tensor", (1,), 1),
    ],
)
def test_a_tensor_of_another_size_than_its_shape_is_refused(dtype: str, shape: tuple[int, ...], size: int) -> None:
    with pytest.raises(CorruptSlot, match=r"tensor 'w': .* bytes do not match"):
        unpack_index(shaped(dtype, shape, size), 128)


def test_a_shape_of_millions_of_dimensions_costs_nothing() -> None:
    with pytest.raises(CorruptSlot, match="0 bytes do not match"):
        unpack_index(shaped("uint8", (2**62,) * 1_000_000, 0), 128)


def test_an_index_of_another_version_is_refused() -> None:
    with pytest.raises(UnknownVersion):
        unpack_index(index(version=2), 0)


def test_an_oversized_index_is_refused() -> None:
    with pytest.raises(CorruptSlot, match=f"{slot.MAX_INDEX_BYTES + 1} bytes"):
        unpack_index(bytes(slot.MAX_INDEX_BYTES + 1), 0)


@given(st.binary(max_size=200), st.integers(0, 1000))
def test_any_bytes_at_all_are_an_index_or_refused(data: bytes, size: int) -> None:
    try:
        unpack_index(data, size)
    except (CorruptSlot, UnknownVersion):
        return


@pytest.mark.parametrize(("offset", "aligned"), [(0, 0), (1, 64), (63, 64), (64, 64), (65, 128)])
def test_alignment(offset: int, aligned: int) -> None:
    assert align(offset) == aligned


SEVERAL_CHUNKS = random.Random(1).randbytes(2 * slot.CHUNK_BYTES + 300)
NEAR_CHUNK_ENDS = st.builds(
    lambda chunk, offset: chunk * slot.CHUNK_BYTES + offset, st.integers(0, 2), st.integers(-300, 300)
)


@given(size=NEAR_CHUNK_ENDS, cuts=st.lists(NEAR_CHUNK_ENDS, max_size=8))
def test_a_payload_that_comes_in_pieces_has_the_digest_of_the_whole(size: int, cuts: list[int]) -> None:
    data = memoryview(SEVERAL_CHUNKS)[: max(0, size)]
    hasher = slot.ShardHasher(len(data))
    places = [0, *sorted(min(max(0, cut), len(data)) for cut in cuts), len(data)]
    for begin, end in itertools.pairwise(places):
        hasher.update(data[begin:end])
    assert hasher.digest() == slot.payload_digest(data)
    chunks = [data[begin : begin + slot.CHUNK_BYTES] for begin in range(0, len(data), slot.CHUNK_BYTES)]
    assert slot.payload_chunk_digests(data) == b"".join(map(slot.digest, chunks))


def test_the_chunks_of_a_large_payload_are_hashed_at_their_size() -> None:
    hasher = slot.ShardHasher(slot.MAX_CHUNKS * slot.CHUNK_BYTES + 1)
    double = SEVERAL_CHUNKS[: 2 * slot.CHUNK_BYTES]
    hasher.update(double)
    assert hasher.digests() == slot.digest(double)


@pytest.mark.parametrize("size", [1, slot.CHUNK_BYTES, 128 << 30, (128 << 30) + 1, 40 << 40])
def test_the_chunks_of_any_payload_cover_it_and_their_digests_fit_into_a_message(size: int) -> None:
    count = slot.chunk_count(size)
    assert count <= slot.MAX_CHUNKS
    assert slot.DIGEST_BYTES * count < MAX_PEER_MESSAGE_BYTES
    ranges = [slot.chunk_range(index, size) for index in range(count)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == size
    assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(ranges))
    assert max(end - begin for begin, end in ranges) <= slot.MAX_CHUNK_BYTES
