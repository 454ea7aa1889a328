"""Tests the benchmark of parity: its limits, its page, and its measurement of a group with small shards."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.measures import Verdict
from benchmarks.page import render
from benchmarks.parity import group, report
from benchmarks.parity.group import GroupTimes
from benchmarks.parity.xor import XorTime
from everstep.protocol.slot import CHUNK_BYTES
from tests.unit.benchmarks.machine import MACHINE

COPIES = GroupTimes(
    has_parity=False,
    state_bytes=256 << 20,
    step_seconds=(0.4, 0.5),
    cpu_seconds=(0.3, 0.3),
    memory_ratio=4.0,
    sent_ratio=1.0,
    restore_seconds=0.1,
    is_equal=True,
)
PARITY = replace(COPIES, has_parity=True, step_seconds=(0.5, 0.7), memory_ratio=2.7, restore_seconds=0.3)
RUN = report.Run(
    machine=MACHINE,
    is_quick=False,
    seconds=30.0,
    groups=(COPIES, PARITY),
    xors=(XorTime(name="copy", seconds_per_gib=(0.02, 0.03)),),
)


def test_the_page_states_what_a_step_and_a_restore_cost() -> None:
    page = render(report.PAGE, RUN, "parity.json")
    assert "| memory of all slots ÷ state, group of 4 | **2.7** | 1 | ≤ 2.8 |  | pass |" in page
    assert "| parity, group of 4 | 2.7 | 1 | 600 | 300 | 300 |" in page
    assert [row.verdict for row in report.rows(RUN)] == [Verdict.PASS] * 4


@pytest.mark.parametrize(
    ("changed", "place"),
    [
        (replace(PARITY, memory_ratio=2.9), 0),
        (replace(PARITY, sent_ratio=1.5), 1),
        (replace(PARITY, step_seconds=(2.0,)), 2),
        (replace(PARITY, is_equal=False), 3),
    ],
)
def test_a_group_beyond_a_limit_falls_short(changed: GroupTimes, place: int) -> None:
    verdicts = [row.verdict for row in report.rows(replace(RUN, groups=(COPIES, changed)))]
    assert verdicts[place] is Verdict.SHORT
    assert verdicts.count(Verdict.PASS) == 3


@pytest.mark.parametrize(("has_parity", "memory"), [(False, 4.0), (True, 3.0)])
async def test_a_group_is_measured(has_parity: bool, memory: float) -> None:
    """With parity, a member stores a share of two chunks beside its shard of four chunks, instead of a copy of four
    chunks.
    """
    found = await group.measure(has_parity=has_parity, state_bytes=4 * CHUNK_BYTES, steps=2)
    assert found.is_equal
    assert found.memory_ratio == pytest.approx(memory, rel=0.001)
    assert found.sent_ratio == 1.0
    assert len(found.step_seconds) == len(found.cpu_seconds) == 1
