"""Tests traces of two ranks. Rank 0 is killed in generation 1 after step 4, and training resumes from step 3."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.traces import first_beyond, highest_step, parse, read_trace, step_seconds

RANK0 = "1 3 10.0\n1 4 10.5\n2 4 20.0\n2 5 20.5\n"
RANK1 = "1 3 10.1\n2 4 20.1\n2 5 20.9\n"


def test_a_line_in_the_making_is_left_out() -> None:
    assert len(parse(RANK0 + "2 6 21")) == 4
    assert [passed.snapshots for passed in parse("2 6 21\n2 7 22 3\n")] == [0, 3]
    assert parse("2 6") == []


def test_every_rank_has_its_own_file(tmp_path: Path) -> None:
    (tmp_path / "rank0").write_text(RANK0)
    (tmp_path / "rank1").write_text(RANK1)
    assert [len(rank) for rank in read_trace(tmp_path, 2)] == [4, 3]


def test_the_gap_between_generations_is_no_step() -> None:
    assert step_seconds(parse(RANK0)) == [0.5, 0.5]


def test_highest_step_is_what_any_rank_had_passed_before() -> None:
    ranks = [parse(RANK0), parse(RANK1)]
    assert highest_step(ranks, 1) == 4
    assert highest_step(ranks, 2) == 5
    # generation 2 failed before it reached the highest step of generation 1
    assert highest_step([parse("1 9 1.0\n2 4 2.0\n")], 2) == 9
    assert highest_step([], 1) == 0


def test_new_is_a_step_that_was_never_reached_and_counts_when_the_last_rank_has_it() -> None:
    ranks = [parse(RANK0), parse(RANK1)]
    assert first_beyond(ranks, 1, 4) == 20.9
    assert first_beyond(ranks, 1, 3) == 20.1
    assert first_beyond([ranks[0], parse("1 3 10.1\n2 4 20.1\n")], 1, 4) is None


def test_steps_of_the_failed_generation_are_never_new() -> None:
    assert first_beyond([parse("1 9 1.0\n")], 1, 4) is None


@pytest.mark.parametrize("line", ["1 2\n", "a 2 1.0\n"])
def test_a_whole_line_that_is_none_is_an_error(line: str) -> None:
    with pytest.raises(ValueError, match=r"unpack|invalid literal"):
        parse(line)
