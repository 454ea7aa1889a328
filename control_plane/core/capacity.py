"""Retries of failed instance launches: when Everstep retries, and the text for users about why launches fail.

- Auto Scaling retries by itself, at growing intervals. After failures over a long time, AWS suspends the group's
  launches (an administrative suspension).
- Everstep retries 30 s after the first failure. Each further pause is twice as long as the one before, up to 15 min.
  The time of the first failure alone determines these times. A launch that Auto Scaling retries by itself and that
  fails does not move them: Everstep retries at the first of these times after the newest failure.
- Everstep resumes launches that AWS suspended, and leaves a suspension by a user in place.

Invariant: pure. A retry requests the capacity that the group already desires, so it can never enlarge a fleet. Source:
Amazon EC2 Auto Scaling User Guide, `Suspend and resume processes` (administrative suspension).
"""

from __future__ import annotations

from itertools import groupby

from control_plane.core.observed.causes import LaunchesFail
from control_plane.core.observed.fleets import GroupObserved, Vacancies
from control_plane.core.observed.jobs import CapacityWait, FailedLaunches

FIRST_RETRY_SECONDS = 30.0
LONGEST_RETRY_SECONDS = 900.0
_MOST_DOUBLINGS = 10
"""More doublings of the first pause than the longest pause has."""
LONG_WAIT_SECONDS = 300.0
"""If the next retry is at least this far away, Everstep asks a person to decide whether the job waits for it."""


def is_long(wait: CapacityWait, now: float) -> bool:
    """Return whether the next launch attempt is so late that Everstep asks a person whether the job waits for it.

    `now`: Unix seconds.
    """
    return wait.next_attempt_at - now >= LONG_WAIT_SECONDS


def failed_launches(group: GroupObserved) -> FailedLaunches | None:
    """Return the failed launches of a group that Everstep retries.

    Return None while launches succeed. Everstep does not retry launches that a person suspended, so the result is None
    then, too.
    """
    if (schedule := _schedule(group)) is None or group.is_launch_suspended_by_person or not group.launch_failure:
        return None
    at, failed = schedule
    return FailedLaunches(
        message=group.launch_failure.rstrip("."), is_shortage=group.is_short, failed_count=failed, next_attempt_at=at
    )


def retry_at(group: GroupObserved) -> float | None:
    """Return the Unix time at which Everstep next retries failed launches of a group, or None if no launch has failed.

    The result is the first time of Everstep's schedule after the newest failed launch. The newest failed launch may be
    a retry by Auto Scaling itself.
    """
    schedule = _schedule(group)
    return None if schedule is None else schedule[0]


def _schedule(group: GroupObserved) -> tuple[float, int] | None:
    """Return the Unix time of Everstep's next launch attempt, and the number of failed attempts before it.

    The first failed launch counts as an attempt. Retries by Auto Scaling itself do not count.
    """
    if group.failing_since is None or group.failed_at is None:
        return None
    at, failed = group.failing_since, 0
    while at <= group.failed_at:
        failed += 1
        at += pause_seconds(failed)
    return at, failed


def pause_seconds(failure_count: int) -> float:
    """Return the pause in seconds before the next retry, after `failure_count` failed launches in a row."""
    doublings = min(max(0, failure_count - 1), _MOST_DOUBLINGS)
    return min(FIRST_RETRY_SECONDS * 2.0**doublings, LONGEST_RETRY_SECONDS)


def failing_since(before: GroupObserved | None, first: float) -> float:
    """Return the Unix time of the first failed launch since the last successful launch.

    AWS lists only a group's newest activities. In a long shortage, its list no longer contains the first failures, so
    the function uses the result of the previous poll.

    Args:
        before: the group as the previous poll observed it, or None at the first poll.
        first: time at which the oldest listed launch failed, in Unix seconds. No later launch in the list has
            succeeded.

    Returns:
        Unix seconds.
    """
    if before is None or before.failing_since is None or before.failed_at is None or before.failed_at < first:
        # The previous poll observed no failures, or a launch has succeeded since then.
        return first
    return min(before.failing_since, first)


def failure(group: GroupObserved) -> LaunchesFail | None:
    """Return why the group's launches fail, and when Everstep retries. None while launches succeed."""
    if group.launch_suspension is None and not group.launch_failure:
        return None
    return LaunchesFail(
        text=group.launch_failure.rstrip("."),
        retry_at=retry_at(group),
        suspension=group.launch_suspension,
        is_suspension_administrative=group.is_suspension_administrative,
    )


def vacancies(before: Vacancies, *, missing: int, joined: int, now: float) -> tuple[Vacancies, tuple[float, ...]]:
    """Return a group's vacancies (missing instances) that remain, and the start times of those that instances filled.

    A vacancy is an instance that the group desires and does not have. The measured duration of a replacement starts
    when the vacancy occurs, before AWS launches the instance. AWS does not report which instance fills which vacancy.
    This function assumes that the oldest vacancy is filled, or given up, first.

    Args:
        before: the vacancies that the previous call returned.
        missing: how many instances the group lacks now.
        joined: how many instances the group lists for the first time.
        now: Unix seconds.

    Returns:
        The remaining vacancies, and the start times of the filled vacancies in Unix seconds. The second value has at
        most `joined` entries, oldest first.
    """
    each = [at for at, count in before for _ in range(count)]
    filled, rest = each[:joined], each[joined:]
    rest = rest[max(0, len(rest) - missing) :]
    rest += [now] * (missing - len(rest))
    return tuple((at, sum(1 for _ in same)) for at, same in groupby(rest)), tuple(filled)
