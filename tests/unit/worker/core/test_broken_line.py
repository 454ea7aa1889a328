"""Tests when an owner reports that its connection to a holder breaks.

If the connection breaks in several consecutive transfers, the owner reports it until a step has arrived without an
interruption. It does not report rare breaks.
"""

from __future__ import annotations

import pytest

from everstep.protocol.ids import Step
from worker.core.broken_line import CUTS, BrokenLine


def cut(count: int) -> BrokenLine:
    """Return the state of a connection after `count` interrupted transfers.

    The transfers sent consecutive steps, and the last one sent step 10. After each interruption, a second transfer
    completed the step.
    """
    line = BrokenLine()
    for left in reversed(range(count)):
        step = Step(10 - left)
        line = line.cut_short(step, f"way {left}").arrived(step)
    return line


@pytest.mark.parametrize(("count", "is_told"), [(0, False), (CUTS - 1, False), (CUTS, True), (CUTS + 9, True)])
def test_a_row_of_transfers_that_were_cut_short_is_told(count: int, is_told: bool) -> None:
    words = f"its line breaks: {count} transfers were cut short and none came whole, the last: way 0"
    assert cut(count).trouble == (words if is_told else "")


def test_one_step_that_is_cut_short_again_and_again_is_a_row() -> None:
    line = BrokenLine()
    for _ in range(CUTS):
        assert line.trouble == ""
        line = line.cut_short(Step(1), "way")
    assert line.trouble != ""


def test_a_step_that_arrives_in_one_go_ends_it() -> None:
    assert cut(CUTS).arrived(Step(11)) == BrokenLine()
