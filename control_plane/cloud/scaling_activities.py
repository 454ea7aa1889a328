"""Reads the failed launches of an Auto Scaling group from its scaling activities. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from control_plane.cloud.operator import LaunchFailure


def recent_failures(activities: Sequence[Mapping[str, Any]], own: Iterable[LaunchFailure]) -> tuple[LaunchFailure, ...]:
    """Return the failed launches since the last successful one, newest first.

    `own` are failures that LaunchInstances returned. AWS does not promise to list them as activities.
    """
    success = next((each for each in activities if _is_launch(each) and each["StatusCode"] == "Successful"), None)
    later = [failure for failure in own if success is None or failure.at > success["StartTime"]]
    return tuple(sorted([*later, *_since_success(activities)], key=lambda failure: failure.at, reverse=True))


def _is_launch(activity: Mapping[str, Any]) -> bool:
    return str(activity.get("Description", "")).startswith("Launching")


def _since_success(activities: Iterable[Mapping[str, Any]]) -> Iterator[LaunchFailure]:
    """Yield failed launches up to the newest successful launch."""
    # A cancelled launch without a message is no failure: Auto Scaling no longer needed the instance. Source:
    # Amazon EC2 Auto Scaling API Reference, DescribeScalingActivities.
    for activity in activities:
        if not _is_launch(activity):
            continue
        if activity["StatusCode"] == "Successful":
            return
        if activity["StatusCode"] == "Failed" or (
            activity["StatusCode"] == "Cancelled" and activity.get("StatusMessage")
        ):
            yield LaunchFailure(
                at=activity["StartTime"], message=activity.get("StatusMessage") or activity["Description"]
            )
