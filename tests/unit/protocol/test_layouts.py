"""The tables in `docs/protocol.md` agree with the bytes that the code writes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from everstep.protocol import rank_messages
from everstep.protocol.codec import LENGTH, MAX_MESSAGE_BYTES, encode, frame
from everstep.protocol.ids import Generation, JobName, Rank, RunId, Step
from everstep.protocol.peer_messages import CHUNK_HEADER, MAX_PEER_MESSAGE_BYTES, Refused
from everstep.protocol.rank_messages import (
    RANK_WORD_BYTES,
    AgentHalf,
    Phase,
    RankHalf,
    RankStanding,
    StopState,
    Vote,
    write_agent_half,
    write_rank_half,
)
from everstep.protocol.slot import CHUNK_BYTES, HEADER_BYTES, SLOT_VERSION, SlotHeader, SlotState, digest, pack_header

DOCUMENT = Path(__file__).parents[3] / "docs/protocol.md"
RUN = RunId("00112233445566778899aabbccddeeff")


def table(name: str) -> list[tuple[int, int | None, str]]:
    """Return (offset, size, field) of one documented layout."""
    _, _, text = DOCUMENT.read_text().partition(f"<!-- layout: {name} -->\n")
    rows = re.findall(r"^\| (\d+) \| (\d+|…) \| (\w+) \|", text.split("\n\n")[0], re.MULTILINE)
    assert rows
    return [(int(offset), None if size == "…" else int(size), field) for offset, size, field in rows]


@pytest.mark.parametrize(
    ("name", "start", "end"), [("slot", 0, HEADER_BYTES), ("agent half", 0, 120), ("rank half", 2048, 2160)]
)
def test_tables_have_no_gaps(name: str, start: int, end: int) -> None:
    position = start
    for offset, size, field in table(name):
        assert offset == position, field
        position += size or 0
    assert position == end


def test_slot_header() -> None:
    header = SlotHeader(
        job=JobName("gpt"),
        run=RUN,
        owner_rank=Rank(0x01020304),
        origin_generation=Generation(0x05060708),
        step=Step(0x1112131415161718),
        state=SlotState.SEALED,
        capacity_bytes=1 << 40,
        payload_bytes=(1 << 40) - 5,
        index_offset=(1 << 39) + 3,
        index_bytes=77,
        payload_digest=bytes(range(16)),
        layout_hash=bytes(range(16, 32)),
    )
    page = pack_header(header)
    expected = {
        "magic": b"EVERSLOT",
        "version": SLOT_VERSION.to_bytes(2, "little"),
        "state": b"\x02",
        "owner_rank": header.owner_rank.to_bytes(4, "little"),
        "step": header.step.to_bytes(8, "little"),
        "origin_generation": header.origin_generation.to_bytes(4, "little"),
        "capacity_bytes": header.capacity_bytes.to_bytes(8, "little"),
        "payload_bytes": header.payload_bytes.to_bytes(8, "little"),
        "index_offset": header.index_offset.to_bytes(8, "little"),
        "index_bytes": header.index_bytes.to_bytes(8, "little"),
        "payload_digest": header.payload_digest,
        "layout_hash": header.layout_hash,
        "run": bytes.fromhex(RUN),
        "job": b"gpt".ljust(64, b"\0"),
        "header_digest": digest(page[:176]),
    }
    for offset, size, field in table("slot"):
        assert size is not None
        assert page[offset : offset + size] == expected.get(field, bytes(size)), field
    assert len(page) == HEADER_BYTES


HALVES = {
    "agent half": (
        AgentHalf(5, 101, 102, 1, 103, StopState.CONFIRMED, 104, Vote.ABANDON, 105, 106, 107, StopState.ANNOUNCED, 5),
        {
            "sequence": 1,
            "generation": 5,
            "committed": 101,
            "proposed": 102,
            "slot": 1,
            "stop": 103,
            "stop_state": 2,
            "vote_step": 104,
            "vote": 2,
            "load": 105,
            "verified": 106,
            "zero": 0,
            "rehearsal": 107,
            "rehearsal_state": 1,
            "rehearsal_steps": 5,
        },
    ),
    "rank half": (
        RankHalf(5, 201, Phase.CLOSE, 202, RankStanding.CLOSED, 203, 2, 204, 205, 206, 207, 3, 208),
        {
            "sequence": 1,
            "generation": 5,
            "boundary": 201,
            "phase": 5,
            "copying": 202,
            "standing": 3,
            "echo_step": 203,
            "echo": 2,
            "target": 204,
            "limit": 205,
            "first_passed": 206,
            "rehearsal_step": 207,
            "rehearsal_echo": 3,
            "resume_revision": 208,
        },
    ),
}


@pytest.mark.parametrize("name", sorted(HALVES))
def test_page_halves(name: str) -> None:
    half, expected = HALVES[name]
    page = bytearray(RANK_WORD_BYTES)
    if isinstance(half, AgentHalf):
        write_agent_half(memoryview(page), half)
    else:
        write_rank_half(memoryview(page), half)
    rows = table(name)
    assert {
        field: int.from_bytes(page[offset : offset + (size or 0)], "little", signed=True)
        for offset, size, field in rows
    } == expected
    written = {byte for offset, size, _ in rows for byte in range(offset, offset + (size or 0))}
    assert not any(page[byte] for byte in range(RANK_WORD_BYTES) if byte not in written)


@pytest.mark.parametrize("module", [rank_messages])
def test_the_module_draws_the_same_table(module: object) -> None:
    drawn = re.findall(r"^    (\d+) +(\d+) +(\w+) +(?:agent|rank)\b", module.__doc__ or "", re.MULTILINE)
    documented = [
        (str(offset), str(size), field) for name in ("agent half", "rank half") for offset, size, field in table(name)
    ]
    assert drawn == documented


def test_messages_and_frames() -> None:
    data = encode(Refused(reason=""))
    (version, _, field), (body, _, _) = table("message")
    assert field == "version"
    assert data[version:body] == b"\x00\x01"
    assert data[body:] == b"\x82\xa4type\xa7Refused\xa6reason\xa0"
    framed = frame(Refused(reason=""))
    (length, size, _), (message, _, _) = table("frame")
    assert LENGTH.size == size
    assert int.from_bytes(framed[length : length + LENGTH.size], "big") == len(data)
    assert framed[message:] == data


def test_chunks() -> None:
    (transfer, *_), (index, *_), (size, *_), _, (start, _, _) = table("chunk")
    header = CHUNK_HEADER.pack(7, 1234, 5678)
    assert len(header) == start
    assert [int.from_bytes(header[offset : offset + 4], "big") for offset in (transfer, index, size)] == [7, 1234, 5678]


def test_the_longest_frames() -> None:
    text = DOCUMENT.read_text()
    assert f"| `agent_messages.py` | {MAX_MESSAGE_BYTES >> 20} MiB |" in text
    assert f"{MAX_PEER_MESSAGE_BYTES >> 20} MiB; chunks {CHUNK_BYTES >> 20} MiB" in text
