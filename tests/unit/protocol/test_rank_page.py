"""A rank and its agent share a memory page. Each of them writes one half of it.

A reader sees only complete halves. A writer that dies during a write leaves the previous half readable.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from everstep.protocol.limits import MAX_RANK_STEP
from everstep.protocol.rank_messages import (
    ECHO_NO,
    ECHO_UNABLE,
    MAX_LIMIT_SECONDS,
    RANK_WORD_BYTES,
    AgentHalf,
    Phase,
    RankHalf,
    RankStanding,
    StopState,
    Vote,
    read_agent_half,
    read_rank_half,
    write_agent_half,
    write_rank_half,
)

STEPS = st.integers(-2, 2**62)
RANK_STEPS = st.integers(-1, MAX_RANK_STEP)
AGENT_BYTES = struct.calcsize("<QqqqqQqQQQQqQQ")
EARLIER_AGENT = struct.Struct("<QqqqqQqQQQQ")
"""The agent's half without the sequence number, as releases without rehearsals write it."""
EARLIER_RANK = struct.Struct("<QqQqQqQQQQ")


def page() -> memoryview:
    """Return the memory of a page that was never written."""
    return memoryview(bytearray(RANK_WORD_BYTES))


@given(
    st.builds(
        AgentHalf,
        st.integers(0, 2**32),
        STEPS,
        STEPS,
        st.integers(-1, 2),
        STEPS,
        st.sampled_from(StopState),
        STEPS,
        st.sampled_from(Vote),
        rehearsal=STEPS,
        rehearsal_state=st.sampled_from(StopState),
        rehearsal_steps=st.integers(0, 2**32),
    ),
    st.builds(
        RankHalf,
        st.integers(0, 2**32 - 1),
        RANK_STEPS,
        st.sampled_from(Phase),
        RANK_STEPS,
        st.sampled_from(RankStanding),
        RANK_STEPS,
        st.integers(0, ECHO_NO),
        st.integers(0, MAX_RANK_STEP),
        st.integers(0, MAX_LIMIT_SECONDS),
        rehearsal_step=RANK_STEPS,
        rehearsal_echo=st.integers(0, ECHO_UNABLE),
    ),
)
def test_halves_come_back_and_do_not_touch_each_other(agent: AgentHalf, rank: RankHalf) -> None:
    shared = page()
    write_agent_half(shared, agent)
    write_rank_half(shared, rank)
    assert read_agent_half(shared) == agent
    assert read_rank_half(shared) == rank


def test_a_page_of_a_rank_that_knows_no_target_has_none_and_nor_has_one_that_no_json_could_carry() -> None:
    shared = page()
    write_rank_half(shared, RankHalf(1, 8))  # a rank with an older library writes no target
    assert read_rank_half(shared) == RankHalf(1, 8)
    write_rank_half(shared, RankHalf(1, 8, target=MAX_RANK_STEP + 1))
    assert read_rank_half(shared) == RankHalf(1, 8)


@pytest.mark.parametrize("field", ["boundary", "copying", "echo_step", "rehearsal_step"])
def test_a_step_that_no_training_reaches_makes_the_page_unreadable(field: str) -> None:
    shared = page()
    write_rank_half(shared, structs.replace(RankHalf(1, 8), **{field: MAX_RANK_STEP + 1}))
    assert read_rank_half(shared) is None


def test_a_limit_that_no_script_may_tell_is_none() -> None:
    shared = page()
    write_rank_half(shared, RankHalf(1, 8, Phase.WAIT, limit=MAX_LIMIT_SECONDS + 1))
    assert read_rank_half(shared) == RankHalf(1, 8, Phase.WAIT)


class Killed(Exception):
    """Raised in place of the death of a writing process."""


class DyingPage(ctypes.c_char * RANK_WORD_BYTES):  # type: ignore[misc]
    """A page whose writer dies while it stores a half's content, after `stored` bytes of the content."""

    stored = AGENT_BYTES

    def __setitem__(self, place: slice, body: bytes) -> None:  # type: ignore[override]
        super().__setitem__(slice(place.start, place.start + self.stored), body[: self.stored])
        raise Killed


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("stored", [0, 30, AGENT_BYTES])
def test_a_writer_that_dies_before_it_stores_the_sequence_number_leaves_the_previous_half(
    count: int, stored: int
) -> None:
    shared = page()
    for step in range(count):
        write_agent_half(shared, AgentHalf(1, step, step + 1))
    write_rank_half(shared, RankHalf(1, 8))
    dying = DyingPage.from_buffer(shared)
    dying.stored = stored
    with pytest.raises(Killed):
        write_agent_half(cast(memoryview, dying), AgentHalf(1, 7, 8))
    assert read_agent_half(shared) == AgentHalf(1, count - 1, count)
    assert read_rank_half(shared) == RankHalf(1, 8)
    write_agent_half(shared, AgentHalf(1, 9, 10))
    assert read_agent_half(shared) == AgentHalf(1, 9, 10)


@pytest.mark.parametrize("offset", [2072, 2088])
def test_a_rank_half_that_a_script_has_written_over_is_not_there(offset: int) -> None:
    shared = page()
    write_rank_half(shared, RankHalf(1, 8))
    shared[offset] = 0xEE
    assert read_rank_half(shared) is None


@pytest.mark.parametrize("offset", [48, 64])
def test_an_agent_half_of_unknown_values_is_not_there(offset: int) -> None:
    shared = page()
    write_agent_half(shared, AgentHalf(1, 8))
    shared[offset] = 0xEE
    assert read_agent_half(shared) is None


def test_a_fresh_page_reads_as_generation_zero() -> None:
    assert read_agent_half(page()) == AgentHalf(0, 0, 0, 0, 0, vote_step=0, rehearsal=0)


def test_halves_of_earlier_releases_lack_a_rehearsal_and_an_answer() -> None:
    shared = page()
    for offset, body in (
        (0, EARLIER_AGENT.pack(5, 8, 9, 1, -1, StopState.NONE, 9, Vote.ACKED, 2, 3, 0)),
        (RANK_WORD_BYTES // 2, EARLIER_RANK.pack(5, 8, Phase.TRAIN, -1, RankStanding.MOVING, -1, 0, 10, 0, 7)),
    ):
        shared[offset : offset + 8 + len(body)] = (1).to_bytes(8, "little") + body
    agent, rank = read_agent_half(shared), read_rank_half(shared)
    assert agent == AgentHalf(5, 8, 9, 1, vote_step=9, vote=Vote.ACKED, load=2, verified=3, rehearsal=0)
    assert agent.rehearsal_state is StopState.NONE
    assert rank == RankHalf(5, 8, Phase.TRAIN, target=10, first_passed=7, rehearsal_step=0)
    assert (rank.rehearsal_echo, rank.resume_revision) == (0, 0)


@pytest.mark.timeout(30)
def test_a_reader_beside_a_writer_sees_whole_halves_only() -> None:
    shared = page()
    write_rank_half(shared, RankHalf(0, 0, copying=0, echo_step=0))
    stop = threading.Event()

    def write() -> None:
        count = 0
        while not stop.is_set():
            count += 1
            write_rank_half(shared, RankHalf(count, count, copying=count, echo_step=count))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(20_000):
            half = read_rank_half(shared)
            assert half is None or half.generation == half.boundary == half.copying == half.echo_step
    finally:
        stop.set()
        writer.join()
