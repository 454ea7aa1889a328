"""A plan is its seed's, and promises what a bad day is."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from tests.bad_day.plan import plan, temptation
from tests.bad_day.rules import KINDS, RECOVERIES_HIT_PER_MINUTE, STRIKES_PER_KIND_PER_MINUTE, STRIKES_PER_MINUTE


@pytest.mark.parametrize("seed", range(50))
@pytest.mark.parametrize("minutes", [2.0, 10.0])
def test_a_plan_is_a_bad_day(seed: int, minutes: float) -> None:
    lines = plan(seed=seed, minutes=minutes, has_links=True)
    assert lines == plan(seed=seed, minutes=minutes, has_links=True)
    assert lines[0].kind == "pair"
    assert all(before.at_seconds <= after.at_seconds for before, after in pairwise(lines))
    assert lines[-1].at_seconds <= minutes * 60
    counts = Counter(line.kind for line in lines)
    counts["instances"] += 2 * counts.pop("pair")
    assert counts.total() >= STRIKES_PER_MINUTE * minutes
    assert all(counts[kind] >= STRIKES_PER_KIND_PER_MINUTE * minutes for kind in KINDS)
    assert sum(line.follows for line in lines) >= RECOVERIES_HIT_PER_MINUTE * minutes


def test_seeds_differ() -> None:
    assert plan(seed=1, minutes=10, has_links=True) != plan(seed=2, minutes=10, has_links=True)


def test_without_lines_to_cut_none_is_cut() -> None:
    assert "links" not in {line.kind for line in plan(seed=1, minutes=10, has_links=False)}


@pytest.mark.parametrize("what", ["lease", "contract", "evidence"])
def test_a_temptation_is_its_seeds(what: str) -> None:
    assert temptation(what, seed=1) == temptation(what, seed=1) != temptation(what, seed=2)
