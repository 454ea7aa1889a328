"""The part of the device benchmark that needs a cluster, here on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.device import gpt, rows
from benchmarks.device.parts import GPT, Sizes
from benchmarks.measures import Verdict

# A step takes 0.2 s, so each step can be committed before the next one ends.
SIZES = Sizes(
    layers=2,
    width=128,
    heads=4,
    context=64,
    batch=8,
    accumulate=10,
    warm_up=6,
    order="ABBA",
    block_steps=3,
    verified_steps=3,
)


@pytest.fixture(autouse=True)
def settled() -> None:
    """Replace the shared fixture, because the benchmark starts and ends its own cluster."""


def test_a_model_trains_with_and_without_snapshots_and_what_the_holder_had_is_compared(tmp_path: Path) -> None:
    found = gpt.measure(tmp_path, SIZES, device="cpu", say=print)
    assert "failure" not in found
    assert found["device"] == "cpu"
    assert [len(block) for block in found["step_seconds"]] == [2] * 4
    assert found["kept_steps"] == 4
    assert found["commits"] > 0
    verified = found["verified"]
    assert len(verified["steps"]) == 3
    assert verified["equal"]
    assert verified["torn"] == []
    told = rows.of_part(GPT, found)
    assert {row.what: row.verdict for row in told}["calls in the loop that waited for the device"] is Verdict.PASS
