"""Tests the expected interruptions of a job."""

from __future__ import annotations

import pytest

from control_plane.core.forecast import expected


def test_twice_the_nodes_fail_twice_as_often() -> None:
    few = expected(4, node_seconds=8000.0, failure_count=2, mean_recovery_seconds=10.0)
    many = expected(8, node_seconds=8000.0, failure_count=2, mean_recovery_seconds=10.0)
    assert few is not None
    assert many is not None
    assert (few.mttf_seconds, many.mttf_seconds) == (1000.0, 500.0)
    assert few.ettr_ratio == 1000 / 1010


@pytest.mark.parametrize(
    ("node_seconds", "failure_count", "mean_recovery_seconds"), [(0.0, 2, 10.0), (8000.0, 0, 10.0), (8000.0, 2, None)]
)
def test_without_working_time_a_failure_or_a_recovery_nothing_is_expected(
    node_seconds: float, failure_count: int, mean_recovery_seconds: float | None
) -> None:
    history = {"failure_count": failure_count, "mean_recovery_seconds": mean_recovery_seconds}
    assert expected(4, node_seconds=node_seconds, **history) is None  # type: ignore[arg-type]
