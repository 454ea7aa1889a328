"""Tests how long a holder counts as silent. Time counts only while its owner waits for an answer and runs normally."""

from __future__ import annotations

from dataclasses import replace

import pytest

from worker.core.silence import LATE_RATIO, HolderSilence

BEGIN, PERIOD = 1000.0, 0.25
STANDSTILL = 100.0


def after(
    silence: HolderSilence,
    count: int,
    *,
    is_owed: bool = True,
    is_asked: bool = True,
    is_occupied: bool = False,
    late: float = 0.0,
) -> HolderSilence:
    """Return the state of a silence after `count` further checks of it, each `late` seconds late."""
    for _ in range(count):
        silence = silence.checked(
            silence.checked_at + PERIOD + late, is_owed=is_owed, is_asked=is_asked, is_occupied=is_occupied
        )
    return silence


OWED = HolderSilence(PERIOD).checked(BEGIN, is_owed=True, is_asked=True, is_occupied=False)
FAILING = OWED.progressed().failed(BEGIN).progressed().failed(BEGIN)


@pytest.mark.parametrize("silent", [OWED, FAILING])
def test_silence_is_counted_from_when_something_is_owed(silent: HolderSilence) -> None:
    assert silent.seconds == 0.0
    assert after(silent, 8).seconds == 8 * PERIOD


@pytest.mark.parametrize("silent", [OWED, FAILING])
def test_a_standstill_of_the_owner_is_left_out(silent: HolderSilence) -> None:
    still = after(after(silent, 3), 1, late=STANDSTILL)
    assert still.seconds == 3 * PERIOD
    assert after(still, 2).seconds == 5 * PERIOD, "it goes on where it was"
    assert after(still, 1, late=STANDSTILL).seconds == 3 * PERIOD


def test_a_look_that_comes_a_little_late_counts() -> None:
    late = (LATE_RATIO - 1) * PERIOD
    assert after(OWED, 1, late=late).seconds == LATE_RATIO * PERIOD
    assert after(OWED, 1, late=late + 0.125).seconds == 0.0


@pytest.mark.parametrize("silent", [OWED, FAILING])
def test_what_the_owner_does_for_itself_is_left_out(silent: HolderSilence) -> None:
    assert after(after(after(silent, 3), 20, is_occupied=True), 1).seconds == 4 * PERIOD


def test_progress_ends_it_but_not_a_row_of_failures() -> None:
    silent = after(FAILING, 4)
    assert after(silent.progressed(), 2).seconds == 6 * PERIOD
    assert after(silent.progressed().succeeded(), 2).seconds == PERIOD
    assert after(after(OWED, 4).progressed(), 2).seconds == PERIOD


@pytest.mark.parametrize("silent", [OWED, FAILING])
def test_who_is_reached_again_begins_anew(silent: HolderSilence) -> None:
    assert after(after(silent, 9).answered(), 3).seconds == 2 * PERIOD


def test_who_was_only_silent_may_return_at_once_who_fails_after_as_long_again() -> None:
    assert after(OWED, 9).given_up().may_return
    failed = after(FAILING, 8).given_up()
    assert [failed.may_return, after(failed, 7).may_return, after(failed, 8).may_return] == [False, False, True]


@pytest.mark.parametrize(("silent", "waits"), [(OWED, [0, 8, 16, 32]), (FAILING, [8, 16, 32, 64])])
def test_each_return_in_vain_is_waited_for_twice_as_late(silent: HolderSilence, waits: list[int]) -> None:
    for wait in waits:
        silent = after(replace(silent, owed_since=silent.checked_at), 8).given_up()
        if wait:
            assert not after(silent, wait - 1).may_return
        silent = after(silent, wait)
        assert silent.may_return
        silent = silent.answered()
    assert after(replace(silent.succeeded(), owed_since=silent.checked_at), 8).given_up().may_return, (
        "it has sealed something since"
    )


def test_who_is_given_up_before_its_time_waits_no_longer_for_it() -> None:
    """The owner drops a holder again before the waiting time of the first drop has ended.

    The second drop does not lengthen the time that the owner waits before the holder may return.
    """
    failed = after(FAILING, 8).given_up()
    assert after(after(failed, 2).given_up(), 6).may_return


def test_a_line_that_breaks_once_under_a_long_transfer_is_no_row_of_failures() -> None:
    """A holder whose agent restarts once during a transfer does not count as silent.

    After the restart, bytes continue to arrive.
    """
    broken = after(OWED.progressed(), 2).progressed().failed(BEGIN)
    for _ in range(3):
        broken = broken.failed(BEGIN)  # the agent restarts and does not answer yet
    for _ in range(20):
        broken = after(broken.progressed(), 1)
        assert broken.seconds == 0.0
    assert after(broken.succeeded().progressed().failed(BEGIN).progressed(), 1).seconds == 0.0, (
        "the first one of another transfer"
    )


def test_attempts_that_achieve_nothing_are_silence_and_no_row() -> None:
    silent = OWED
    for _ in range(4):
        silent = after(silent.failed(BEGIN), 1)
    assert (silent.seconds, silent.failing_since) == (4 * PERIOD, None)
    assert after(silent.progressed(), 1).seconds == 0.0


def test_what_was_owed_no_more_is_no_part_of_a_row() -> None:
    once = after(OWED.progressed().failed(BEGIN), 1, is_owed=False)
    assert once.progressed().failed(BEGIN).failing_since is None


def test_who_is_not_asked_is_not_silent_but_fails_all_the_same() -> None:
    assert after(after(OWED, 4), 1, is_asked=False).seconds == 0.0
    assert after(after(FAILING, 4), 1, is_asked=False).seconds == 5 * PERIOD


@pytest.mark.parametrize("silent", [OWED, FAILING])
def test_who_is_owed_nothing_is_not_silent_and_has_failed_at_nothing(silent: HolderSilence) -> None:
    idle = after(after(silent, 4), 1, is_owed=False)
    assert (idle.owed_since, idle.failing_since, idle.seconds) == (None, None, 0.0)


def test_the_first_failure_of_a_row_counts_also_one_that_was_noticed_behind_a_standstill() -> None:
    noticed = OWED.progressed().failed(BEGIN).progressed().failed(BEGIN + STANDSTILL)
    noticed = noticed.checked(BEGIN + STANDSTILL + 0.125, is_owed=True, is_asked=False, is_occupied=False)
    assert noticed.seconds == 0.0
    assert after(noticed.failed(BEGIN + 2 * STANDSTILL), 3, is_asked=False).seconds == 3 * PERIOD


def test_what_was_before_the_first_look_is_not_counted() -> None:
    begun = HolderSilence(PERIOD).progressed().failed(BEGIN).progressed().failed(BEGIN)
    assert begun.checked(BEGIN + 1.0, is_owed=True, is_asked=True, is_occupied=False).seconds == 0.0


def test_a_holder_that_has_sealed_a_step_has_no_failures_behind_it() -> None:
    silent = HolderSilence(period_seconds=1.0)
    failing = replace(silent, failing_since=1.0, has_failed=True, returns_at=9.0, apart_seconds=4.0)
    assert failing.succeeded() == replace(silent, failing_since=None, has_failed=False)
    again = replace(failing, owed_since=2.0).answered()
    assert again == replace(failing, failing_since=None, has_failed=False, owed_since=None)
