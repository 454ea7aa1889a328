"""Makes payloads and headers of slots with given tensors, for storage tests."""

from __future__ import annotations

from collections.abc import Collection

from everstep.protocol.ids import Generation, JobName, Rank, RunId, Step
from everstep.protocol.slot import SlotHeader, SlotIndex, SlotState, TensorEntry, align, pack_index, payload_digest

JOB = JobName("job")
RUN = RunId("ab" * 16)
Tensors = list[tuple[str, str, tuple[int, ...], bytes]]
"""Name, dtype, shape and bytes of each tensor."""


def payload_of(
    tensors: Tensors, values: bytes = b"values", slack: int = 0, frozen: Collection[str] = ()
) -> tuple[bytes, int, int]:
    """Return a payload, the offset of its index, and the length of its index.

    The tensors with the names in `frozen` are declared frozen.
    """
    entries, data = [], bytearray()
    for name, dtype, shape, content in tensors:
        data += bytes(align(len(data)) - len(data))
        entries.append(TensorEntry(name, dtype, shape, len(data), len(content), is_frozen=name in frozen))
        data += content
    data += bytes(align(len(data)) - len(data) + slack)
    index = pack_index(SlotIndex(tensors=tuple(entries), values=values))
    offset = len(data)
    return bytes(data) + index, offset, len(index)


def header_of(payload: bytes, offset: int, size: int, *, rank: int = 0, step: int = 7, origin: int = 2) -> SlotHeader:
    """Return the header of a sealed slot."""
    return SlotHeader(
        job=JOB,
        run=RUN,
        owner_rank=Rank(rank),
        origin_generation=Generation(origin),
        step=Step(step),
        state=SlotState.SEALED,
        capacity_bytes=len(payload),
        payload_bytes=len(payload),
        index_offset=offset,
        index_bytes=size,
        payload_digest=payload_digest(payload),
        layout_hash=bytes(range(16)),
    )
