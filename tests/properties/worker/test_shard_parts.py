"""The parts of a shard, read one by one, form exactly the shard, for any tensors and any shared objects."""

from __future__ import annotations

import hashlib
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.protocol.plan import ObjectReference
from everstep.protocol.safetensors import SharedGroup, SharedGroups, encode_header
from everstep.protocol.slot import CHUNK_BYTES, SlotState, payload_chunk_digests
from tests.fakes.storage import MemoryObjectStore
from tests.unit.worker.storage.slots import header_of, payload_of
from worker.errors import CorruptCheckpoint
from worker.storage.shard_parts import ShardParts

RUN_FOLDER = "jobs/job/checkpoints/run=r/"
WHERE = ObjectReference(bucket="bucket", key=f"{RUN_FOLDER}gen=1/step=7/ab12/rank=0.safetensors")


RANDOM = random.Random(1).randbytes(2 * CHUNK_BYTES + 700)
SIZES = st.integers(0, 700) | st.integers(-700, 700).map(lambda offset: CHUNK_BYTES + offset)


@settings(max_examples=25)
@given(
    sizes=st.lists(SIZES, min_size=1, max_size=8).filter(lambda sizes: sum(sizes) < 5 * CHUNK_BYTES),
    is_frozen=st.lists(st.booleans(), min_size=8, max_size=8),
    slack=st.integers(0, 3).map(lambda count: 64 * count),
    ready=st.integers(0, 500) | st.integers(0, 4 * CHUNK_BYTES),
    damage=st.none() | st.integers(0, 6 * CHUNK_BYTES),
)
def test_all_parts_make_the_payload_and_damage_is_found(
    sizes: list[int], is_frozen: list[bool], slack: int, ready: int, damage: int | None
) -> None:
    contents = [RANDOM[7 * number :][:size] for number, size in enumerate(sizes)]
    payload, offset, index_bytes = payload_of(
        [(f"t{number}", "uint8", (len(data),), data) for number, data in enumerate(contents)], slack=slack
    )
    chunks = payload_chunk_digests(payload)
    header = replace(header_of(payload, offset, index_bytes), state=SlotState.SEALED)
    frozen = [number for number in range(len(sizes)) if is_frozen[number]]
    objects = MemoryObjectStore("bucket")
    groups: dict[str, tuple[SharedGroup, ...]] = {}
    for kind, folder, numbers in (
        ("frozen", RUN_FOLDER, [number for number in frozen if number % 3]),
        (
            "replicated",
            f"{WHERE.key.rpartition('/')[0].rpartition('/')[0]}/",
            [each for each in frozen if not each % 3],
        ),
    ):
        if numbers:
            shared = b"frozen header" + b"".join(contents[number] for number in numbers)
            sha256 = hashlib.sha256(shared).hexdigest()
            groups[kind] = (
                SharedGroup(sha256=sha256, object_bytes=len(shared), data_begin=13, tensors=tuple(numbers)),
            )
            objects.put_bytes(ObjectReference(bucket="bucket", key=f"{folder}{kind}/{sha256}.safetensors"), shared)
    beginning = encode_header(header, payload[offset:], chunks, SharedGroups(**groups))
    own = b"".join(data for number, data in enumerate(contents) if number not in frozen)
    objects.put_bytes(WHERE, beginning + own)
    parts = ShardParts(WHERE, beginning[8:], len(beginning) + len(own))
    result = bytearray(b"\xaa" * len(payload))
    ready = min(ready, len(own))
    position = 0
    for begin, end in parts.plan.spans:
        count = min(end - begin, ready - position)
        result[begin : begin + count] = own[position : position + count]
        position += count
    if damage is not None and len(own) > ready:
        place = len(beginning) + ready + damage % (len(own) - ready)
        data = bytearray(objects.get_bytes(WHERE))
        data[place] ^= 1
        objects.put_bytes(WHERE, bytes(data))
        with pytest.raises(CorruptCheckpoint):
            read_all(parts, objects, result, ready)
        return
    read_all(parts, objects, result, ready)
    assert result == payload


def read_all(parts: ShardParts, objects: MemoryObjectStore, result: bytearray, ready: int) -> None:
    position = 0
    for number in range(1, parts.count + 1):
        begin, end = parts.bounds(number)
        assert begin == position
        assert all(parts.part_of(chunk) == number for chunk in parts.chunks(number))
        position = end
        with memoryview(result)[begin:end] as target:
            parts.read(objects, number, target, after=parts.data_begin + ready)
    assert position == len(result)
