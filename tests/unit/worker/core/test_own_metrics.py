"""Tests the means and rates that an agent measures over iterations.

The agent makes at most one point per period.
"""

from __future__ import annotations

from worker.core.own_metrics import PERIOD_SECONDS, NodeUsage, OwnMetrics


def test_the_first_point_comes_at_once_and_has_no_rates() -> None:
    values, after = OwnMetrics().iteration(2.0, 0.5).due(100.0, 1_000, NodeUsage(80.0, 7.0, 5_000))
    expected = {"step_seconds": 2.0, "snapshot_blocked_seconds": 0.5, "gpu_percent": 80.0, "gpu_least_percent": 7.0}
    assert values == {f"everstep/{name}": value for name, value in expected.items()}
    assert after == OwnMetrics(began_at=100.0, replica_bytes=1_000, usage=NodeUsage(80.0, 7.0, 5_000))


def test_what_comes_within_a_period_is_one_point() -> None:
    _, metrics = OwnMetrics().iteration(1.0, 0.0).due(100.0, 1_000, NodeUsage(network_bytes=5_000))
    metrics = metrics.iteration(1.0, 0.0).iteration(3.0, 0.5).replicated(0.2).replicated(0.4)
    early, same = metrics.due(100.0 + PERIOD_SECONDS - 0.1, 9_999, NodeUsage())
    assert (early, same) == ({}, metrics)
    assert metrics.due(100.0 + PERIOD_SECONDS, 9_999, NodeUsage())[0], "the period is over"
    values, after = metrics.due(110.0, 3_000, NodeUsage(network_bytes=25_000))
    assert values == {
        "everstep/step_seconds": 2.0,
        "everstep/snapshot_blocked_seconds": 0.25,
        "everstep/replicate_seconds": (0.2 + 0.4) / 2,
        "everstep/replica_bytes_per_second": 200.0,
        "everstep/network_bytes_per_second": 2_000.0,
    }
    assert (after.iteration_count, after.replica_count, after.step_seconds, after.replicate_seconds) == (0, 0, 0.0, 0.0)


def test_memory_is_told_as_it_is_in_use() -> None:
    values, _ = OwnMetrics().due(
        0.0, 0, NodeUsage(memory_total_bytes=100, memory_available_bytes=30, rank_memory_bytes=40)
    )
    assert values == {"everstep/memory_used_bytes": 70, "everstep/rank_memory_bytes": 40}


def test_what_nobody_reads_is_left_out_and_a_counter_that_began_anew_is_no_rate() -> None:
    _, metrics = OwnMetrics().due(0.0, 0, NodeUsage(network_bytes=5_000))
    assert metrics.due(10.0, 0, NodeUsage(network_bytes=4_000))[0] == {"everstep/replica_bytes_per_second": 0.0}
    assert metrics.due(10.0, 0, NodeUsage())[0] == {"everstep/replica_bytes_per_second": 0.0}
    assert metrics.due(10.0, 0, NodeUsage(network_bytes=5_000))[0]["everstep/network_bytes_per_second"] == 0.0
    for one in (NodeUsage(memory_total_bytes=100), NodeUsage(memory_available_bytes=30)):
        assert "everstep/memory_used_bytes" not in metrics.due(10.0, 0, one)[0]
