"""Tests the budget of calls for each API of AWS, and the metrics of these calls."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from botocore.stub import Stubber
from prometheus_client.registry import CollectorRegistry

from control_plane.cloud.aws import AwsOperator
from control_plane.cloud.call_meter import (
    ALL_DESCRIBE,
    BUDGETS,
    LONGEST_WAIT_SECONDS,
    CallBudget,
    CallMeter,
    TokenBucket,
)
from control_plane.cloud.connection import CloudMode, CloudSettings, Connection
from control_plane.cloud.errors import Throttled
from everstep.host.local_keys import LocalKeys
from everstep.protocol.ids import NodeId
from infra.local_cloud.rates import Rate, family_of

NODE = NodeId("i-1234567890abcdef0")


def test_a_bucket_permits_a_burst_and_then_its_rate() -> None:
    clock = [0.0]
    bucket = TokenBucket(CallBudget(2, 4), lambda: clock[0])
    assert [bucket.take() for _ in range(4)] == [0.0, 0.0, 0.25, 0.5]
    clock[0] = 0.5
    assert bucket.take() == 0.25
    clock[0] = 100.0
    assert [bucket.take() for _ in range(3)] == [0.0, 0.0, 0.25], "an idle bucket holds one burst"


def test_a_call_that_would_wait_too_long_reserves_nothing() -> None:
    clock = [0.0]
    bucket = TokenBucket(CallBudget(1, 1), lambda: clock[0])
    assert [bucket.take(2.0) for _ in range(5)] == [0.0, 1.0, 2.0, None, None]
    clock[0] = 1.0
    assert bucket.take(2.0) == 2.0


def test_every_budget_is_at_most_half_of_what_aws_publishes() -> None:
    published = {
        "DescribeInstances": CallBudget(50, 10),
        "DescribeInstanceStatus": CallBudget(50, 10),
        "DescribeLaunchTemplateVersions": CallBudget(50, 10),
        # AWS publishes a burst of 1. This table says 2, because half of 1 would allow no call.
        "DescribeInstanceTopology": CallBudget(2, 1),
    }
    for (service, operation), budget in BUDGETS.items():
        if service == "ec2":
            assert budget.burst_count <= published[operation].burst_count / 2
            assert budget.per_second <= published[operation].per_second / 2


@pytest.mark.parametrize("service", ["autoscaling", "ec2"])
def test_the_budgets_of_a_family_together_are_within_the_bucket_that_the_local_cloud_assumes(service: str) -> None:
    """The budgets leave half of Auto Scaling's shared bucket for changes and for other tools of the account."""
    totals: dict[str, tuple[Rate, float, float]] = {}
    for (each, operation), budget in BUDGETS.items():
        if each == service and (found := family_of(each, operation, ["InstanceIds"])):
            name, rate = found
            _, burst, per_second = totals.get(name, (rate, 0.0, 0.0))
            totals[name] = (rate, burst + budget.burst_count, per_second + budget.per_second)
    share = 0.5 if service == "autoscaling" else 1.0
    assert totals
    for rate, burst, per_second in totals.values():
        assert burst <= rate.burst * share
        assert per_second <= rate.per_second * share


def test_all_describe_operations_of_auto_scaling_share_one_budget() -> None:
    connection = Connection(CloudSettings(mode=CloudMode.LOCAL, endpoint_url="http://127.0.0.1:1"))
    waits: list[float] = []
    meter = CallMeter({("autoscaling", ALL_DESCRIBE): CallBudget(2, 1)}, monotonic=lambda: 0.0, wait=waits.append)
    client: Any = connection.client("autoscaling")
    meter.watch(client, "autoscaling")
    with Stubber(client) as stub:
        stub.add_response("describe_policies", {"ScalingPolicies": []})
        stub.add_response("describe_lifecycle_hooks", {"LifecycleHooks": []})
        stub.add_response("describe_auto_scaling_groups", {"AutoScalingGroups": []})
        stub.add_response("set_desired_capacity", {})
        client.describe_policies()
        client.describe_lifecycle_hooks(AutoScalingGroupName="g")
        assert waits == []
        client.describe_auto_scaling_groups()
        client.set_desired_capacity(AutoScalingGroupName="g", DesiredCapacity=1)
    assert waits == [1.0], "the third description waits, and the change does not"


class Aws(http.server.ThreadingHTTPServer):
    """Answers each request with the next answer of `says`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.says: list[tuple[int, str]] = []


class _Answer(http.server.BaseHTTPRequestHandler):
    server: Aws

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        status, body = self.server.says.pop(0)
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def aws() -> Iterator[Aws]:
    server = Aws()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def samples(meter: CallMeter) -> dict[tuple[str, str], float]:
    registry = CollectorRegistry(auto_describe=False)
    for collector in meter.collectors:
        registry.register(collector)
    return {
        (sample.name, sample.labels["operation"]): sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name.endswith("_total")
    }


THROTTLED = (503, "<Response><Errors><Error><Code>RequestLimitExceeded</Code></Error></Errors></Response>")
EMPTY = (200, "<DescribeInstancesResponse><reservationSet/></DescribeInstancesResponse>")


def test_each_request_and_each_throttled_one_is_counted(aws: Aws) -> None:
    """botocore retries a throttled request by itself, and the retry is a request, too."""
    aws.says = [THROTTLED, EMPTY, EMPTY]
    connection = Connection(
        CloudSettings(
            mode=CloudMode.LOCAL,
            endpoint_url=f"http://127.0.0.1:{aws.server_address[1]}",
            keys=LocalKeys(access_key_id="a", secret_access_key="b"),
        )
    )
    operator = AwsOperator(connection)
    for _ in range(2):
        operator.describe_instances([NODE])
    assert aws.says == []
    assert samples(connection.meter) == {
        ("everstep_aws_calls_total", "DescribeInstances"): 3.0,
        ("everstep_aws_throttled_total", "DescribeInstances"): 1.0,
    }


def test_calls_beyond_the_budget_wait_and_then_fail_without_a_request() -> None:
    connection = Connection(CloudSettings(mode=CloudMode.LOCAL, endpoint_url="http://127.0.0.1:1"))
    clock, waits = [0.0], list[float]()

    def wait(seconds: float) -> None:
        waits.append(seconds)

    budgets = {("ec2", "DescribeInstances"): CallBudget(1, 0.2)}
    meter = CallMeter(budgets, monotonic=lambda: clock[0], wait=wait)
    client: Any = connection.client("ec2")
    meter.watch(client, "ec2")
    operator = AwsOperator(connection)
    with Stubber(client) as stub:
        for _ in range(4):
            stub.add_response("describe_instances", {"Reservations": []})
        for _ in range(3):
            operator.describe_instances([NODE])
        with pytest.raises(Throttled, match="this server's own budget"):
            operator.describe_instances([NODE])
        clock[0] = LONGEST_WAIT_SECONDS
        operator.describe_instances([NODE])  # The stub still has a fourth answer: the refused call sent no request.
    assert waits == [5.0, LONGEST_WAIT_SECONDS, 5.0]
    assert samples(meter)["everstep_aws_delayed_total", "DescribeInstances"] == 4.0


def test_only_connections_to_aws_have_budgets() -> None:
    local = Connection(CloudSettings(mode=CloudMode.LOCAL, endpoint_url="http://127.0.0.1:1"))
    real = Connection(CloudSettings(mode=CloudMode.AWS, region="eu-west-1"))
    assert (local.meter.budgets, real.meter.budgets) == ({}, BUDGETS)
