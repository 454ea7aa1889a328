"""Retries of failed instance launches, and the choice of the call that enlarges a group.

- Auto Scaling retries by itself, at growing intervals, until AWS suspends the group's launches (an administrative
  suspension). Everstep resumes such launches, and leaves a suspension by a user in place.
- Everstep retries 30 s after the first failure, with pauses that double up to 15 min.
- LaunchInstances returns ids and errors at once, but counts from the current capacity. SetDesiredCapacity sets an
  absolute value, so it is safe whenever the newest LaunchInstances is refused, unknown, or not yet visible.

Invariant: pure. A retry requests the capacity that the group already desires, so it can never enlarge a fleet. Source:
https://docs.aws.amazon.com/autoscaling/ec2/userguide/launch-instances-synchronously.html.
"""

from __future__ import annotations

from itertools import groupby

from control_plane.core.actions import LaunchInstances, SetDesired
from control_plane.core.observed.causes import LaunchesFail
from control_plane.core.observed.fleets import GroupObserved, LaunchRecord, Vacancies
from control_plane.core.observed.jobs import CapacityWait, FailedLaunches

FIRST_RETRY_SECONDS = 30.0
LONGEST_RETRY_SECONDS = 900.0
_MOST_DOUBLINGS = 10
LONG_WAIT_SECONDS = 300.0

MOST_LAUNCHED = 100
"""Limit of AWS."""
REPEAT_SECONDS = 600.0
"""Time for which Everstep repeats a call of LaunchInstances without an answer, under the same token.

A ClientToken is valid for 8 hours; afterwards the same token launches again. Source:
https://docs.aws.amazon.com/autoscaling/ec2/userguide/launching-instances-synchronous-provisioning.html.
"""
SETTLE_SECONDS = 10.0
"""Time for which AWS may still show the desired capacity before a LaunchInstances. Assumed."""
ASK_AGAIN_SECONDS = 3600.0
"""Time until Everstep tries a refused LaunchInstances again: a person may have changed the group."""


def may_launch(now: float, group: GroupObserved, launch: LaunchRecord | None) -> bool:
    """Return whether LaunchInstances may enlarge a group now. Otherwise only SetDesiredCapacity may."""
    counted = sum(member.counts for member in group.members)
    # With more members than it desires, the group's desired capacity would grow without new instances.
    if not group.zone or group.drift or group.launch_suspension is not None or counted > group.desired_count:
        return False
    if launch is None:
        return True
    age = now - launch.since
    if launch.is_refused or (launch.is_open and not _is_repeated(now, launch)):
        return age >= ASK_AGAIN_SECONDS
    return launch.is_open or group.desired_count >= launch.desired_count or age >= SETTLE_SECONDS


def unknown_count(now: float, group: GroupObserved, launch: LaunchRecord | None) -> int:
    """Return how many instances a call of LaunchInstances without a known outcome may still add to a group."""
    if launch is None or not _is_repeated(now, launch) or group.desired_count >= launch.desired_count:
        return 0
    return launch.count


def _is_repeated(now: float, launch: LaunchRecord) -> bool:
    return launch.is_open and now - launch.since < REPEAT_SECONDS


def growth(
    now: float, name: str, group: GroupObserved, desired: int, launch: LaunchRecord | None
) -> LaunchInstances | SetDesired:
    """Return the call that enlarges a group to the desired capacity `desired`."""
    if not may_launch(now, group, launch):
        return SetDesired(group=name, desired_count=desired)
    # A call of LaunchInstances without a known outcome is repeated unchanged, so that AWS launches its instances once.
    if launch is not None and _is_repeated(now, launch):
        key, count, after = launch.key, launch.count, launch.desired_count
    else:
        count = min(desired - group.desired_count, MOST_LAUNCHED)
        key, after = f"launch/{name}/{now:.3f}", group.desired_count + count
    return LaunchInstances(group=name, key=key, count=count, desired_count=after, zone=group.zone)


def is_long(wait: CapacityWait, now: float) -> bool:
    """Return whether the next launch attempt is so late that Everstep asks a person whether the job waits for it."""
    return wait.next_attempt_at - now >= LONG_WAIT_SECONDS


def failed_launches(group: GroupObserved) -> FailedLaunches | None:
    """Return the failed launches that Everstep retries. None while launches succeed, or if a person suspended them."""
    if (schedule := _schedule(group)) is None or group.is_launch_suspended_by_person or not group.launch_failure:
        return None
    at, failed = schedule
    return FailedLaunches(
        message=group.launch_failure.rstrip("."), is_shortage=group.is_short, failed_count=failed, next_attempt_at=at
    )


def retry_at(group: GroupObserved) -> float | None:
    """Return the first Unix time of Everstep's schedule after the newest failed launch, or None."""
    schedule = _schedule(group)
    return None if schedule is None else schedule[0]


def _schedule(group: GroupObserved) -> tuple[float, int] | None:
    """Return the Unix time of the next attempt, and the number of failed ones before it."""
    if group.failing_since is None or group.failed_at is None:
        return None
    at, failed = group.failing_since, 0
    while at <= group.failed_at:
        failed += 1
        at += pause_seconds(failed)
    return at, failed


def pause_seconds(failure_count: int) -> float:
    """Return the pause before the next retry, after `failure_count` failed launches in a row."""
    doublings = min(max(0, failure_count - 1), _MOST_DOUBLINGS)
    return min(FIRST_RETRY_SECONDS * 2.0**doublings, LONGEST_RETRY_SECONDS)


def failing_since(before: GroupObserved | None, first: float) -> float:
    """Return the Unix time of the first failed launch since the last success. `first` is the oldest listed failure."""
    # AWS lists only a group's newest activities, so in a long shortage the result comes from the previous poll.
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
    """Return a group's vacancies that remain, and the Unix start times of those that `joined` new instances filled."""
    # AWS does not report which instance fills which vacancy. Assume that the oldest is filled, or given up, first.
    each = [at for at, count in before for _ in range(count)]
    filled, rest = each[:joined], each[joined:]
    rest = rest[max(0, len(rest) - missing) :]
    rest += [now] * (missing - len(rest))
    return tuple((at, sum(1 for _ in same)) for at, same in groupby(rest)), tuple(filled)
