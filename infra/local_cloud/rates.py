"""Limits the rate of API calls with token buckets, as AWS does. Pure: the caller passes the time.

Each account has one bucket per family of operations. In two points, this is stricter than EC2: operations of a family
share a bucket, as in EC2's earlier rules, and a call with ids instead of a filter uses the smaller bucket for calls
without filter and pages. AWS publishes no rate of Auto Scaling (`AUTO_SCALING`).
Source: Amazon EC2 Developer Guide, request throttling; Amazon EC2 Auto Scaling API Reference, API request rate.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

import msgspec

READING: Final = ("Describe", "Get", "List", "Search")
"""Prefixes of read-only operations."""


class Rate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A token bucket: its size and its refill per second."""

    burst: float
    per_second: float


EC2_READING: Final = Rate(100, 20)
EC2_UNPAGINATED: Final = Rate(50, 10)
EC2_CHANGING: Final = Rate(50, 5)
UNPAGINATED: Final = frozenset(
    {
        "DescribeInstances",
        "DescribeInstanceStatus",
        "DescribeNetworkInterfaces",
        "DescribeSecurityGroups",
        "DescribeSnapshots",
        "DescribeSpotInstanceRequests",
        "DescribeVolumes",
    }
)
"""Operations with a smaller bucket for calls without a filter and without pages."""
EC2_OPERATIONS: Final[Mapping[str, Rate]] = {
    "CreateLaunchTemplateVersion": Rate(100, 5),
    "CreateTags": Rate(100, 10),
    "DescribeInstanceTopology": Rate(1, 1),
    "ModifyLaunchTemplate": Rate(100, 5),
    "RunInstances": Rate(5, 2),
    "StartInstances": Rate(5, 2),
    "TerminateInstances": Rate(100, 5),
}
"""Operations with a bucket of their own, as far as Everstep or its users call them."""
AUTO_SCALING: Final = Rate(50, 5)
"""The smallest general bucket of EC2, an assumption, because AWS publishes no rate."""


def family_of(
    service: str, action: str, parameters: Collection[str], auto_scaling: Rate = AUTO_SCALING
) -> tuple[str, Rate] | None:
    """Return the name and the rate of the bucket that a call uses, or None if the service is not limited.

    `service` is named as in the signature, `parameters` are the top-level names.
    """
    if service == "autoscaling":
        return "autoscaling", auto_scaling
    if service != "ec2":
        return None
    if action in EC2_OPERATIONS:
        return action, EC2_OPERATIONS[action]
    if not action.startswith(READING):
        return "ec2 changes", EC2_CHANGING
    if action in UNPAGINATED and not {"Filters", "MaxResults", "NextToken"} & set(parameters):
        return "ec2 unpaginated", EC2_UNPAGINATED
    return "ec2 reads", EC2_READING


class Buckets:
    """The token buckets of one account. Not thread-safe."""

    def __init__(self) -> None:
        self._levels: dict[str, tuple[float, float]] = {}

    def take(self, name: str, rate: Rate, now: float) -> bool:
        """Take one token, and return whether the bucket had one. A new bucket is full. `now` is monotonic."""
        burst = max(1.0, rate.burst)
        level, at = self._levels.get(name, (burst, now))
        level = min(burst, level + (now - at) * rate.per_second)
        has_token = level >= 1.0
        self._levels[name] = (level - 1.0 if has_token else level, now)
        return has_token
