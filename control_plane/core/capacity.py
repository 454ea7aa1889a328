"""What to do and to say while instances do not come: in AWS's own words, with the time of the next try.

    Auto Scaling tries again by itself, ever more seldom; after long failure AWS suspends its launches (an
    administrative suspension) Everstep asks again 30 s after the first failure, then after pauses twice as long each,
    at most 15 min, unless AWS has tried by itself since the moment came; it lifts what AWS suspended, never what a user
    did

When it asks follows from when the shortage began: how often AWS has tried in between, every second or every ten
minutes, moves none of the moments.

Invariant: pure; what is asked for again is what was asked for before, so that trying can never make a fleet larger.
Source: Amazon EC2 Auto Scaling User Guide, `Suspend and resume processes` (administrative suspension).
"""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import groupby

from control_plane.core.observed.fleets import GroupObserved, Vacancies

FIRST_RETRY_SECONDS = 30.0
LONGEST_RETRY_SECONDS = 900.0


def retry_at(group: GroupObserved) -> float | None:
    """Return when launches are asked for again, Unix seconds; None while none has failed.

    It is the first moment behind the newest failure: a launch that failed after a moment had come was a try of its own.
    """
    if group.failing_since is None or group.failed_at is None:
        return None
    at, tries = group.failing_since, 0
    while at <= group.failed_at:
        tries += 1
        pause = pause_seconds(tries)
        at += pause if pause < LONGEST_RETRY_SECONDS else pause * (1 + (group.failed_at - at) // pause)
    return at


def pause_seconds(failure_count: int) -> float:
    """Return how long to wait after so many failures in a row before asking again."""
    return min(FIRST_RETRY_SECONDS * 2.0 ** max(0, min(failure_count, 10) - 1), LONGEST_RETRY_SECONDS)


def failing_since(before: GroupObserved | None, first: float) -> float:
    """Return since when launches fail: AWS tells of the newest failures only, and in a long shortage the first of them are told no more.

    Args:
        before: the group as the look before found it, if there was one.
        first: when the oldest launch failed that AWS tells of now, Unix seconds; none that it tells of has succeeded
            since.

    Returns:
        Unix seconds.
    """
    if before is None or before.failing_since is None or before.failed_at is None or before.failed_at < first:
        return first  # one has succeeded in between: what had failed by then would be told of, too
    return min(before.failing_since, first)


def waiting_words(group: GroupObserved) -> str:
    """Return why instances do not come, in AWS's words, and what happens next; empty while nothing stands in the way.

    Without a running clock: the words change when something happens.
    """
    again = retry_at(group)
    when = f"; asked for again at {datetime.fromtimestamp(again, UTC):%H:%M:%S} UTC" if again is not None else ""
    if group.launch_suspension is not None:
        words = f"its group's Launch process is suspended ({group.launch_suspension or 'AWS gives no reason'})"
        if group.is_suspension_administrative:
            return (
                f"{words}: AWS has suspended it after "
                f"failures{'; lifted and ' + when.removeprefix('; ') if when else ' and it is lifted'}"
            )
        return f"{words}: instances come when who suspended it resumes it"
    return f"{group.launch_failure.rstrip('.')}{when}" if group.launch_failure else ""


def vacancies(before: Vacancies, *, missing: int, joined: int, now: float) -> tuple[Vacancies, tuple[float, ...]]:
    """Follow which places of a group are empty, and since when: how long a replacement takes begins there, not when AWS has an instance.

    AWS does not say which instance it launched for which place; the one that is empty for the longest is taken to be
    filled, or given up, first.

    Args:
        before: as the pass before left them.
        missing: how many instances the group lacks now.
        joined: how many it has listed for the first time.
        now: Unix seconds.

    Returns:
        The empty places, and since when those were empty that were filled: at most `joined`, the oldest first.
    """
    each = [at for at, count in before for _ in range(count)]
    filled, rest = each[:joined], each[joined:]
    rest = rest[max(0, len(rest) - missing) :]
    rest += [now] * (missing - len(rest))
    return tuple((at, sum(1 for _ in same)) for at, same in groupby(rest)), tuple(filled)
