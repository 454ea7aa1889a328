"""A sender on a slow link limits itself to half of the link's rate, and leaves the other half to training.

From time to time, it sends without a limit to measure the link again.
"""

from __future__ import annotations

import pytest

from worker.core.slow_link import (
    FASTER_RATIO,
    FIRST_LIMIT_SECONDS,
    FULL_RATE_SECONDS,
    HELD_RATIO,
    LEAST_BYTES_PER_SECOND,
    LONGEST_LIMIT_SECONDS,
    SlowLink,
)

SOUND = 60e6
FOUND = SlowLink().found(10e6, 5_000_000, 0.5)


def after(link: SlowLink, seconds: float, rate: float) -> SlowLink:
    """Return the link's state after `seconds` seconds at `rate` bytes per second."""
    sent, begun = link.begun
    return link.measured(int(sent + rate * seconds), begun + seconds, sound=SOUND)


def test_a_sound_link_is_not_limited() -> None:
    assert SlowLink().measured(10_000_000, 5.0, sound=SOUND) == SlowLink()


def test_one_that_is_found_slow_is_limited_to_half_of_what_it_carried() -> None:
    assert (FOUND.carries, FOUND.limit) == (10e6, 5e6)
    assert FOUND.found(5e6, 40_000_000, 5.0) == FOUND, "what is limited carries no more"


def test_it_is_let_go_now_and_then_and_limited_again_as_long_as_it_is_slow() -> None:
    assert after(FOUND, FIRST_LIMIT_SECONDS - 0.1, 5e6) == FOUND
    tried = after(FOUND, FIRST_LIMIT_SECONDS, 5e6)
    assert (tried.carries, tried.limit) == (10e6, None)
    assert after(tried, FULL_RATE_SECONDS / 2, 0.0) == tried, "nothing is known yet"
    assert after(tried, 2 * FULL_RATE_SECONDS, 19e6).limit == 5e6


def test_the_longer_it_is_slow_the_rarer_it_is_tried() -> None:
    link, tries = FOUND, []
    for _ in range(8):
        begun = link.begun[1]
        while link.limit is not None:
            link = after(link, link.retry_seconds + 1e-6, 5e6)
        tries.append(round(link.begun[1] - begun, 3))
        link = after(link, 2 * FULL_RATE_SECONDS, 10e6)
    assert tries == [0.5, 1.0, 2.0, 4.0, 8.0, LONGEST_LIMIT_SECONDS, LONGEST_LIMIT_SECONDS, LONGEST_LIMIT_SECONDS]


def test_one_that_is_sound_again_stays_without_a_limit() -> None:
    tried = after(FOUND, FIRST_LIMIT_SECONDS, 5e6)
    assert after(tried, 2 * FULL_RATE_SECONDS, 1.1 * SOUND) == tried
    assert after(FOUND.next_transfer(), 0.5, 2 * SOUND).limit is None


@pytest.mark.parametrize(("then", "limit"), [(10e6, 5e6), (30e6, 15e6), (1.1 * SOUND, None)])
def test_one_that_carries_much_more_for_a_moment_is_looked_at_once_more(then: float, limit: float | None) -> None:
    """If a slow link seems much faster, the sender measures it a second time before it changes the limit.

    The first measurement may show only that the kernel's buffers accepted the bytes. If the link is as slow as before,
    the limit stays at half of its rate. If it is faster but still slow, the limit becomes half of the new rate. If it
    is as fast as a sound link (`SOUND`), the sender sets no limit.
    """
    moment = after(after(FOUND, FIRST_LIMIT_SECONDS, 5e6), 2 * FULL_RATE_SECONDS, 40e6)
    assert (moment.carries, moment.limit) == (10e6, None)
    assert after(moment, 2 * FULL_RATE_SECONDS, then).limit == (pytest.approx(limit) if limit else None)


def test_each_transfer_begins_without_a_limit() -> None:
    begun = FOUND.next_transfer()
    assert (begun.carries, begun.limit) == (10e6, None)
    assert after(begun, 2 * FULL_RATE_SECONDS, 10e6).limit == 5e6


def test_one_that_has_become_slower_still_is_limited_to_half_of_that() -> None:
    tried = after(FOUND, FIRST_LIMIT_SECONDS, 2e6)
    assert after(tried, 2 * FULL_RATE_SECONDS, 2e6).limit == 1e6


def test_one_that_stands_still_is_not_limited_so_that_it_goes_on_as_fast_as_it_can() -> None:
    """If a link carries nothing, for example because the holder's agent is stopped, the sender sets no limit.

    Without a limit, the transfer continues at full speed when the agent runs again.
    """
    assert SlowLink().found(LEAST_BYTES_PER_SECOND / 2, 1000, 3.0).limit is None
    stalled = after(FOUND, FIRST_LIMIT_SECONDS, 0.0)
    for _ in range(5):
        assert (stalled.carries > 0, stalled.limit) == (True, None), "it is slow still"
        stalled = after(stalled, 2 * FULL_RATE_SECONDS, 0.0)
    assert after(stalled, 2 * FULL_RATE_SECONDS, 2 * SOUND).limit is None
    assert after(stalled, 2 * FULL_RATE_SECONDS, 1e6).limit == pytest.approx(0.5e6), "it moves, and is slow"


def test_the_first_limit_is_half_of_the_rate_unless_the_link_stands_still() -> None:
    assert SlowLink().found(LEAST_BYTES_PER_SECOND, 1, 0.5).limit == LEAST_BYTES_PER_SECOND / 2
    assert SlowLink().found(LEAST_BYTES_PER_SECOND - 1, 1, 0.5).limit is None
    still = SlowLink().found(0.0, 1, 0.5)
    assert (still.carries, still.limit, still.begun) == (1.0, None, (1, 0.5))
    assert still.next_transfer().begun == (0, 0.0)


TRIED = after(FOUND, FIRST_LIMIT_SECONDS, 5e6)


def test_a_limit_that_the_link_does_not_carry_shows_a_slower_link() -> None:
    assert after(FOUND, FIRST_LIMIT_SECONDS, HELD_RATIO * 5e6).carries == 10e6
    assert after(FOUND, FIRST_LIMIT_SECONDS, HELD_RATIO * 5e6 - 100).carries == pytest.approx(HELD_RATIO * 5e6 - 100)
    assert after(FOUND, FIRST_LIMIT_SECONDS, 0.0).carries == 1.0


@pytest.mark.parametrize(
    ("link", "rate", "carries", "limit"),
    [
        pytest.param(TRIED, SOUND, 10e6, None, id="a sound rate"),
        pytest.param(TRIED, LEAST_BYTES_PER_SECOND, 10e6, 5e6, id="the least rate"),
        pytest.param(TRIED, LEAST_BYTES_PER_SECOND - 10, 10e6, None, id="a link that stands still"),
        pytest.param(TRIED, FASTER_RATIO * 10e6, 10e6, 5e6, id="not much faster"),
        pytest.param(
            SlowLink(carries=LEAST_BYTES_PER_SECOND),
            1.5 * LEAST_BYTES_PER_SECOND,
            LEAST_BYTES_PER_SECOND,
            0.5 * LEAST_BYTES_PER_SECOND,
            id="a link that just moved",
        ),
        pytest.param(
            SlowLink(carries=LEAST_BYTES_PER_SECOND), 1e6, LEAST_BYTES_PER_SECOND, None, id="much faster once"
        ),
        pytest.param(SlowLink(carries=LEAST_BYTES_PER_SECOND - 1), 1e6, 1e6, 0.5e6, id="a link that stood still"),
    ],
)
def test_what_a_measurement_without_a_limit_shows(
    link: SlowLink, rate: float, carries: float, limit: float | None
) -> None:
    found = after(link, 0.5, rate)
    assert (found.carries, found.limit) == (pytest.approx(carries), None if limit is None else pytest.approx(limit))


def test_a_link_is_measured_for_at_least_its_time() -> None:
    link = SlowLink(carries=10e6)
    assert link.measured(1_000_000, FULL_RATE_SECONDS, sound=SOUND).limit == 5e6
    assert link.measured(1_000_000, FULL_RATE_SECONDS - 0.01, sound=SOUND) == link
