"""Emulates LaunchInstances of Auto Scaling: launches instances at once, with the refusals that AWS documents.

Undocumented codes are ValidationError here. Undocumented, but refused here: a suspended Launch process, and a launch
beyond the maximum size.
Source: https://docs.aws.amazon.com/autoscaling/ec2/userguide/launch-instances-synchronously.html;
https://docs.aws.amazon.com/autoscaling/ec2/userguide/launching-instances-synchronous-provisioning.html (tokens and
retries); https://docs.aws.amazon.com/autoscaling/ec2/APIReference/API_LaunchInstances.html.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

from moto.autoscaling.exceptions import AutoscalingClientError, ValidationError
from moto.autoscaling.models import FakeAutoScalingGroup

from infra.local_cloud.auto_scaling import AutoScaling, instance_types
from infra.local_cloud.ec2 import INSUFFICIENT_CAPACITY

TOKEN_SECONDS: Final = 8 * 3600.0
"""Lifetime of a ClientToken."""
MOST_INSTANCES: Final = 100
_TOKEN: Final = re.compile(r"[A-Za-z0-9\-_/]{1,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """The parameters of one call of LaunchInstances, without the group."""

    count: int
    token: str
    zones: tuple[str, ...] = ()
    zone_ids: tuple[str, ...] = ()
    subnets: tuple[str, ...] = ()
    retry_strategy: Literal["none", "retry-with-group-configuration"] = "none"


class SynchronousLaunches:
    """Executes LaunchInstances, and remembers each answer by its token. The caller holds the server's lock."""

    def __init__(self, engine: AutoScaling, monotonic: Callable[[], float]) -> None:
        self._engine = engine
        self._monotonic = monotonic
        self._answers: dict[tuple[str, str], tuple[float, LaunchRequest, dict[str, Any]]] = {}

    def launch(self, group: FakeAutoScalingGroup, request: LaunchRequest) -> dict[str, Any]:
        """Launch instances, or return the answer to an earlier call with the same token.

        Raises AutoscalingClientError, without a launch, if AWS refuses the call.
        """
        now, key = self._monotonic(), (group.arn, request.token)
        self._answers = {key: each for key, each in self._answers.items() if now - each[0] < TOKEN_SECONDS}
        if key in self._answers:
            _, earlier, answer = self._answers[key]
            if earlier != request:
                raise AutoscalingClientError(
                    "IdempotentParameterMismatch", "The parameters do not match those of the token's first request."
                )
            return answer
        zone, subnet = self._place(group, request)
        _require_support(group)
        self._require_room(group, request)
        is_retried = request.retry_strategy == "retry-with-group-configuration"
        launched = self._engine.launch_now(group, request.count, zone, subnet, is_retried=is_retried)
        where = {"AvailabilityZone": zone, "AvailabilityZoneId": zone_id(zone), "SubnetId": subnet}
        types = instance_types(group) if sum(map(len, launched.values())) < request.count else []
        market = "OnDemand" if _on_demand_percentage(group) == 100 else "Spot"
        answer = {
            "AutoScalingGroupName": group.name,
            "ClientToken": request.token,
            "Instances": [
                {"InstanceType": each, "MarketType": market, "InstanceIds": ids, **where}
                for each, ids in launched.items()
            ],
            "Errors": [
                {
                    "InstanceType": each,
                    "MarketType": market,
                    "ErrorCode": "InsufficientInstanceCapacity",
                    "ErrorMessage": INSUFFICIENT_CAPACITY.format(type=each, zone=zone),
                    **where,
                }
                for each in types
            ],
        }
        self._answers[key] = now, request, answer
        return answer

    def _place(self, group: FakeAutoScalingGroup, request: LaunchRequest) -> tuple[str, str | None]:
        """Return the zone and the subnet of a launch, which must be unique and belong to the group."""
        if request.zones and request.zone_ids:
            raise ValidationError("You cannot specify both AvailabilityZones and AvailabilityZoneIds.")
        places: list[tuple[str, str | None]] = [(zone, None) for zone in group.availability_zones]
        if group.vpc_zone_identifier:
            subnets = group.ec2_backend.describe_subnets(subnet_ids=group.vpc_zone_identifier.split(","))
            places = [(each.availability_zone, each.id) for each in subnets]
        if len({zone for zone, _ in places}) > 1 and not (request.zones or request.zone_ids or request.subnets):
            raise ValidationError("A group with several Availability Zones needs AvailabilityZones or SubnetIds.")
        for zone, subnet in places:
            if (
                zone in (request.zones or (zone,))
                and zone_id(zone) in (request.zone_ids or (zone_id(zone),))
                and subnet in (request.subnets or (subnet,))
            ):
                return zone, subnet
        raise ValidationError("The Auto Scaling group has no such Availability Zone or subnet.")

    def _require_room(self, group: FakeAutoScalingGroup, request: LaunchRequest) -> None:
        after = (group.desired_capacity or 0) + request.count
        if not _TOKEN.fullmatch(request.token):
            raise ValidationError("The client token has invalid characters or an invalid length.")
        if not 1 <= request.count <= MOST_INSTANCES:
            raise ValidationError(f"RequestedCapacity must be between 1 and {MOST_INSTANCES}.")
        if after > group.max_size:
            raise ValidationError(f"The capacity {after} is above max value {group.max_size} for the AutoScalingGroup.")
        if "Launch" in group._suspended_processes:
            raise ValidationError("The process Launch of the AutoScalingGroup is suspended.")


def zone_id(zone: str) -> str:
    """Return the id of an Availability Zone of the local cloud."""
    return f"use1-az{1 + 'abcdef'.index(zone[-1])}"


def _require_support(group: FakeAutoScalingGroup) -> None:
    if group.ec2_launch_template is None:
        raise ValidationError("LaunchInstances needs a launch template. Launch configurations are not supported.")
    if group.warm_pool is not None:
        raise AutoscalingClientError("UnsupportedOperation", "Auto Scaling groups with warm pools are not supported.")
    distribution = (group.mixed_instances_policy or {}).get("InstancesDistribution") or {}
    is_based = int(distribution.get("OnDemandBaseCapacity") or 0) > 0
    if 0 < _on_demand_percentage(group) < 100 or (is_based and _on_demand_percentage(group) < 100):
        raise ValidationError("Policies that combine On-Demand and Spot Instances are not supported.")


def _on_demand_percentage(group: FakeAutoScalingGroup) -> int:
    distribution = (group.mixed_instances_policy or {}).get("InstancesDistribution") or {}
    return int(distribution.get("OnDemandPercentageAboveBaseCapacity", 100))
