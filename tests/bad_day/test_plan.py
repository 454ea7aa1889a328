"""A plan depends on its seed alone, and contains enough faults for a bad day."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from infra.local_cloud import fault_script
from infra.local_cloud.fault_kinds import LASTING, AnyFault, Effect, KillControlPlane, KillRank, Terminate, name_of
from infra.local_cloud.roles import Aim, RoleJob, RoleShard
from tests.bad_day.plan import SERVER_ROUND, Line, faults, plan, script, temptation
from tests.bad_day.rules import KINDS, RECOVERIES_HIT_PER_MINUTE, STRIKES_PER_KIND_PER_MINUTE, STRIKES_PER_MINUTE


@pytest.mark.parametrize("seed", range(50))
@pytest.mark.parametrize("minutes", [2.0, 10.0])
@pytest.mark.parametrize("has_servers", [False, True])
def test_a_plan_is_a_bad_day(seed: int, minutes: float, has_servers: bool) -> None:
    lines = plan(seed=seed, minutes=minutes, has_links=True, has_servers=has_servers)
    assert lines == plan(seed=seed, minutes=minutes, has_links=True, has_servers=has_servers)
    assert lines[0].kind == "pair"
    assert all(before.at_seconds <= after.at_seconds for before, after in pairwise(lines))
    assert lines[-1].at_seconds <= minutes * 60
    counts = Counter(line.kind for line in lines)
    counts["instances"] += 2 * counts.pop("pair")
    assert counts.total() >= STRIKES_PER_MINUTE * minutes
    needed = (*KINDS, *(SERVER_ROUND if has_servers else ()))
    assert all(counts[kind] >= STRIKES_PER_KIND_PER_MINUTE * minutes for kind in needed)
    assert {line.server for line in lines} == ({"control-plane", "standby"} if has_servers else {"control-plane"})
    assert sum(line.follows for line in lines) >= RECOVERIES_HIT_PER_MINUTE * minutes


A, B, C, D, E, F = (f"i-{letter}" for letter in "abcdef")
JOBS = [
    RoleJob(
        name=name,
        nodes=nodes,
        ranks_per_node=1,
        committed_step=3,
        shards=tuple(RoleShard(rank=rank, holders=nodes[:2]) for rank in range(3)),
    )
    for name, nodes in (("early", (A, B, C)), ("long", (D, E, F)))
]


@pytest.mark.parametrize("seed", range(5))
def test_a_plan_is_a_fault_script_that_hits_whom_the_day_would_hit(seed: int, tmp_path: Path) -> None:
    lines = plan(seed=seed, minutes=10.0, has_links=True)
    moments = script(lines)
    (tmp_path / "day.json").write_bytes(fault_script.encode(moments))
    assert fault_script.read(tmp_path / "day.json") == moments
    now = 0.0
    hit: list[tuple[float, AnyFault]] = []
    left: list[str] = []

    def wait_until(seconds: float) -> float:
        nonlocal now
        now = max(now, seconds)
        return now

    def inject(fault: AnyFault) -> Effect:
        hit.append((now, fault))
        left.extend({name_of(fault)} & LASTING)
        return Effect(fault=name_of(fault), target="", did="")

    def clear(name: str) -> None:
        left[:] = [each for each in left if name and each != name]

    aim = Aim(lambda: JOBS, lambda: {A, B, C, D, E, F})
    fault_script.play(moments, aim=aim, inject=inject, clear=clear, wait_until=wait_until, report=lambda *_: None)
    assert left == []
    aim_of_day = Aim(lambda: JOBS, lambda: {A, B, C, D, E, F})
    assert hit == [(line.at_seconds, one) for line in lines for fault in faults(line) for one in aim_of_day(fault)]
    assert {name_of(fault) for _, fault in hit} >= {
        "kill-rank",
        "kill-agent",
        "terminate",
        "kill-control-plane",
        "partition",
        "fail-status",
        "stale-view",
        "zone-disruption",
        "throttle",
    }


def test_the_pair_is_of_two_jobs_and_a_group_is_all_holders() -> None:
    aim = Aim(lambda: JOBS, lambda: {A, B, C, D, E, F})
    pair, group = Line(at_seconds=1, kind="pair", pick=7 * 61), Line(at_seconds=1, kind="groups", pick=1)
    assert [aim(fault) for fault in faults(pair)] == [[Terminate(target=B)], [Terminate(target=E)]]
    assert [aim(fault) for fault in faults(group)] == [[Terminate(target=D), Terminate(target=E)]]


def test_what_follows_hits_the_job_that_was_hit_before_and_has_less_time_for_it() -> None:
    aim = Aim(lambda: JOBS, lambda: {A, B, C, D, E, F})
    leader, follower = (
        Line(at_seconds=1, kind="instances", pick=1),
        Line(at_seconds=2, kind="ranks", pick=0, follows=True),
    )
    assert [aim(fault) for line in (leader, follower) for fault in faults(line)] == [
        [Terminate(target=D)],
        [KillRank(target=D)],
    ]
    first, second, _ = script([leader, follower])
    assert first.within_seconds > second.within_seconds > 0


def test_a_script_lasts_as_long_as_the_day_has_it() -> None:
    cut, killed = (Line(at_seconds=1, kind=kind, pick=1, lasts_seconds=5) for kind in ("links", "control plane"))
    assert [moment.lasts_seconds for moment in script([cut, killed])] == [5, None, None]
    assert KillControlPlane(down=5) in faults(killed)


def test_seeds_differ() -> None:
    assert plan(seed=1, minutes=10, has_links=True) != plan(seed=2, minutes=10, has_links=True)


def test_without_lines_to_cut_none_is_cut() -> None:
    assert "links" not in {line.kind for line in plan(seed=1, minutes=10, has_links=False)}


@pytest.mark.parametrize("what", ["lease", "contract", "evidence"])
def test_a_temptation_is_its_seeds(what: str) -> None:
    assert temptation(what, seed=1) == temptation(what, seed=1) != temptation(what, seed=2)
