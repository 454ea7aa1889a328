"""A plan is its seed's, and promises what a bad day is."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from infra.local_cloud import fault_script
from infra.local_cloud.fault_kinds import AnyFault, Effect, name_of
from tests.bad_day.plan import plan, script, temptation
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


@pytest.mark.parametrize("seed", range(5))
def test_a_plan_is_a_fault_script_that_anybody_can_play(seed: int, tmp_path: Path) -> None:
    lines = plan(seed=seed, minutes=10.0, has_links=True)
    moments = script(lines, nodes=7)
    (tmp_path / "day.json").write_bytes(fault_script.encode(moments))
    assert fault_script.read(tmp_path / "day.json") == moments
    done: list[str] = []
    left: list[AnyFault] = []

    def inject(fault: AnyFault) -> Effect:
        left.append(fault)
        return Effect(fault=name_of(fault), target="", did=name_of(fault))

    def clear(name: str) -> None:
        left[:] = [fault for fault in left if name and name_of(fault) != name]

    fault_script.play(
        moments,
        inject=inject,
        clear=clear,
        wait_until=lambda _: None,
        tell=lambda _, outcome: done.append(outcome.did if isinstance(outcome, Effect) else ""),
    )
    assert left == [], "the last line clears what lasts"
    wanted = Counter(line.kind for line in lines)
    found = Counter(done)
    assert (found["kill-rank"], found["kill-agent"]) == (wanted["ranks"], wanted["agents"])
    assert (found["kill-control-plane"], found["partition"], found["fail-status"]) == (wanted["control plane"], wanted["links"], wanted["checks"])
    assert found["terminate"] == wanted["instances"] + 2 * (wanted["pair"] + wanted["groups"])
    first, second, *_ = moments
    assert first.at_seconds == second.at_seconds
    assert first.fault != second.fault
    assert name_of(first.fault) == name_of(second.fault) == "terminate" if first.fault and second.fault else False


def test_seeds_differ() -> None:
    assert plan(seed=1, minutes=10, has_links=True) != plan(seed=2, minutes=10, has_links=True)


def test_without_lines_to_cut_none_is_cut() -> None:
    assert "links" not in {line.kind for line in plan(seed=1, minutes=10, has_links=False)}


@pytest.mark.parametrize("what", ["lease", "contract", "evidence"])
def test_a_temptation_is_its_seeds(what: str) -> None:
    assert temptation(what, seed=1) == temptation(what, seed=1) != temptation(what, seed=2)
