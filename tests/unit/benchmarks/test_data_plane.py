"""Tests the benchmark of the data plane: values, verdicts and page from samples, and the loop that takes samples.

A verdict says whether a value meets its limit.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.data_plane import char_gpt, report
from benchmarks.data_plane.__main__ import HELD_AGAINST, floors_of, order_of, sizes_of
from benchmarks.data_plane.arrivals import Arrival
from benchmarks.data_plane.everstep import ATTEMPTS, EverstepLaunch, Restored
from benchmarks.data_plane.rows import (
    EVERSTEP,
    GOALS,
    KNOWN,
    KNOWN_FLOORS,
    Figure,
    LaunchFloor,
    Of,
    judged,
    moved_together,
    peer_figure,
    shown,
)
from benchmarks.data_plane.samples import AUDITED_COUNT, GIB, Measured, of_everstep, of_peer
from benchmarks.data_plane.systems import PEERS
from benchmarks.measures import Summary, Verdict
from benchmarks.page import render, with_section, write
from benchmarks.rows import exit_code, without_verdicts
from everstep.training.guard import AUDITED_AT_START
from tests.unit.benchmarks.machine import MACHINE


def floor(*launches: float) -> LaunchFloor:
    return LaunchFloor(tuple(Summary.of([value]) for value in launches))


FLOORS = {name: floor(value, value, value) for name, value in {**KNOWN_FLOORS, "digest": 31.0}.items()}
GOOD = {
    "blocked": [1.0] * 20,
    "unblocked": [0.1] * 20,
    "first_blocked": [1.1],
    "first_commit": [1.2],
    "first_commit_audited": [1.1],
    "commits": [1.0, 0.96],
    "commit": [600.0] * 20,
    "restore_local": [70.0] * 10,
    "restore_local_all": [100.0] * 10,
    "fetch": [300.0] * 10,
    "restore_peer": [330.0] * 10,
    "memory": [4.05],
}
PEERS_AS_KNOWN = {
    "lm-resiliency": {"blocked": [118.0] * 5, "commit": [900.0] * 5, "memory": [4.0]},
    "torchft in place": {"restore_peer": [360.0] * 5},
}


def of(
    system: str,
    values: dict[str, list[float]],
    *,
    floors: dict[str, LaunchFloor] = FLOORS,
    verified: dict[str, bool] | None = None,
) -> Of:
    return Of(
        system=system,
        version="1",
        state_mib=256,
        measured=Measured(values=values, verified=verified or {}),
        floors=floors,
    )


def verdicts(values: dict[str, list[float]] = GOOD, **more: Any) -> dict[str, Figure]:
    peers = {name: of(name, known) for name, known in PEERS_AS_KNOWN.items()}
    return {figure.metric: figure for figure in judged(of(EVERSTEP, values, **more), peers)}


def moved(name: str) -> dict[str, LaunchFloor]:
    return {**FLOORS, name: floor(100.0, 121.0, 101.0)}


def test_what_reaches_every_goal_passes_every_row() -> None:
    found = verdicts()
    assert len(found) == len(GOALS)
    assert {figure.verdict for figure in found.values()} == {Verdict.PASS}


@pytest.mark.parametrize(
    ("metric", "values", "row"),
    [
        ("blocked", [5.1] * 20, "blocked_p50"),
        ("blocked", [1.0] * 19 + [20.1], "blocked_p99"),
        ("unblocked", [0.1] * 19 + [20.1], "unblocked_p99"),
        ("first_blocked", [1.51], "first_blocked"),
        ("first_commit_audited", [1.51], "first_commit_audited"),
        ("commits", [0.94], "commits"),
        ("commit", [1.36 * (460 + 31)], "commit"),
        ("commit", [901.0], "commit_vs_peer"),
        ("restore_local", [1.31 * 60], "restore_local"),
        ("restore_local_all", [1.31 * 91], "restore_local_all"),
        ("fetch", [1.31 * 261], "fetch"),
        ("restore_peer", [1.31 * 261], "restore_peer"),
        ("restore_peer", [361.0], "restore_peer_vs_peer"),
        ("memory", [4.11], "memory"),
    ],
)
def test_what_misses_a_goal_by_little_falls_short(metric: str, values: list[float], row: str) -> None:
    assert verdicts({**GOOD, metric: values})[row].verdict is Verdict.SHORT


def test_rows_about_blocking_say_how_often_snapshots_were_kept() -> None:
    found = verdicts()
    assert {found[name].reason for name in ("blocked_p50", "blocked_p99", "unblocked_p50", "unblocked_p99")} == {
        "commits ÷ steps 0.98"
    }
    (tight,) = (
        each
        for each in shown(of(EVERSTEP, {"blocked_tight": [3.0], "tight_commits": [0.5]}))
        if each.metric == "blocked_tight"
    )
    assert (tight.reason, tight.verdict) == ("commits ÷ steps 0.50", Verdict.NONE)
    for metric in ("blocked", "blocked_tight"):
        peer = peer_figure(of("torch.save", {metric: [2200.0]}), metric)
        assert (peer.reason, peer.verdict) == ("snapshots ÷ steps 1.00", Verdict.NONE)
    strange = peer_figure(of("torch.save", {"blocked": [9000.0]}), "blocked")
    assert strange.reason == "snapshots ÷ steps 1.00; 9000 where 1625 to 2709 is known of it, scaled by memcpy"


def test_what_blocks_little_because_it_keeps_little_falls_short() -> None:
    found = verdicts({**GOOD, "commits": [0.94]})
    for name in ("blocked_p50", "blocked_p99"):
        assert found[name].verdict is Verdict.SHORT
        assert found[name].reason == "commits ÷ steps 0.94, 0.95 to reach"
    # This row measures only steps without a snapshot. The number of commits is no reason for a missed limit.
    assert found["unblocked_p50"].verdict is Verdict.PASS
    assert found["commits"].verdict is Verdict.SHORT
    assert verdicts({**GOOD, "commits": [0.94]}, floors=moved("memcpy"))["blocked_p50"].verdict is Verdict.INCONCLUSIVE


def test_on_a_busy_machine_nothing_is_judged_but_wrong_bytes() -> None:
    figures = without_verdicts(
        [*verdicts({**GOOD, "fetch": [9000.0]}).values(), *shown(of(EVERSTEP, {"first_raw": [60.0]}))]
    )
    judged_ones = [figure for figure in figures if figure.metric != "first_raw"]
    assert {figure.verdict for figure in judged_ones} == {Verdict.INCONCLUSIVE}
    assert all("busy when the run began" in figure.reason for figure in judged_ones)
    assert (figures[-1].verdict, figures[-1].reason) == (Verdict.NONE, "")
    wrong = without_verdicts(list(verdicts(verified={"commit": False}).values()))
    assert {figure.metric for figure in wrong if figure.verdict is Verdict.SHORT} == {"commit", "commit_vs_peer"}
    assert exit_code(figures, is_busy=True) == 3
    assert exit_code(wrong, is_busy=True) == exit_code(wrong, is_busy=False) == 2
    assert exit_code(list(verdicts().values()), is_busy=False) == 0


def test_a_moved_floor_makes_its_rows_inconclusive_whatever_they_say() -> None:
    for values in (GOOD, {**GOOD, "restore_local": [999.0]}):
        found = verdicts(values, floors=moved("memcpy"))
        assert found["restore_local"].verdict is Verdict.INCONCLUSIVE
        assert "21%" in found["restore_local"].reason
    assert verdicts(floors=moved("memcpy"))["commit"].verdict is Verdict.PASS


def test_the_floor_of_a_row_is_the_sum_that_its_limit_is_made_of() -> None:
    """If the limit of a row is a multiple of a sum of floors, only a change of the sum makes the row inconclusive.

    A floor is a measured time that no system can beat, for example the time of a memcpy.

    - In the first case, one small floor grows by half. The sum changes by a few percent, and the row passes.
    - In the second case, two floors change in opposite directions. The row whose limit is their sum has not moved. The
      row whose limit depends on one of them alone is inconclusive.
    """
    half_more = floor(31.0, 31.0, 46.5)
    found = verdicts(floors={**FLOORS, "digest": half_more})["commit"]
    assert found.floor_moved_ratio == pytest.approx(15.5 / (460 + 31))
    assert found.verdict is Verdict.PASS
    crossed = {**FLOORS, "memcpy": floor(60.0, 70.0, 90.0), "digest": floor(61.0, 51.0, 31.0)}
    rows = verdicts(floors=crossed)
    assert rows["restore_local_all"].floor_moved_ratio == 0.0
    assert rows["restore_local"].verdict is Verdict.INCONCLUSIVE


def test_floors_are_those_around_and_in_every_launch() -> None:
    def once(*seconds: float) -> dict[str, list[float]]:
        return {"memcpy": list(seconds)}

    found = floors_of([[once(1.0), once(2.0, 3.0)], [once(9.0)], [once(4.0), once(5.0)]], GIB)["memcpy"]
    assert [(launch.median, launch.count) for launch in found.launches] == [(2000.0, 3), (9000.0, 1), (4500.0, 2)]
    # `moved_together` compares the lowest sum (2000) with the highest (9000), whatever the order of the launches
    assert moved_together([found]) == pytest.approx(3.5)
    alone = floors_of([[once(1.0), once(2.0), once(4.0)]], GIB)["memcpy"]
    assert [launch.median for launch in alone.launches] == [1000.0, 3000.0]


def test_drift_falls_on_both_sides_of_what_is_compared() -> None:
    names = [EVERSTEP, *(peer.name for peer in PEERS)]
    order = order_of(names, (EVERSTEP, *HELD_AGAINST))
    centre = (len(order) - 1) / 2
    for name in names:
        places = [place for place, each in enumerate(order) if each == name]
        assert len(places) == (3 if name in (EVERSTEP, "lm-resiliency", "torchft in place") else 2)
        assert abs(statistics.fmean(places) - centre) < 1


def test_wrong_bytes_fall_short_even_when_a_floor_moved() -> None:
    found = verdicts(floors=moved("both_ways"), verified={"commit": False})
    assert found["commit"].verdict is Verdict.SHORT
    assert "bytes" in found["commit"].reason


def test_what_was_not_measured_falls_short() -> None:
    assert verdicts({key: value for key, value in GOOD.items() if key != "fetch"})["fetch"].verdict is Verdict.SHORT


def test_a_comparison_with_a_peer_that_is_missing_or_strange_is_inconclusive() -> None:
    own = of(EVERSTEP, GOOD)
    (missing,) = (figure for figure in judged(own, {}) if figure.metric == "commit_vs_peer")
    assert (missing.verdict, missing.limit) == (Verdict.INCONCLUSIVE, None)
    slow = of("lm-resiliency", {"commit": [5000.0] * 5})
    (strange,) = (figure for figure in judged(own, {"lm-resiliency": slow}) if figure.metric == "commit_vs_peer")
    assert strange.verdict is Verdict.INCONCLUSIVE
    assert "5000" in strange.reason


@pytest.mark.parametrize(
    ("value", "verdict"),
    [(860 * 0.76, Verdict.NONE), (860 * 0.74, Verdict.INCONCLUSIVE), (970 * 1.26, Verdict.INCONCLUSIVE)],
)
def test_a_peer_must_be_within_a_quarter_of_what_is_known_of_it(value: float, verdict: Verdict) -> None:
    assert peer_figure(of("lm-resiliency", {"commit": [value]}), "commit").verdict is verdict


def test_what_is_known_of_a_peer_scales_with_its_floors() -> None:
    # With the slower network, the lower bound grows: a local copy and two transfers took 60 + 2 × 230 ms per GiB, and
    # now take 60 + 2 × 490 ms.
    slower = {**FLOORS, "one_way": floor(490.0, 490.0, 490.0)}
    assert peer_figure(of("lm-resiliency", {"commit": [1800.0]}, floors=slower), "commit").verdict is Verdict.NONE
    assert (
        peer_figure(of("lm-resiliency", {"commit": [900.0]}, floors=slower), "commit").verdict is Verdict.INCONCLUSIVE
    )


@pytest.mark.parametrize(
    ("value", "verdict"), [(4.07, Verdict.NONE), (5.1, Verdict.INCONCLUSIVE), (2.9, Verdict.INCONCLUSIVE)]
)
def test_what_is_known_of_a_peers_memory_scales_with_no_floor(value: float, verdict: Verdict) -> None:
    found = peer_figure(
        of("lm-resiliency", {"memory": [value]}, floors={name: floor(1.0, 9.0) for name in FLOORS}), "memory"
    )
    assert found.verdict is verdict
    assert (f"{value:.2f} where 3.00 to 5.00 is known" in found.reason) is (verdict is Verdict.INCONCLUSIVE)


def test_whatever_is_known_belongs_to_a_peer_that_offers_it() -> None:
    offers = {peer.name: {{"protect": "commit"}.get(metric, metric) for metric in peer.metrics} for peer in PEERS}
    assert all(metric in offers[name] for name, metric in KNOWN)


def steps(
    blocked: list[float], *, snapshot: list[bool] | None = None, took: list[float | None] | None = None
) -> dict[str, Any]:
    took = took if took is not None else [0.5] * len(blocked)
    return {
        "numbers": list(range(len(blocked))),
        "blocked": blocked,
        "has_snapshot": snapshot or [True] * len(blocked),
        "began_at": [10.0] * len(blocked),
        "committed_at": [None if seconds is None else 10.0 + seconds for seconds in took],
    }


def everstep_launch(**changed: Any) -> EverstepLaunch:
    rank = {
        "state_bytes": GIB // 4,
        "first": steps([0.040, 0.020, 0.030, 0.001], took=[0.6, 0.5, 0.3, 0.2]),
        "spaced": steps([0.002, 0.0005], snapshot=[True, False], took=[0.2, None]),
        "tight": steps([0.004]),
        "holder_verified": True,
        **changed,
    }
    restored = [
        Restored(rank=rank, source=source, agent_seconds=0.1, rank_seconds=0.02, verified=True)
        for rank, source in ((0, "local"), (1, "peer"))
    ]
    arrived = [Arrival(fetch_seconds=0.08, model_seconds=0.09, verified=changed.get("arrived_verified", True))]
    return EverstepLaunch(
        ranks=[rank, rank], restored=restored, arrived=arrived, memory_ratio=4.0, agent_bytes=16 * 1024**2
    )


def test_samples_of_everstep_are_scaled_and_sorted() -> None:
    values = of_everstep([everstep_launch()]).values
    # the three snapshots that Everstep compares byte by byte (audits) are a separate value, so this one omits them
    assert values["blocked"] == pytest.approx([4.0, 8.0] * 2)
    assert values["blocked_audited"] == pytest.approx([160.0, 80.0, 120.0] * 2)
    assert values["unblocked"] == pytest.approx([2.0] * 2)
    assert values["first_blocked"] == pytest.approx([0.040 / 0.025] * 2)
    # The later snapshots that are not compared byte by byte take 0.2 s each.
    assert values["first_commit"] == pytest.approx([0.6 / 0.2] * 2)
    assert values["first_commit_audited"] == pytest.approx([0.6 / 0.4] * 2)
    assert values["first_raw"] == pytest.approx([0.040 / 0.002] * 2)
    assert values["agent"] == [16.0]
    assert values["commits"] == [0.5, 0.5]
    assert values["commit"] == pytest.approx([800.0] * 2)
    assert values["restore_local"] == pytest.approx([80.0] * 2)
    assert values["restore_local_all"] == pytest.approx([480.0])
    assert values["fetch"] == pytest.approx([400.0])
    assert values["restore_added"] == pytest.approx([480.0])
    # The rank already waits for its state, so this time does not include the rank's start.
    assert values["restore_peer"] == pytest.approx([360.0])
    assert values["restore_peer_fetch"] == pytest.approx([320.0])


def test_a_first_snapshot_that_was_not_committed_is_not_replaced_by_the_second() -> None:
    first = steps([0.040, 0.020, 0.030, 0.001], took=[None, 0.5, 0.3, 0.2])
    assert not {"first_commit", "first_commit_audited"} & of_everstep([everstep_launch(first=first)]).values.keys()
    late = steps([0.001, 0.040, 0.020, 0.030], snapshot=[False, True, True, True], took=[None, 0.8, 0.5, 0.3])
    assert of_everstep([everstep_launch(first=late)]).values["first_commit"] == pytest.approx([0.8 / 0.2] * 2)


def test_one_wrong_compare_in_any_launch_is_not_forgotten() -> None:
    measured = of_everstep([everstep_launch(holder_verified=False), everstep_launch()])
    assert measured.verified["commit"] is False
    assert measured.verified["restore_peer"] is True
    assert of_everstep([everstep_launch(arrived_verified=False), everstep_launch()]).verified["restore_peer"] is False


def test_as_many_snapshots_are_audited_as_the_guard_audits() -> None:
    assert AUDITED_COUNT == AUDITED_AT_START


def test_samples_of_a_peer_keep_what_it_offers() -> None:
    rank: dict[str, Any] = {
        "state_bytes": GIB,
        "first_blocked": 0.3,
        "blocked": [0.1, 0.2],
        "tight_blocked": [0.3],
        "protect": [0.9],
        "restore_local": [],
        "restore_peer": [],
        "verified": {"protect": True},
        "private_before_bytes": 0,
        "private_after_bytes": 3 * GIB,
        "tmpfs_before_bytes": 5,
        "tmpfs_after_bytes": 5 + 2 * GIB,
    }
    measured = of_peer([[rank, rank]], ("blocked", "protect", "memory"))
    assert measured.values["blocked"] == pytest.approx([100.0, 200.0] * 2)
    assert measured.values["memory"] == pytest.approx([4.0])
    assert "restore_local" not in measured.values
    assert measured.verified == {"commit": True}


def test_large_states_are_measured_with_the_peers_that_matter() -> None:
    small, large = sizes_of([256, 1024], PEERS, is_quick=False)
    assert small.peers == PEERS
    assert {peer.name for peer in large.peers} >= {goal.peer[0] for goal in GOALS if goal.peer is not None}
    assert large.everstep.span_seconds > 2.5 * small.everstep.span_seconds


def test_every_metric_is_repeated_ten_times_in_all_launches() -> None:
    for size in sizes_of([256, 1024], PEERS, is_quick=False):
        assert (
            min(
                2 * size.peer.spaced_steps,
                2 * size.peer.protects,
                2 * size.peer.local_restores,
                2 * size.peer.peer_restores,
            )
            >= 10
        )
        # two ranks in three launches give at least 100 snapshots, so the p99 is below the maximum
        assert 6 * size.everstep.spaced_steps >= 100
        assert 3 * size.everstep.peer_restores >= 10
        assert size.everstep.local_restores + size.everstep.peer_restores < ATTEMPTS


def launches(
    own: float = 0.11,
    *,
    nobody: tuple[float, ...] = (0.1, 0.1, 0.1),
    peer: float = 0.12,
    kept: tuple[int, int] = (5, 5),
    verified: tuple[bool, bool, bool] = (True, True, True),
    spread: float = 0.0,
) -> list[char_gpt.Launch]:
    """Return three launches of ten cycles each.

    `own` and `peer` are the mean seconds of a step under Everstep and under lm-resiliency. `nobody` has the seconds of
    a step without snapshots, one value per launch. Everstep's steps vary by `spread`.
    """
    found = []
    for alone, is_equal in zip(nobody, verified, strict=True):
        blocks = []
        for cycle in range(10):
            seconds = {"none": alone, "everstep": own + spread * (-1) ** cycle, "lm_resiliency": peer}
            for system, cpu, kept_count in (
                ("none", 0.1, 5),
                ("everstep", 0.15, kept[0]),
                ("lm_resiliency", 0.25, kept[1]),
            ):
                blocks.append(
                    {
                        "system": system,
                        "seconds": seconds[system],
                        "cpu_seconds": cpu,
                        "numbers": [0] * 5,
                        "kept_count": kept_count,
                    }
                )
        rank = {
            "blocks": blocks,
            "verified": {"none": None, "everstep": True, "lm_resiliency": True},
            "state_bytes": GIB // 2,
        }
        found.append(char_gpt.Launch.of([rank, {**rank, "verified": {**rank["verified"], "everstep": is_equal}}]))
    return found


def model(of: list[char_gpt.Launch]) -> dict[tuple[str, str], Figure]:
    return {
        (each.system, each.metric): each for each in char_gpt.figures("ddp", of, {EVERSTEP: "1", "lm-resiliency": "2"})
    }


SLOWDOWN = (EVERSTEP, "char_gpt_ddp_slowdown")


def test_a_real_model_must_be_slowed_down_least() -> None:
    better, worse = model(launches(0.11)), model(launches(0.13))
    assert (better[SLOWDOWN].verdict, worse[SLOWDOWN].verdict) == (Verdict.PASS, Verdict.SHORT)
    assert better[SLOWDOWN].value == pytest.approx(0.1)
    assert better[SLOWDOWN].limit == pytest.approx(0.2)
    assert better[SLOWDOWN].n == 30
    assert better[SLOWDOWN].reason == "commits ÷ steps 1.00; -10.0 points beside lm-resiliency's (-10.0 to -10.0)"
    alone = better["nobody", "char_gpt_ddp_step"]
    assert (alone.value, alone.unit, alone.verified) == (pytest.approx(100.0), "ms", None)
    # Each of the two ranks uses 0.05 s more CPU time per step than without snapshots. A snapshot has 1 GiB.
    assert better[EVERSTEP, "char_gpt_ddp_cpu"].value == pytest.approx(0.1)


def test_a_difference_within_the_noise_decides_nothing() -> None:
    assert model(launches(0.119, spread=0.02))[SLOWDOWN].verdict is Verdict.INCONCLUSIVE


def test_a_slowdown_says_nothing_without_the_same_interval_or_a_steady_model() -> None:
    assert model(launches(kept=(4, 5)))[SLOWDOWN].verdict is Verdict.INCONCLUSIVE
    assert model(launches(nobody=(0.1, 0.13, 0.1)))[SLOWDOWN].verdict is Verdict.INCONCLUSIVE
    assert model(launches()[:1])[SLOWDOWN].verdict is Verdict.INCONCLUSIVE
    rarer = model(launches(kept=(5, 4)))[SLOWDOWN]
    assert rarer.verdict is Verdict.INCONCLUSIVE
    assert rarer.reason == "commits ÷ steps 1.00; lm-resiliency's 0.80: not the same interval"


def test_one_wrong_byte_of_a_real_model_falls_short() -> None:
    good, bad = model(launches()), model(launches(verified=(True, False, True)))
    assert (good[SLOWDOWN].verified, good[SLOWDOWN].verdict) == (True, Verdict.PASS)
    assert (bad[SLOWDOWN].verified, bad[SLOWDOWN].verdict) == (False, Verdict.SHORT)
    assert good["lm-resiliency", "char_gpt_ddp_slowdown"].verified is True
    text = render(report.PAGE, replace(RUN, figures=list(good.values())))
    assert "| yes | pass: commits ÷ steps 1.00; -10.0 points beside lm-resiliency's (-10.0 to -10.0) |" in text


def test_nobody_always_comes_behind_the_same_one() -> None:
    order = char_gpt.order_of(("none", "everstep", "lm_resiliency"))
    assert len(order) == 3 * char_gpt.CYCLES
    assert all(
        sorted(order[start : start + 3]) == ["everstep", "lm_resiliency", "none"] for start in range(0, len(order), 3)
    )
    followed = [pair for pair in pairwise(order) if pair[0] != pair[1]]
    assert {followed.count(pair) for pair in permutations(("none", "everstep", "lm_resiliency"), 2)} <= set(
        range(8, 13)
    )


RUN = report.Run(
    machine=MACHINE,
    figures=[
        *judged(of(EVERSTEP, GOOD), {}),
        *shown(of(EVERSTEP, {"first_raw": [60.0], "blocked_audited": [200.0], "agent": [45.0]})),
        *(peer_figure(of(name, values), metric) for name, values in PEERS_AS_KNOWN.items() for metric in values),
        *model(launches()).values(),
    ],
    floors={256: FLOORS},
    is_quick=False,
    seconds=600.0,
)


def test_the_report_has_every_row_and_renews_only_its_section(tmp_path: Path) -> None:
    document = tmp_path / "benchmarks.md"
    document.write_text("# Benchmarks\n\nBefore.\n")
    write(report.PAGE, RUN, tmp_path / "bench" / "figures.json", document)
    first = document.read_text()
    write(report.PAGE, replace(RUN, seconds=601.0), tmp_path / "bench" / "figures.json", document)
    again = document.read_text()
    assert first.replace("in 600 s", "in 601 s") == again
    assert again.startswith("# Benchmarks\n\nBefore.\n")
    assert again.count("make bench-data-plane: begin") == 1
    assert all(report.TITLES[figure.metric] in again for figure in RUN.figures if figure.system == EVERSTEP)
    assert "**falls short**" not in again
    assert "lm-resiliency 1" in again
    assert "| char-GPT, DDP: a step that nobody keeps | nobody | **100** ms |" in again
    assert "| 256 MiB | nobody" not in again
    assert "are audited: copied whole" in again
    assert "private memory of an agent while nothing runs: a baseline, not counted above | **45** MiB" in again
    assert "| 256 MiB | memcpy into warm shared memory | 60, 60, 60 | 0% | 1, 1, 1 |" in again
    # The comparison with lm-resiliency has a clear result, so the page has no note that the result is uncertain.
    assert "- lm-resiliency" not in again
    rows = json.loads((tmp_path / "bench" / "figures.json").read_text())["figures"]
    assert {"system", "version", "metric", "value", "unit", "n", "low", "high", "verified"} <= rows[0].keys()
    assert [row["verdict"] for row in rows[:2]] == ["pass", "pass"]


def test_a_busy_or_quick_run_says_so() -> None:
    busy = replace(RUN, is_quick=True, machine=replace(RUN.machine, load_average=(9.0, 9.0, 9.0)))
    text = render(report.PAGE, busy)
    assert "count for nothing" in text
    assert "Run the benchmark again" in text


def test_the_picture_has_a_bar_per_system_and_no_bar_beyond_its_edge() -> None:
    root = ElementTree.fromstring(report.draw(RUN))
    bars = [each for each in root.iter() if each.tag.endswith("rect")][1:]
    assert len(bars) == 4 + 1 + 1 + 1  # four panels have a bar of Everstep; two of lm-resiliency; one of torchft
    assert all(float(bar.attrib["x"]) + float(bar.attrib["width"]) <= 900 for bar in bars)


def test_a_section_is_renewed_in_its_place() -> None:
    document = with_section(with_section("", "make a", "one"), "make b", "two")
    renewed = with_section(document, "make a", "three")
    assert renewed.index("three") < renewed.index("two")
    assert "one" not in renewed
    assert with_section(renewed, "make a", "three") == renewed


def test_medians_are_what_is_shown() -> None:
    assert verdicts({**GOOD, "commit": [1.0, 2.0, 9.0]})["commit"].value == statistics.median([1.0, 2.0, 9.0])
