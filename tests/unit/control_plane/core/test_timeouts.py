from __future__ import annotations

import msgspec
import pytest

from control_plane.core import timeouts
from control_plane.errors import InvalidTimeouts


def test_the_ladder_of_the_design() -> None:
    ladder = timeouts.ladder(3.0)
    assert (ladder.lease_seconds, ladder.holder_deadline_seconds, ladder.prepare_deadline_seconds) == (3, 3, 6)
    assert (ladder.coordinator_deadline_seconds, ladder.final_round_seconds) == (15, 30)
    assert (ladder.exclude_seconds, ladder.blind_wait_seconds) == (60, 120)
    assert timeouts.grace_seconds(ladder) == 9


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_impossible_detection_is_refused(seconds: float) -> None:
    with pytest.raises(InvalidTimeouts, match="detection_seconds"):
        timeouts.ladder(seconds)


def test_a_rung_below_the_one_before_it_is_refused_by_name() -> None:
    ladder = msgspec.structs.replace(timeouts.ladder(3.0), coordinator_deadline_seconds=5.0)
    with pytest.raises(InvalidTimeouts, match=r"coordinator_deadline_seconds is 5, below gone_seconds, which is 15"):
        timeouts.check(ladder)


def test_the_ladder_is_printed_lowest_first() -> None:
    lines = timeouts.rungs(timeouts.ladder(3.0))
    assert [line.split()[2] for line in lines] == [
        "lease",
        "holder_deadline",
        "prepare_deadline",
        "gone",
        "coordinator_deadline",
        "final_round",
        "welcome",
        "stall",
        "exclude",
        "hang",
        "blind_wait",
        "new_phase",
    ]


def test_every_rung_is_explained_beside_its_figure() -> None:
    first, *lines = timeouts.explained(timeouts.ladder(2.0))
    assert first.split()[:3] == ["2.0", "s", "detection_seconds"]
    count = 2 * len(timeouts.rungs(timeouts.ladder(2.0)))
    lines, fixed = lines[:count], lines[count:]
    assert tuple(lines[::2]) == timeouts.rungs(timeouts.ladder(2.0))
    for figure, reason in zip(lines[::2], lines[1::2], strict=True):
        times, _, _, why = reason.split(maxsplit=3)
        assert float(figure.split()[0]) == 2.0 * int(times)
        assert why
    for figure, reason, limit in zip(fixed[::2], fixed[1::2], timeouts.FIXED, strict=True):
        assert figure.split()[:3] == [f"{limit.seconds:.1f}", "s", limit.name]
        assert reason.split()[0] == "fixed:"
        assert limit.reason in reason


def test_a_fixed_limit_that_a_rung_would_outlast_is_refused_by_name() -> None:
    assert timeouts.ladder(60.0).final_round_seconds == timeouts.HOLD_SECONDS
    with pytest.raises(InvalidTimeouts, match="final_round_seconds is 610, above hook_held, which is 600"):
        timeouts.ladder(61.0)


def test_ranks_that_will_not_die_are_told_of_before_t_max() -> None:
    """An agent whose ranks do not end waits a limited time for the ranks and their output, and then reports them.

    The control plane must receive this report before it excludes the node.
    """
    ladder = timeouts.ladder(3.0)
    assert 2 * ladder.gone_seconds < ladder.exclude_seconds
    assert ladder.coordinator_deadline_seconds < ladder.welcome_seconds, (
        "an agent that restarts finds its ranks still looking for it"
    )
