"""The operator reads responses of EC2 and Auto Scaling in their documented form."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from botocore.stub import ANY, Stubber

from control_plane.cloud.aws import AwsOperator
from control_plane.cloud.connection import CloudMode, CloudSettings, Connection
from control_plane.cloud.errors import CloudError
from control_plane.cloud.operator import InstanceStatus, ScheduledEvent
from everstep.protocol.ids import NodeId

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


def test_instances_that_ec2_has_forgotten_cost_the_others_nothing(
    operator: AwsOperator, connection: Connection
) -> None:
    impaired = {"SystemStatus": {"Status": "impaired"}, "InstanceStatus": {"Status": "ok"}}
    with Stubber(connection.client("ec2")) as stub:
        for ids in ([OTHER, NODE], [OTHER]):
            stub.add_client_error(
                "describe_instance_status",
                "InvalidInstanceID.NotFound",
                expected_params={"InstanceIds": ids, "IncludeAllInstances": True},
            )
        answer = {"InstanceStatuses": [{"InstanceId": NODE, **impaired}]}
        stub.add_response("describe_instance_status", answer, {"InstanceIds": [NODE], "IncludeAllInstances": True})
        assert operator.statuses([NODE, OTHER]) == {NODE: InstanceStatus(failed_checks=("system",))}
        stub.assert_no_pending_responses()


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
