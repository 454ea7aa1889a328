"""A payload is restored byte for byte from its safetensors object. Invalid objects are refused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.protocol.dtypes import ITEM_BYTES
from everstep.protocol.errors import CorruptObject, OversizedMessage
from everstep.protocol.safetensors import (
    LENGTH,
    MAX_HEADER_BYTES,
    SharedGroup,
    SharedGroups,
    encode_header,
    encode_shared_header,
    plan_restore,
    tensors_in_order,
)
from everstep.protocol.slot import (
    SlotIndex,
    TensorEntry,
    pack_index,
    payload_chunk_digests,
    payload_digest,
    unpack_index,
)
from tests.unit.worker.storage.slots import Tensors, header_of, payload_of

DTYPES = ["float32", "bfloat16", "int64", "uint8", "bool", "float64", "complex64", "quint4x2"]


@st.composite
def tensor_sets(draw: st.DrawFn) -> Tensors:
    found: Tensors = []
    for number in range(draw(st.integers(0, 6))):
        dtype = draw(st.sampled_from(DTYPES))
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
        count = 1
        for length in shape:
            count *= length
        size = count * ITEM_BYTES[dtype]
        name = draw(st.sampled_from([f"t{number}", "same", "__metadata__", "ü/…", ""]))
        found.append((name, dtype, shape, draw(st.binary(min_size=size, max_size=size))))
    return found


def to_object(tensors: Tensors, values: bytes, slack: int) -> tuple[bytes, bytes]:
    """Return a payload and the object made of it."""
    payload, offset, size = payload_of(tensors, values, slack)
    beginning = encode_header(
        header_of(payload, offset, size), payload[offset : offset + size], payload_chunk_digests(payload)
    )
    index = unpack_index(payload[offset:], offset)
    return payload, beginning + b"".join(
        payload[entry.offset : entry.offset + entry.bytes] for entry in tensors_in_order(index)
    )


def from_object(data: bytes) -> bytes:
    """Restore the payload of an object into a buffer that is full of other bytes, and return it."""
    (length,) = LENGTH.unpack_from(data)
    if length > len(data) - LENGTH.size:
        raise CorruptObject
    plan = plan_restore(data[LENGTH.size : LENGTH.size + length], len(data))
    target = bytearray(b"\xaa" * plan.payload_bytes)
    position = LENGTH.size + length
    for begin, end in plan.spans:
        target[begin:end] = data[position : position + end - begin]
        position += end - begin
    for begin, end in plan.gaps():
        target[begin:end] = bytes(end - begin)
    target[plan.index_offset : plan.index_offset + len(plan.index)] = plan.index
    assert len(target) == plan.payload_bytes
    return bytes(target)


@given(tensor_sets(), st.binary(max_size=40), st.sampled_from([0, 64, 128]))
@settings(max_examples=150)
def test_any_payload_comes_back(tensors: Tensors, values: bytes, slack: int) -> None:
    payload, data = to_object(tensors, values, slack)
    assert from_object(data) == payload


@given(tensor_sets(), st.data())
@settings(max_examples=100)
def test_what_is_cut_is_refused(tensors: Tensors, data: st.DataObject) -> None:
    _, whole = to_object(tensors, b"values", 0)
    cut = whole[: data.draw(st.integers(8, len(whole) - 1))]
    with pytest.raises(CorruptObject):
        from_object(cut)
    with pytest.raises(CorruptObject):
        from_object(whole + b"\0")


@given(st.data())
@settings(max_examples=200)
def test_a_changed_header_is_refused_or_says_itself_what_it_is(data: st.DataObject) -> None:
    """A flipped bit in the header makes the reader raise its own error, or changes only a name.

    If the reader can still parse the header, it accepts the object only if the payload's size and digest match.
    """
    payload, whole = to_object(
        [("weight", "float32", (2, 3), bytes(range(24))), ("flag", "bool", (1,), b"\1")], b"values", 64
    )
    (length,) = LENGTH.unpack_from(whole)
    changed = bytearray(whole)
    position = data.draw(st.integers(LENGTH.size, LENGTH.size + length - 1))
    changed[position] ^= 1 << data.draw(st.integers(0, 7))
    try:
        plan = plan_restore(bytes(changed[LENGTH.size : LENGTH.size + length]), len(changed))
    except CorruptObject:
        return
    if plan.payload_bytes == len(payload) and plan.payload_digest == payload_digest(payload):
        restored = from_object(bytes(changed))
        assert len(restored) == len(payload)


def test_the_object_is_what_safetensors_describes() -> None:
    _, whole = to_object([("weight", "bfloat16", (2, 3), bytes(12)), ("odd", "complex64", (2,), bytes(16))], b"", 0)
    (length,) = LENGTH.unpack_from(whole)
    header = json.loads(whole[8 : 8 + length])
    assert whole[8:9] == b"{"
    assert length % 8 == 0
    metadata = header.pop("__metadata__")
    assert all(isinstance(value, str) for value in metadata.values())
    assert metadata["step"] == "7"
    assert header == {
        "weight": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]},
        "odd": {"dtype": "U8", "shape": [16], "data_offsets": [12, 28]},
    }
    assert len(whole) == 8 + length + 28


def test_tensors_lie_in_the_order_of_their_offsets() -> None:
    entries = (TensorEntry("b", "uint8", (1,), 64, 1), TensorEntry("a", "uint8", (2,), 0, 2))
    packed = pack_index(SlotIndex(tensors=entries, values=b""))
    payload = b"ab" + bytes(62) + b"c" + bytes(63) + packed
    beginning = encode_header(header_of(payload, 128, len(packed)), packed, payload_chunk_digests(payload))
    assert from_object(beginning + b"abc") == payload


def test_a_header_beyond_the_limit_of_safetensors_is_refused() -> None:
    with pytest.raises(OversizedMessage, match=r"the header of this shard .* allows 100,000,000"):
        to_object([("w" * (MAX_HEADER_BYTES // 2), "uint8", (1,), b"1")], b"", 0)


@pytest.mark.parametrize(
    "header", [b"", b"[]", b"{}", b'{"__metadata__": {}}', b'{"__metadata__": {"everstep": "everstep-2"}}', b"\xff" * 8]
)
def test_foreign_headers_are_refused(header: bytes) -> None:
    with pytest.raises(CorruptObject):
        plan_restore(header, LENGTH.size + len(header))


@pytest.mark.parametrize(
    "changes",
    [
        {"payload_bytes": "-5"},
        {"payload_bytes": str(2**64)},
        {"index_offset": "-1"},
        {"payload_bytes": str(2**50), "index_offset": str(2**50 - 200)},
    ],
)
def test_a_header_of_a_payload_of_impossible_size_is_refused(changes: dict[str, str]) -> None:
    _, data = to_object([("weight", "uint8", (4,), b"1234")], b"values", 0)
    (length,) = LENGTH.unpack_from(data)
    header = json.loads(data[LENGTH.size : LENGTH.size + length])
    header["__metadata__"] |= changes
    text = json.dumps(header).encode()
    with pytest.raises(CorruptObject):
        plan_restore(text, LENGTH.size + len(text) + 4)


FROZEN: Tensors = [
    ("base", "float32", (4,), bytes(range(16))),
    ("lora", "float32", (2,), bytes(8)),
    ("head", "uint8", (3,), b"abc"),
]


def frozen_objects() -> tuple[bytes, bytes, bytes]:
    """Return a payload, the shard's object without the tensors `base` and `head`, and their frozen object."""
    payload, offset, size = payload_of(FROZEN, frozen=("base", "head"))
    entries = tensors_in_order(unpack_index(payload[offset:], offset))
    beginning = encode_shared_header([entries[0], entries[2]])
    shared = beginning + FROZEN[0][3] + FROZEN[2][3]
    group = SharedGroup(
        sha256=hashlib.sha256(shared).hexdigest(),
        object_bytes=len(shared),
        data_begin=len(beginning),
        tensors=(0, 2),
    )
    header = encode_header(
        header_of(payload, offset, size),
        payload[offset:],
        payload_chunk_digests(payload),
        SharedGroups(frozen=(group,)),
    )
    return payload, header + FROZEN[1][3], shared


def test_a_payload_comes_back_from_its_object_and_a_frozen_object() -> None:
    payload, own, shared = frozen_objects()
    (length,) = LENGTH.unpack_from(own)
    plan = plan_restore(own[LENGTH.size : LENGTH.size + length], len(own))
    target = bytearray(b"\xaa" * plan.payload_bytes)
    (frozen,) = plan.shared
    for data, position, spans in (
        (own, LENGTH.size + length, plan.spans),
        (shared, frozen.group.data_begin, frozen.spans),
    ):
        for begin, end in spans:
            target[begin:end] = data[position : position + end - begin]
            position += end - begin
    for begin, end in plan.gaps():
        target[begin:end] = bytes(end - begin)
    target[plan.index_offset : plan.index_offset + len(plan.index)] = plan.index
    assert target == payload


def test_a_frozen_object_is_a_safetensors_file_that_names_its_tensors_only() -> None:
    _, _, shared = frozen_objects()
    (length,) = LENGTH.unpack_from(shared)
    assert json.loads(shared[8 : 8 + length]) == {
        "base": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
        "head": {"dtype": "U8", "shape": [3], "data_offsets": [16, 19]},
    }


@pytest.mark.parametrize(
    ("place", "change"),
    [
        ("everstep", lambda _: "everstep-2"),
        ("frozen", lambda _: ""),
        ("frozen", lambda _: "{}"),
        ("frozen", lambda text: text.replace("[0,2]", "[2,0]")),
        ("frozen", lambda text: text.replace("[0,2]", "[0,3]")),
        ("frozen", lambda text: text.replace("[0,2]", "[-1,2]")),
        ("frozen", lambda text: text.replace("[0,2]", "[0,1]")),
        ("frozen", lambda text: text.replace("[0,2]", "[]")),
        ("frozen", lambda text: text.replace('"data_begin":', '"data_begin":1')),
        ("frozen", lambda text: text.replace('"sha256":"', '"sha256":"../')),
        ("frozen", lambda text: f"[{text[1:-1]},{text[1:-1]}]"),
        ("everstep", lambda _: "everstep-4"),
    ],
)
def test_a_header_with_wrong_frozen_groups_is_refused(place: str, change: Callable[[str], str]) -> None:
    _, own, _ = frozen_objects()
    (length,) = LENGTH.unpack_from(own)
    header = json.loads(own[LENGTH.size : LENGTH.size + length])
    before = header["__metadata__"][place]
    header["__metadata__"][place] = change(before)
    assert header["__metadata__"][place] != before
    text = json.dumps(header, separators=(",", ":")).encode()
    with pytest.raises(CorruptObject):
        plan_restore(text, LENGTH.size + len(text) + 8)


def test_frozen_and_replicated_groups_lie_in_different_folders_and_share_no_tensor() -> None:
    payload, offset, size = payload_of(FROZEN)
    header = header_of(payload, offset, size)
    first, second = (
        SharedGroup(sha256=name * 64, object_bytes=108 + size, data_begin=108, tensors=(number,))
        for name, number, size in (("a", 0, 16), ("b", 2, 3))
    )

    def beginning(groups: SharedGroups) -> bytes:
        return encode_header(header, payload[offset:], payload_chunk_digests(payload), groups)

    groups = SharedGroups(frozen=(first,), replicated=(second,))
    text = beginning(groups)[LENGTH.size :]
    plan = plan_restore(text, LENGTH.size + len(text) + 8)
    shard_key = "x/run=1/gen=2/step=3/u/rank=0.safetensors"
    assert [each.key(shard_key) for each in plan.shared] == [
        f"x/run=1/frozen/{'a' * 64}.safetensors",
        f"x/run=1/gen=2/step=3/replicated/{'b' * 64}.safetensors",
    ]
    assert json.loads(text)["__metadata__"]["everstep"] == "everstep-4"
    text = beginning(SharedGroups(frozen=(first,), replicated=(first,)))[LENGTH.size :]
    with pytest.raises(CorruptObject, match="same tensor"):
        plan_restore(text, LENGTH.size + len(text) + 11)
