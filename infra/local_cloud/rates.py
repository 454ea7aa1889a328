"""Limits the rate of API calls with token buckets, as AWS does. Pure: the caller passes the time.

Each account has one bucket per *family* of operations. A call takes one token from the bucket of its family. AWS
refuses the call if the bucket is empty. EC2 publishes its rates. In two points, this module is stricter than EC2:

- EC2 currently limits each operation by itself. Here, the operations of a family share a bucket, as in EC2's earlier
  rules.
- EC2 has a smaller bucket for calls of some operations without a filter and without pages. Here, a call with ids
  instead of a filter counts as such a call.

Auto Scaling has one bucket for all operations. AWS does not publish its rate, so this module assumes one
(`AUTO_SCALING`).

Source: Amazon EC2 Developer Guide, request throttling; Amazon EC2 Auto Scaling API Reference, API request rate.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

import msgspec

READING: Final = ("Describe", "Get", "List", "Search")
"""Prefixes of the names of read-only operations."""


class Rate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A token bucket: its size, and the number of tokens that AWS adds per second."""

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
"""Operations of EC2 whose calls without a filter and without pages use a smaller bucket."""
EC2_OPERATIONS: Final[Mapping[str, Rate]] = {
    "CreateLaunchTemplateVersion": Rate(100, 5),
    "CreateTags": Rate(100, 10),
    "DescribeInstanceTopology": Rate(1, 1),
    "ModifyLaunchTemplate": Rate(100, 5),
    "RunInstances": Rate(5, 2),
    "StartInstances": Rate(5, 2),
    "TerminateInstances": Rate(100, 5),
}
"""Operations of EC2 that have a separate bucket. Only operations that Everstep or its users call are listed."""
AUTO_SCALING: Final = Rate(50, 5)
"""Assumed bucket of Auto Scaling: the smallest general bucket of EC2. AWS publishes no rate."""


def family_of(
    service: str, action: str, parameters: Collection[str], auto_scaling: Rate = AUTO_SCALING
) -> tuple[str, Rate] | None:
    """Return the name of the bucket that a call uses, and the bucket's rate.

    Args:
        service: name in the request's signature, such as `ec2`.
        action: name of the operation, such as `DescribeInstances`.
        parameters: names of the call's top-level parameters, such as `Filters`.
        auto_scaling: rate of Auto Scaling: the assumed rate, or the rate that a conformance run has measured.

    Returns:
        The name and the rate; None if the local cloud does not limit the service.
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
    """The token buckets of one account. Not thread-safe: the server uses them under its lock."""

    def __init__(self) -> None:
        self._levels: dict[str, tuple[float, float]] = {}

    def take(self, name: str, rate: Rate, now: float) -> bool:
        """Take one token, and return whether the bucket had one.

        Args:
            name: name of the bucket. A new bucket is full.
            rate: size and refill of the bucket. A size below one counts as one.
            now: monotonic seconds; never less than at an earlier call.

        Returns:
            False if the bucket had less than one token.
        """
        burst = max(1.0, rate.burst)
        level, at = self._levels.get(name, (burst, now))
        level = min(burst, level + (now - at) * rate.per_second)
        has_token = level >= 1.0
        self._levels[name] = (level - 1.0 if has_token else level, now)
        return has_token
