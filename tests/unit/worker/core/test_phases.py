"""Tests how an agent measures the time that a rank needs for one step."""

from __future__ import annotations

from everstep.protocol.rank_messages import Phase, RankHalf
from worker.core.phases import PhaseClock


def half(boundary: int, phase: Phase = Phase.TRAIN, limit: int = 0) -> RankHalf:
    return RankHalf(generation=1, boundary=boundary, phase=phase, limit=limit)


def test_a_clock_runs_until_boundary_or_phase_change() -> None:
    clock = PhaseClock(base=4).seen(half(-1, Phase.START), 10.0)
    assert (clock.phase, clock.still_seconds) == ("start", 0.0)
    clock = clock.seen(half(-1, Phase.START), 13.0)
    assert clock.still_seconds == 3.0
    clock = clock.seen(half(4), 14.0)
    assert (clock.phase, clock.still_seconds, clock.longest) == ("first_step", 0.0, {"start": 3.0})
    clock = clock.seen(half(4), 20.0).seen(half(5), 21.0)
    assert (clock.phase, clock.longest) == ("train", {"start": 3.0, "first_step": 6.0})
    clock = clock.seen(half(5), 22.0).seen(half(5, Phase.EVAL), 23.0)
    assert (clock.phase, clock.still_seconds, clock.longest["train"]) == ("eval", 0.0, 1.0)


def test_a_rehearsal_is_not_learned() -> None:
    clock = PhaseClock(base=0).seen(half(9), 0.0).seen(half(9), 1.0)
    for now in (2.0, 60.0):
        clock = clock.seen(half(9, Phase.REHEARSE, 90), now)
        assert (clock.phase, clock.still_seconds, clock.limit_seconds) == ("rehearse", now - 2.0, 90.0)
    assert clock.seen(half(9), 61.0).seen(half(9), 62.0).seen(half(10), 63.0).longest == {"train": 1.0}


def test_the_longest_of_a_phase_stays() -> None:
    clock = PhaseClock(base=0)
    for now, boundary in ((0.0, 1), (5.0, 1), (6.0, 2), (7.0, 2), (8.0, 3)):
        clock = clock.seen(half(boundary), now)
    assert clock.longest == {"train": 5.0}


def test_what_nobody_watched_is_not_taken_for_one_long_step() -> None:
    clock = PhaseClock(base=0).seen(half(1), 0.0).seen(half(1), 1.0).seen(half(900), 500.0)
    assert clock.longest == {"train": 1.0}


def test_what_goes_on_is_not_learned() -> None:
    assert PhaseClock(base=0).seen(half(1), 0.0).seen(half(1), 600.0).longest == {}


def test_what_a_script_has_told_the_limit_of_is_not_learned_and_a_new_limit_begins_anew() -> None:
    clock = PhaseClock(base=0).seen(half(1, Phase.WAIT, 600), 0.0).seen(half(1, Phase.WAIT, 600), 500.0)
    assert (clock.phase, clock.still_seconds, clock.limit_seconds) == ("wait", 500.0, 600.0)
    clock = clock.seen(half(1, Phase.WAIT, 60), 501.0)
    assert (clock.still_seconds, clock.limit_seconds) == (0.0, 60.0)
    clock = clock.seen(half(1), 540.0).seen(half(1), 542.0).seen(half(2), 543.0)
    assert (clock.limit_seconds, clock.longest) == (0.0, {"train": 2.0})
    learned = clock.seen(half(2, Phase.WAIT), 543.0).seen(half(2, Phase.WAIT), 547.0).seen(half(3), 548.0)
    assert learned.longest["wait"] == 4.0, "of a wait without a limit the job's own measure is all there is"
