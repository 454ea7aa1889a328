"""Tests the connection to AWS: errors become Everstep's error classes, and calls stay within AWS's limits."""

from __future__ import annotations

from http.client import IncompleteRead
from typing import Any

import pytest
from botocore.exceptions import (
    ClientError,
    ConnectTimeoutError,
    EndpointConnectionError,
    NoCredentialsError,
    ParamValidationError,
    PartialCredentialsError,
)
from botocore.parsers import ResponseParserError
from botocore.stub import Stubber
from urllib3.exceptions import ProtocolError

from control_plane.cloud import errors
from control_plane.cloud.aws import SETTINGS_TTL_SECONDS, AwsOperator
from control_plane.cloud.connection import (
    CloudIdentity,
    CloudMode,
    CloudSettings,
    Connection,
    from_client_error,
    translated,
)
from control_plane.cloud.errors import (
    AccessDenied,
    CapacityError,
    CloudError,
    CloudUnavailable,
    GarbledAnswer,
    InvalidRequest,
    NoCredentials,
    NotFound,
    ResourceContended,
    Throttled,
)
from control_plane.cloud.scaling_activities import recent_failures


def said(code: str, message: str = "words of AWS", status: int = 400) -> ClientError:
    return ClientError(
        {"Error": {"Code": code, "Message": message}, "ResponseMetadata": {"HTTPStatusCode": status}},
        "SetDesiredCapacity",
    )


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (said("Throttling"), Throttled),
        (said("RequestLimitExceeded", status=503), Throttled),
        (said("SlowDown", status=503), Throttled),
        (said("Unheard", status=429), Throttled),
        (said("InsufficientInstanceCapacity", status=500), CapacityError),
        (said("VcpuLimitExceeded"), CapacityError),
        (said("ScalingActivityInProgress"), ResourceContended),
        (said("UnauthorizedOperation", status=403), AccessDenied),
        (said("ExpiredToken"), AccessDenied),
        (said("Unheard", status=403), AccessDenied),
        (said("InvalidInstanceID.NotFound"), NotFound),
        (said("NoSuchKey", status=404), NotFound),
        (said("404", status=404), NotFound),
        (said("ValidationError", "AutoScalingGroup name not found - null"), NotFound),
        (said("ValidationError", "New SetDesiredCapacity value 99 is above max value 8"), InvalidRequest),
        (said("InternalFailure", status=500), CloudUnavailable),
        (said("Unheard", status=502), CloudUnavailable),
        (said("MalformedQueryString"), InvalidRequest),
    ],
)
def test_every_answer_has_its_kind(error: ClientError, kind: type[CloudError]) -> None:
    translated_error = from_client_error(error)
    assert type(translated_error) is kind
    assert translated_error.code == error.response["Error"]["Code"]
    assert error.response["Error"]["Message"] in translated_error.message
    assert "SetDesiredCapacity" in translated_error.message


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (EndpointConnectionError(endpoint_url="http://x"), CloudUnavailable),
        (ConnectTimeoutError(endpoint_url="http://x"), CloudUnavailable),
        (ResponseParserError("an HTML page"), GarbledAnswer),
        (TimeoutError("while the body was read"), CloudUnavailable),
        (ConnectionResetError("reset by peer"), CloudUnavailable),
        (IncompleteRead(b"half"), CloudUnavailable),
        (ProtocolError("connection broken"), CloudUnavailable),
        (NoCredentialsError(), NoCredentials),
        (PartialCredentialsError(provider="env", cred_var="AWS_SECRET_ACCESS_KEY"), AccessDenied),
        (ParamValidationError(report="bad"), InvalidRequest),
    ],
)
def test_every_failure_of_the_client_has_its_kind(raised: Exception, kind: type[CloudError]) -> None:
    with pytest.raises(kind) as error, translated():
        raise raised
    assert error.value.__cause__ is raised


def test_a_programmers_error_is_not_translated() -> None:
    with pytest.raises(KeyError), translated():
        raise KeyError("bug")


def test_what_may_be_repeated_is_a_property_of_the_type() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, CloudError)]
    assert {kind.__name__ for kind in kinds if kind.retryable} == {
        "Throttled",
        "CloudUnavailable",
        "GarbledAnswer",
        "ResourceContended",
        "CapacityError",
    }
    drawn = errors.__doc__ or ""
    assert all(kind.__name__ in drawn for kind in kinds)
    for line in drawn.splitlines():
        name = line.strip(" ├└─").split(" ", 1)[0]
        if name in {kind.__name__ for kind in kinds} and name != "CloudError":
            assert line.rstrip().endswith("retryable") is getattr(errors, name).retryable, line


def test_the_identity_is_a_line_for_people() -> None:
    assert str(CloudIdentity(account="1", region="r", endpoint="e")) == "AWS account 1, region r, endpoint e"


@pytest.fixture
def connection() -> Connection:
    return Connection(CloudSettings(mode=CloudMode.LOCAL, endpoint_url="http://127.0.0.1:1"))


GROUP: dict[str, Any] = {
    "AutoScalingGroupName": "g",
    "MinSize": 0,
    "MaxSize": 9,
    "DesiredCapacity": 1,
    "DefaultCooldown": 300,
    "AvailabilityZones": ["us-east-1a"],
    "HealthCheckType": "EC2",
    "CreatedTime": "2026-01-01T00:00:00Z",
    "Instances": [],
    "SuspendedProcesses": [],
    "NewInstancesProtectedFromScaleIn": True,
    "Tags": [{"Key": "everstep:fleet", "Value": "f"}],
}


def test_hooks_and_policies_are_read_now_and_then_and_the_group_always(connection: Connection) -> None:
    now = 0.0
    operator = AwsOperator(connection, monotonic=lambda: now)
    with Stubber(connection.client("autoscaling")) as stub:
        for _ in range(2):
            stub.add_response("describe_auto_scaling_groups", {"AutoScalingGroups": [GROUP]})
            if now == 0.0:
                stub.add_response("describe_lifecycle_hooks", {"LifecycleHooks": []})
                stub.add_response("describe_policies", {"ScalingPolicies": []})
            assert operator.describe_group("g").launch_template is None
            now = SETTINGS_TTL_SECONDS - 0.1
        stub.assert_no_pending_responses()
        now = SETTINGS_TTL_SECONDS + 0.1
        stub.add_response(
            "describe_auto_scaling_groups", {"AutoScalingGroups": [{**GROUP, "Status": "Delete in progress"}]}
        )
        stub.add_response("describe_lifecycle_hooks", {"LifecycleHooks": []})
        stub.add_response("describe_policies", {"ScalingPolicies": [{"PolicyName": "cpu"}]})
        group = operator.describe_group("g")
        assert (group.scaling_policies, group.status) == (("cpu",), "Delete in progress")
        stub.assert_no_pending_responses()


def test_a_group_is_described_without_its_launch_template(
    connection: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    now = 0.0
    operator = AwsOperator(connection, monotonic=lambda: now)
    template = {"LaunchTemplateId": "lt-1", "LaunchTemplateName": "gpus", "Version": "7"}
    member = {
        "InstanceId": "i-1",
        "InstanceType": "p5.48xlarge",
        "AvailabilityZone": "us-east-1a",
        "LifecycleState": "InService",
        "HealthStatus": "Healthy",
        "ProtectedFromScaleIn": True,
    }
    found: list[dict[str, Any]] = [member]
    with Stubber(connection.client("autoscaling")) as stub, Stubber(connection.client("ec2")) as ec2:

        def describe() -> str:
            stub.add_response(
                "describe_auto_scaling_groups",
                {"AutoScalingGroups": [{**GROUP, "LaunchTemplate": template, "Instances": found}]},
            )
            stub.add_response("describe_lifecycle_hooks", {"LifecycleHooks": []})
            stub.add_response("describe_policies", {"ScalingPolicies": []})
            ec2.add_client_error(
                "describe_launch_template_versions",
                "InvalidLaunchTemplateId.VersionNotFound",
                "Could not find version 7",
            )
            return operator.describe_group("g").instance_type

        assert describe() == "p5.48xlarge", "its members say so"
        now, found = 2 * SETTINGS_TTL_SECONDS, []
        assert describe() == "p5.48xlarge", "it is known"
        assert sum("Could not find version 7" in record.message for record in caplog.records) == 1
        operator = AwsOperator(connection)
        with pytest.raises(InvalidRequest, match="Could not find version 7"):
            describe()


def test_a_tag_that_is_taken_away_is_noticed(connection: Connection) -> None:
    operator = AwsOperator(connection, monotonic=lambda: 0.0)
    with Stubber(connection.client("autoscaling")) as stub:
        stub.add_response("describe_auto_scaling_groups", {"AutoScalingGroups": [GROUP]})
        stub.add_response(
            "set_desired_capacity", {}, {"AutoScalingGroupName": "g", "DesiredCapacity": 2, "HonorCooldown": False}
        )
        operator.set_desired("g", 2)
        for _ in range(2):
            stub.add_response("describe_auto_scaling_groups", {"AutoScalingGroups": [{**GROUP, "Tags": []}]})
        with pytest.raises(errors.GroupNotOurs):
            operator.describe_group("g")
        with pytest.raises(errors.GroupNotOurs):
            operator.set_desired("g", 3)
        stub.assert_no_pending_responses()


def test_nothing_to_suspend_suspends_nothing(connection: Connection) -> None:
    with Stubber(connection.client("autoscaling")):
        # AWS would treat an empty list as "all processes", so the operator makes no call.
        AwsOperator(connection).suspend_processes("g", [])


def test_a_hook_that_holds_nobody_is_fine_and_other_refusals_are_not(connection: Connection) -> None:
    operator = AwsOperator(connection)
    with Stubber(connection.client("autoscaling")) as stub:
        stub.add_response("describe_auto_scaling_groups", {"AutoScalingGroups": [GROUP]})
        stub.add_client_error(
            "complete_lifecycle_action", "ValidationError", "No active Lifecycle Action found with instance ID i-1"
        )
        operator.complete_termination("g", "h", "i-1")  # type: ignore[arg-type]
        stub.add_client_error("complete_lifecycle_action", "ValidationError", "something else")
        with pytest.raises(InvalidRequest, match="something else"):
            operator.complete_termination("g", "h", "i-1")  # type: ignore[arg-type]
        stub.add_client_error("complete_lifecycle_action", "Throttling")
        with pytest.raises(Throttled):
            operator.complete_termination("g", "h", "i-1")  # type: ignore[arg-type]


def test_only_launches_count_as_failures_and_success_ends_them() -> None:
    def activity(description: str, status: str, message: str | None = None) -> dict[str, Any]:
        return {"Description": description, "StatusCode": status, "StatusMessage": message, "StartTime": 0}

    activities = [
        activity("Launching a new EC2 instance: i-2", "InProgress"),
        activity("Terminating EC2 instance: i-1", "Failed", "not a launch"),
        activity("Launching a new EC2 instance", "Failed", "newest"),
        activity("Terminating EC2 instance: i-1", "Successful"),
        activity("Launching a new EC2 instance", "Failed"),
        activity("Launching a new EC2 instance: i-1", "Successful"),
        activity("Launching a new EC2 instance", "Failed", "before the success"),
    ]
    assert [failure.message for failure in recent_failures(activities, ())] == [
        "newest",
        "Launching a new EC2 instance",
    ]
