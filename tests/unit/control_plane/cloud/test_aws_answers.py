"""The operator reads responses of EC2 and Auto Scaling in their documented form."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

import pytest
from botocore.exceptions import ClientError
from botocore.stub import ANY, Stubber

from control_plane.cloud.aws import AwsOperator
from control_plane.cloud.connection import CloudMode, CloudSettings, Connection
from control_plane.cloud.errors import CloudError, GarbledAnswer, NotFound
from control_plane.cloud.instance_batches import BATCHES_AT_ONCE, described
from control_plane.cloud.instance_types import TYPES_RETRY_SECONDS
from control_plane.cloud.operator import (
    Ec2State,
    GroupState,
    InstanceShape,
    InstanceStatus,
    LaunchTemplateRef,
    MixedInstances,
    ScheduledEvent,
)
from control_plane.cloud.s3 import S3ServiceStore
from everstep.protocol.ids import NodeId
from everstep.protocol.plan import ObjectReference

NODE, OTHER = NodeId("i-1234567890abcdef0"), NodeId("i-0598c7d356eba48d7")
RETIREMENT = {
    "InstanceEventId": "instance-event-0d59937288b749b32",
    "Code": "instance-stop",
    "Description": "The instance is running on degraded hardware",
    "NotBefore": datetime(2026, 5, 23, tzinfo=UTC),
}


@pytest.fixture
def connection() -> Connection:
    return Connection(CloudSettings(mode=CloudMode.LOCAL, endpoint_url="http://127.0.0.1:1"))


@pytest.fixture
def operator(connection: Connection) -> AwsOperator:
    return AwsOperator(connection)


@pytest.mark.parametrize("missing", ["ETag", "LastModified", "ContentLength"])
def test_an_answer_of_s3_without_a_field_is_garbled(connection: Connection, missing: str) -> None:
    client = connection.client("s3")
    store = S3ServiceStore(cast("Connection", SimpleNamespace(client=lambda name: client)))
    facts = {"ETag": '"e"', "LastModified": datetime(2026, 5, 23, tzinfo=UTC), "ContentLength": 1}
    del facts[missing]
    with Stubber(client) as stub:
        stub.add_response("head_object", facts)
        with pytest.raises(GarbledAnswer, match=missing):
            store.head(ObjectReference(bucket="bucket", key="key"))


def test_scheduled_events_that_are_over_are_left_out(operator: AwsOperator, connection: Connection) -> None:
    over = [
        {**RETIREMENT, "Description": f"[{word}] {RETIREMENT['Description']}"} for word in ("Completed", "Canceled")
    ]
    answer = {
        "InstanceStatuses": [{"InstanceId": NODE, "Events": [RETIREMENT, *over]}, {"InstanceId": OTHER, "Events": over}]
    }
    with Stubber(connection.client("ec2")) as stub:
        stub.add_response("describe_instance_status", answer, {"InstanceIds": ANY, "IncludeAllInstances": True})
        found = operator.statuses([NODE, OTHER])
    event = ScheduledEvent(
        event_id="instance-event-0d59937288b749b32",
        code="instance-stop",
        description="The instance is running on degraded hardware",
        not_before=datetime(2026, 5, 23, tzinfo=UTC),
    )
    assert found == {NODE: InstanceStatus(events=(event,))}


def test_only_a_check_that_is_impaired_has_failed(operator: AwsOperator, connection: Connection) -> None:
    words = {NODE: ("impaired", "initializing"), OTHER: ("insufficient-data", "ok")}
    statuses = [
        {"InstanceId": id, "SystemStatus": {"Status": system}, "InstanceStatus": {"Status": own}}
        for id, (system, own) in words.items()
    ]
    with Stubber(connection.client("ec2")) as stub:
        stub.add_response(
            "describe_instance_status",
            {"InstanceStatuses": statuses},
            {"InstanceIds": ANY, "IncludeAllInstances": True},
        )
        assert operator.statuses([NODE, OTHER]) == {NODE: InstanceStatus(failed_checks=("system",))}


NODES = [NodeId(f"i-{number:017x}") for number in range(1, 11)]
EC2_CALLS = {
    "describe_instances": {},
    "describe_instance_status": {"IncludeAllInstances": True},
    "describe_instance_topology": {},
}


class Ec2:
    """An EC2 that refuses calls with unknown ids, as AWS documents it. Several threads may call it.

    With `names_unknown` set to False, the message of the refusal contains no id.
    """

    def __init__(self, known: Collection[NodeId], *, names_unknown: bool = True) -> None:
        self.known = set(known)
        self.names_unknown = names_unknown
        self.calls: list[list[str]] = []

    def operator(self) -> AwsOperator:
        return AwsOperator(cast(Connection, SimpleNamespace(client=lambda _: self)))

    def answer(self, operation: str, parameters: dict[str, Any]) -> list[str]:
        assert parameters.keys() == {"InstanceIds", *EC2_CALLS[operation]}, "no filter and no page size"
        asked: list[str] = parameters["InstanceIds"]
        self.calls.append(asked)
        unknown = sorted(set(asked) - self.known)
        if unknown:
            names = f"s '{', '.join(unknown)}'" if len(unknown) > 1 else f" '{unknown[0]}'"
            message = f"The instance ID{names} do not exist" if self.names_unknown else "Some instances do not exist"
            error = {"Error": {"Code": "InvalidInstanceID.NotFound", "Message": message}}
            raise ClientError(error, operation)
        return asked

    def get_paginator(self, operation: str) -> Any:
        return SimpleNamespace(paginate=lambda **parameters: [self.page(operation, self.answer(operation, parameters))])

    def page(self, operation: str, ids: list[str]) -> dict[str, Any]:
        match operation:
            case "describe_instances":
                instances = [{"InstanceId": id, "State": {"Name": "running"}} for id in ids]
                return {"Reservations": [{"Instances": instances}]}
            case "describe_instance_status":
                impaired = {"SystemStatus": {"Status": "impaired"}, "InstanceStatus": {"Status": "ok"}}
                return {"InstanceStatuses": [{"InstanceId": id, **impaired} for id in ids]}
            case _:
                return {"Instances": [{"InstanceId": id, "NetworkNodes": ["nn-1"]} for id in ids]}


def known_to(operator: AwsOperator, ids: Sequence[NodeId], operation: str) -> set[NodeId]:
    """Return the ids that the operator reports as known, by one of its three Describe operations of EC2."""
    match operation:
        case "describe_instances":
            found = operator.describe_instances(ids)
            assert set(found) == set(ids)
            return {id for id, instance in found.items() if instance.state is not Ec2State.ABSENT}
        case "describe_instance_status":
            return set(operator.statuses(ids))
        case _:
            return set(operator.network_nodes(ids))


@pytest.mark.parametrize("operation", EC2_CALLS)
@pytest.mark.parametrize(("names_unknown", "most_calls"), [(True, 2), (False, 13)])
def test_unknown_ids_hide_no_other_instance(operation: str, names_unknown: bool, most_calls: int) -> None:
    """If EC2 refuses a call because of unknown ids, the operator still describes all other instances.

    If the refusal names the unknown ids, a second call omits them. Otherwise, the operator halves the list until it
    has isolated them.
    """
    ec2 = Ec2([id for id in NODES if id not in (NODES[2], NODES[7])], names_unknown=names_unknown)
    operator = ec2.operator()
    assert known_to(operator, NODES, operation) == ec2.known
    assert len(ec2.calls) <= most_calls
    ec2.known.clear()
    assert known_to(operator, NODES, operation) == set()


@pytest.mark.parametrize(
    ("operation", "limit"),
    [("describe_instances", 500), ("describe_instance_status", 100), ("describe_instance_topology", 100)],
)
def test_a_call_names_at_most_as_many_instances_as_ec2_accepts(operation: str, limit: int) -> None:
    ids = [NodeId(f"i-{number:017x}") for number in range(2 * limit + 1)]
    ec2 = Ec2(ids)
    operator = ec2.operator()
    assert known_to(operator, ids, operation) == set(ids)
    assert sorted(map(len, ec2.calls)) == [1, limit, limit]


def test_one_call_lists_as_many_groups_as_auto_scaling_accepts() -> None:
    asked = list[int]()

    def paginate(**parameters: Any) -> list[dict[str, Any]]:
        asked.append(len(parameters["AutoScalingGroupNames"]))
        return []

    client = SimpleNamespace(get_paginator=lambda _: SimpleNamespace(paginate=paginate))
    operator = AwsOperator(cast(Connection, SimpleNamespace(client=lambda _: client)))
    assert operator.list_groups([f"group-{number}" for number in range(101)]) == {}
    assert asked == [100, 1]


def test_batches_are_described_side_by_side_and_four_at_a_time() -> None:
    together, most = threading.Barrier(BATCHES_AT_ONCE, timeout=30), [0, 0]
    lock = threading.Lock()

    def ask(ids: list[NodeId]) -> list[NodeId]:
        with lock:
            most[0] += 1
            most[1] = max(most)
        together.wait()  # Waits until `BATCHES_AT_ONCE` calls run. Fails if `described` makes one call after another.
        with lock:
            most[0] -= 1
        return ids

    ids = [NodeId(f"i-{number:02x}") for number in range(8 * BATCHES_AT_ONCE)]
    assert described(ask, ids, size=4) == ids
    assert most == [0, BATCHES_AT_ONCE]


def test_an_error_in_one_batch_is_raised_and_not_taken_for_an_unknown_id() -> None:
    def ask(ids: list[NodeId]) -> list[NodeId]:
        if NODES[4] in ids:
            raise NotFound(f"The group of {NODES[4]} does not exist", code="ResourceNotFoundException")
        return ids

    with pytest.raises(NotFound):
        described(ask, NODES, size=2)


def test_network_nodes_are_told_nearest_last_and_unknown_ones_are_left_out(
    operator: AwsOperator, connection: Connection
) -> None:
    network = ["nn-1111111111example", "nn-2222222222example", "nn-3333333333example"]
    answer = {
        "Instances": [
            {"InstanceId": NODE, "InstanceType": "p4d.24xlarge", "NetworkNodes": network},
            {"InstanceId": OTHER},
        ]
    }
    with Stubber(connection.client("ec2")) as stub:
        stub.add_response("describe_instance_topology", answer, {"InstanceIds": sorted([NODE, OTHER])})
        assert operator.network_nodes([NODE, OTHER]) == {NODE: tuple(network)}


def test_image_times_contain_the_images_that_ec2_returns(operator: AwsOperator, connection: Connection) -> None:
    answer = {"Images": [{"ImageId": "ami-1", "CreationDate": "2026-01-02T03:04:05.000Z"}, {"ImageId": "ami-2"}]}
    asked = {
        "Filters": [{"Name": "image-id", "Values": ["ami-1", "ami-2", "ami-deregistered"]}],
        "IncludeDeprecated": True,
        "IncludeDisabled": True,
        "MaxResults": 200,
    }
    with Stubber(connection.client("ec2")) as stub:
        stub.add_response("describe_images", answer, asked)
        found = operator.image_times(["ami-2", "ami-1", "ami-deregistered"])
    assert found == {"ami-1": datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)}


def test_one_call_asks_for_as_many_images_as_a_filter_accepts(operator: AwsOperator, connection: Connection) -> None:
    with Stubber(connection.client("ec2")) as stub:
        for _ in range(2):
            stub.add_response("describe_images", {"Images": []})
        assert operator.image_times([f"ami-{number}" for number in range(201)]) == {}
        stub.assert_no_pending_responses()


def test_an_instance_names_its_image(operator: AwsOperator, connection: Connection) -> None:
    instance = {"InstanceId": NODE, "State": {"Name": "running"}, "ImageId": "ami-1"}
    with Stubber(connection.client("ec2")) as stub:
        stub.add_response("describe_instances", {"Reservations": [{"Instances": [instance]}]})
        assert operator.describe_instances([NODE])[NODE].image_id == "ami-1"


def test_a_launch_that_aws_cancelled_for_a_cause_has_failed(operator: AwsOperator, connection: Connection) -> None:
    began = datetime(2026, 5, 23, tzinfo=UTC)
    told = [
        ("Cancelled", "no Spot capacity"),
        ("Cancelled", ""),
        ("InProgress", "waits"),
        ("Failed", "no capacity"),
        ("Successful", ""),
        ("Failed", "old"),
    ]
    activities: list[dict[str, object]] = [
        {
            "ActivityId": str(number),
            "AutoScalingGroupName": "group",
            "Description": "Launching a new EC2 instance",
            "Cause": "An instance was started",
            "StartTime": began,
            "StatusCode": code,
        }
        | ({"StatusMessage": message} if message else {})
        for number, (code, message) in enumerate(told)
    ]
    with Stubber(connection.client("autoscaling")) as stub:
        stub.add_response(
            "describe_scaling_activities",
            {"Activities": activities},
            {"AutoScalingGroupName": "group", "MaxRecords": 100},
        )
        assert [failure.message for failure in operator.recent_launch_failures("group")] == [
            "no Spot capacity",
            "no capacity",
        ]


def test_an_instance_type_without_topology_is_a_cloud_error(operator: AwsOperator, connection: Connection) -> None:
    with Stubber(connection.client("ec2")) as stub:
        stub.add_client_error("describe_instance_topology", "UnsupportedOperation")
        with pytest.raises(CloudError):
            operator.network_nodes([NODE])


GROUP: dict[str, Any] = {
    "AutoScalingGroupName": "g",
    "MinSize": 0,
    "MaxSize": 9,
    "DesiredCapacity": 1,
    "DefaultCooldown": 300,
    "AvailabilityZones": ["us-east-1a"],
    "HealthCheckType": "EC2",
    "CreatedTime": datetime(2026, 5, 23, tzinfo=UTC),
    "Instances": [],
    "SuspendedProcesses": [],
    "NewInstancesProtectedFromScaleIn": True,
    "Tags": [{"Key": "everstep:fleet", "Value": "f"}],
}
TEMPLATE = {"LaunchTemplateId": "lt-1", "LaunchTemplateName": "train", "Version": "3"}


def described_group(
    operator: AwsOperator, connection: Connection, *, types: Sequence[dict[str, Any]] = (), **answer: Any
) -> GroupState:
    """Describe a group. `types` is EC2's answer to DescribeInstanceTypes; without it, the call fails."""
    with Stubber(connection.client("autoscaling")) as groups, Stubber(connection.client("ec2")) as instances:
        groups.add_response("describe_auto_scaling_groups", {"AutoScalingGroups": [{**GROUP, **answer}]})
        groups.add_response("describe_lifecycle_hooks", {"LifecycleHooks": []})
        groups.add_response("describe_policies", {"ScalingPolicies": []})
        instances.add_response(
            "describe_launch_template_versions",
            {"LaunchTemplateVersions": [{"LaunchTemplateData": {"InstanceType": "c7i.large"}}]},
        )
        if types:
            instances.add_response("describe_instance_types", {"InstanceTypes": [*types]})
        return operator.describe_group("g")


@pytest.mark.parametrize(
    ("overrides", "mixed", "instance_type"),
    [
        ([], MixedInstances(instance_types=()), "c7i.large"),
        ([{"InstanceType": "p5.48xlarge"}], MixedInstances(instance_types=("p5.48xlarge",)), "p5.48xlarge"),
        (
            [{"InstanceType": "p5.48xlarge"}, {"InstanceType": "p4d.24xlarge", "WeightedCapacity": "2"}],
            MixedInstances(instance_types=("p5.48xlarge", "p4d.24xlarge"), features=("WeightedCapacity",)),
            "p5.48xlarge",
        ),
        (
            [{"InstanceRequirements": {"VCpuCount": {"Min": 8}, "MemoryMiB": {"Min": 1024}}}],
            MixedInstances(instance_types=(), features=("InstanceRequirements",)),
            "",
        ),
    ],
)
def test_a_mixed_instances_policy_has_the_launch_template_and_the_types_of_its_overrides(
    operator: AwsOperator,
    connection: Connection,
    overrides: list[dict[str, Any]],
    mixed: MixedInstances,
    instance_type: str,
) -> None:
    policy = {
        "LaunchTemplate": {"LaunchTemplateSpecification": TEMPLATE, "Overrides": overrides},
        "InstancesDistribution": {"OnDemandBaseCapacity": 1, "OnDemandPercentageAboveBaseCapacity": 0},
    }
    group = described_group(operator, connection, MixedInstancesPolicy=policy)
    assert group.launch_template == LaunchTemplateRef(template_id="lt-1", name="train", version="3")
    assert (group.mixed, group.instance_type) == (mixed, instance_type)


def test_the_hardware_of_several_instance_types_is_asked_once(operator: AwsOperator, connection: Connection) -> None:
    described = [
        {
            "InstanceType": "g6.24xlarge",
            "GpuInfo": {"Gpus": [{"Count": 4}]},
            "NetworkInfo": {"EfaInfo": {"MaximumEfaInterfaces": 1}, "EncryptionInTransitSupported": True},
            "MemoryInfo": {"SizeInMiB": 393_216},
        },
        {
            "InstanceType": "trn1.2xlarge",
            "NeuronInfo": {"NeuronDevices": [{"Count": 1}]},
            "NetworkInfo": {"EfaSupported": False},
            "MemoryInfo": {"SizeInMiB": 32_768},
        },
    ]
    overrides = [{"InstanceType": "trn1.2xlarge"}, {"InstanceType": "g6.24xlarge"}]
    policy = {"LaunchTemplate": {"LaunchTemplateSpecification": TEMPLATE, "Overrides": overrides}}
    groups = [
        described_group(operator, connection, types=types, MixedInstancesPolicy=policy) for types in (described, [])
    ]
    shapes = {
        "trn1.2xlarge": InstanceShape(accelerator_count=1, efa_count=0, memory_mib=32_768),
        "g6.24xlarge": InstanceShape(accelerator_count=4, efa_count=1, memory_mib=393_216, encrypts_in_transit=True),
    }
    assert [group.mixed and group.mixed.shapes for group in groups] == [shapes, shapes]
    assert [group.encrypting_types for group in groups] == [{"g6.24xlarge"}, {"g6.24xlarge"}]


def test_a_type_that_ec2_does_not_describe_counts_as_plain_and_is_asked_again_later(
    connection: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    operator = AwsOperator(connection, monotonic=lambda: now[0])
    kind = {
        "InstanceType": "c7i.large",
        "NetworkInfo": {"EncryptionInTransitSupported": True},
        "MemoryInfo": {"SizeInMiB": 4096},
    }
    with caplog.at_level("INFO"):
        assert described_group(operator, connection, LaunchTemplate=TEMPLATE).encrypting_types == frozenset()
    assert "does not describe the instance types c7i.large" in caplog.text
    now[0] = TYPES_RETRY_SECONDS
    group = described_group(operator, connection, types=[kind], LaunchTemplate=TEMPLATE)
    assert group.encrypting_types == {"c7i.large"}


def test_capacity_rebalancing_and_a_warm_pool_are_read_from_the_group(
    operator: AwsOperator, connection: Connection
) -> None:
    plain = described_group(operator, connection, LaunchTemplate=TEMPLATE)
    assert (plain.mixed, plain.has_capacity_rebalance, plain.has_warm_pool) == (None, False, False)
    pool = {"PoolState": "Stopped", "MinSize": 1}
    changed = AwsOperator(connection)
    group = described_group(
        changed, connection, LaunchTemplate=TEMPLATE, CapacityRebalance=True, WarmPoolConfiguration=pool
    )
    assert (group.has_capacity_rebalance, group.has_warm_pool) == (True, True)
