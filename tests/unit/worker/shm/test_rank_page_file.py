"""Tests the shared-memory page between a rank and its agent, as the agent maps it.

A restarted agent continues to use the page, but each generation starts with an empty page. If a script has overwritten
a half, the agent ignores that half.
"""

from __future__ import annotations

import mmap
from typing import cast

import pytest

from everstep.protocol.rank_messages import (
    RANK_WORD_BYTES,
    AgentHalf,
    RankHalf,
    StopState,
    Vote,
    write_agent_half,
    write_rank_half,
)
from tests.unit.protocol.test_rank_page import DyingPage, Killed
from worker.shm.held_files import HeldFiles
from worker.shm.rank_page import RankPage, last_half


def as_rank(files: HeldFiles) -> memoryview:
    return memoryview(mmap.mmap(files.descriptor("word"), RANK_WORD_BYTES))


def test_a_restarted_agent_finds_its_word(files: HeldFiles) -> None:
    page = RankPage("word", files, generation=3)
    half = AgentHalf(3, 7, 8, 1, 20, StopState.CONFIRMED, 8, Vote.ACKED)
    assert page.write(half)
    assert not page.write(half)
    page.close()
    again = RankPage("word", files, generation=3)
    assert again.agent == half
    again.close()


def test_another_generation_begins_with_a_clean_page(files: HeldFiles) -> None:
    page = RankPage("word", files, generation=3)
    page.write(AgentHalf(3, 7, 8))
    write_rank_half(as_rank(files), RankHalf(3, 8))
    page.close()
    again = RankPage("word", files, generation=4)
    assert again.agent == AgentHalf(4)
    assert again.rank() == RankHalf(4)
    again.close()


def test_an_agent_that_died_while_writing_left_its_word_before(files: HeldFiles) -> None:
    page = RankPage("word", files, generation=3)
    half = AgentHalf(3, 7, 8, 1, 20, StopState.CONFIRMED, 8, Vote.ACKED)
    page.write(half)
    page.close()
    dying = DyingPage.from_buffer(as_rank(files))
    with pytest.raises(Killed):
        write_agent_half(cast(memoryview, dying), AgentHalf(3, 9, 10))
    again = RankPage("word", files, generation=3)
    assert again.agent == half
    again.close()


def test_the_last_good_half_of_a_rank_stands(files: HeldFiles) -> None:
    page = RankPage("word", files, generation=3)
    assert page.rank() == RankHalf(3)
    shared = as_rank(files)
    write_rank_half(shared, RankHalf(3, 8, copying=8))
    assert page.rank() == RankHalf(3, 8, copying=8)
    over = bytes(shared[2048:])
    shared[2048:] = b"\xee" * 2048  # overwrite a half, as a faulty script would
    assert page.rank() == RankHalf(3, 8, copying=8)
    shared[2048:] = over
    write_rank_half(shared, RankHalf(2, 99))  # this half belongs to a rank of another generation
    assert page.rank() == RankHalf(3, 8, copying=8)
    page.close(unlink=True)
    assert files.names() == []


def test_what_a_rank_leaves_is_read_without_its_agent(files: HeldFiles) -> None:
    page = RankPage("word", files, generation=3)
    assert last_half("word", files) is None, "it wrote nothing"
    shared = as_rank(files)
    write_rank_half(shared, RankHalf(3, 8))
    page.close()
    assert last_half("word", files) == RankHalf(3, 8)
    write_rank_half(shared, RankHalf(2, 99))
    assert last_half("word", files) is None, "of another generation"
    write_rank_half(shared, RankHalf(3, 9))
    shared[2048:] = b"\xee" * 2048
    assert last_half("word", files) is None, "it wrote over it"
    files.forget("word")
    assert last_half("word", files) is None, "its agent died before it had made it"
