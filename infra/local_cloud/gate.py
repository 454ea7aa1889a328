"""Decides whether AWS would refuse a call of EC2 or Auto Scaling, before moto receives it.

The gate refuses undocumented parameters, calls above the rate limits, and Describe calls for a disrupted zone. It
records undocumented parameters, so that a test run fails. It also answers dry runs, some of which moto would execute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import parse_qsl

from botocore.model import OperationModel
from moto.core.parse import PROTOCOL_PARSERS
from moto.core.utils import get_service_model

from infra.local_cloud.documented import violations
from infra.local_cloud.faults import Faults
from infra.local_cloud.rates import Buckets, Rate, family_of
from infra.local_cloud.service_errors import THROTTLED

SERVICES: Final = frozenset({"autoscaling", "ec2"})
PROTOCOLS: Final = {"autoscaling": "query", "ec2": "ec2"}
DISRUPTED: Final = frozenset({"DescribeInstances", "DescribeInstanceStatus"})
"""Operations that fail for a disrupted zone. AWS documents this for DescribeInstances only."""
UNAVAILABLE: Final = ("503 Service Unavailable", "Unavailable", "The service is unavailable. Please try again shortly.")
DRY_RUN: Final = (
    "412 Precondition Failed",
    "DryRunOperation",
    "Request would have succeeded, but DryRun flag is set.",
)
"""EC2's answer to a permitted dry run. The keys of the local cloud permit all calls."""
MAX_WRONG_CALLS: Final = 1000


@dataclass(frozen=True, slots=True)
class AwsRequest:
    """One decoded call of EC2 or Auto Scaling."""

    service: str
    action: str
    """Empty if the body names no operation."""
    operation: OperationModel | None
    """None if the service has no such operation."""
    parameters: Mapping[str, Any]
    """Parameters by their names in botocore."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error code and message in AWS's words."""

    status: str
    code: str
    message: str


def read(service: str, body: bytes) -> AwsRequest:
    """Return the operation and the parameters of a call of one of `SERVICES`, in AWS's query protocol.

    Without parameters if the service has no such operation.
    """
    values = dict(parse_qsl(body.decode(errors="replace"), keep_blank_values=True))
    action, model = values.get("Action", ""), get_service_model(service)
    if action not in model.operation_names:
        return AwsRequest(service, action, None, {})
    operation = model.operation_model(action)
    parser = PROTOCOL_PARSERS[PROTOCOLS[service]](operation)
    return AwsRequest(service, action, operation, parser.parse({"values": values}))


@dataclass(eq=False, repr=False)
class AwsGate:
    """Refuses calls as AWS does. The server holds its lock during each call.

    `zone_of` returns an instance's zone, or None if EC2 does not describe it. `auto_scaling_rate` limits all calls of
    Auto Scaling together.
    """

    faults: Faults
    zone_of: Callable[[str], str | None]
    monotonic: Callable[[], float]
    auto_scaling_rate: Rate

    def __post_init__(self) -> None:
        self._buckets = Buckets()
        self._share: float | None = None
        self.wrong_calls: list[str] = []
        """Undocumented calls, one sentence each, oldest first, at most `MAX_WRONG_CALLS`."""

    def refusal(self, request: AwsRequest) -> Refusal | None:
        """Return the error that answers a call, or None if the call may proceed."""
        if not self._is_within_rate(request):
            return Refusal(*THROTTLED[request.service])
        wrong = violations(request.operation, request.parameters) if request.operation else []
        if wrong:
            self.wrong_calls.extend(f"{request.action}: {each.words}" for each in wrong)
            del self.wrong_calls[:-MAX_WRONG_CALLS]
            code = wrong[0].code if request.service == "ec2" else "ValidationError"
            return Refusal("400 Bad Request", code, wrong[0].words)
        if request.service == "ec2" and request.parameters.get("DryRun"):
            return Refusal(*DRY_RUN)
        if request.action in DISRUPTED and self._is_disrupted(request.parameters.get("InstanceIds") or ()):
            return Refusal(*UNAVAILABLE)
        return None

    def _is_within_rate(self, request: AwsRequest) -> bool:
        share = self.faults.conditions.api_rate_share
        if share != self._share:
            # After a change of the rate limits, all token buckets are full.
            self._share, self._buckets = share, Buckets()
        family = family_of(request.service, request.action, request.parameters.keys(), self.auto_scaling_rate)
        if share is None or family is None:
            return True
        name, rate = family
        return self._buckets.take(name, Rate(rate.burst * share, rate.per_second * share), self.monotonic())

    def _is_disrupted(self, instance_ids: tuple[str, ...]) -> bool:
        # A call without ids fails, and so does one with an id in the zone. Source: Amazon EC2 API Reference,
        # DescribeInstances.
        zones = self.faults.conditions.disrupted_zones
        return bool(zones) and (not instance_ids or any(self.zone_of(each) in zones for each in instance_ids))
