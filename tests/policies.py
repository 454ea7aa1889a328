"""Records the calls that the product sends to AWS, and evaluates IAM policies for them.

`recorded` turns each boto3 call of the product into the requests that AWS would authorize: an action, the ARN of the
resource, and condition keys such as the tags of the resource. `statements_for` evaluates a policy as IAM does.

Invariant: an operation, a condition operator or a policy element that this module does not know raises an error.
Source: Service Authorization Reference; IAM User Guide, policy evaluation logic.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from botocore.client import BaseClient

from tests.unit.local_cloud.served import ServedAws

ACCOUNT = "us-east-1:123456789012"
Policy = Mapping[str, Any]
Statement = Mapping[str, Any]


@dataclass(frozen=True)
class Request:
    """A request that AWS authorizes or denies: an action on a resource."""

    action: str
    resource: str
    """ARN of the resource. `*` if the action has no resources."""
    context: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Values of the condition keys that the request has."""


@contextmanager
def recorded(aws: ServedAws) -> Iterator[list[Request]]:
    """Record the requests of the product's clients inside the block, refused calls included."""
    requests: list[Request] = []
    make = BaseClient._make_api_call

    def recording(self: Any, operation: str, parameters: dict[str, Any]) -> Any:
        if self.meta.config.user_agent_extra == "everstep":
            requests.extend(_requests(aws, self.meta.service_model.service_name, operation, parameters))
        return make(self, operation, parameters)

    with patch.object(BaseClient, "_make_api_call", recording):
        yield requests


def statements_for(policy: Policy, request: Request) -> list[Statement]:
    """Return the statements of a policy that allow a request. Empty: AWS refuses the request."""
    return [statement for statement in policy["Statement"] if _allows(statement, request)]


def actions_of(statement: Statement) -> list[str]:
    """Return the actions of a statement."""
    return _listed(statement["Action"])


def _allows(statement: Statement, request: Request) -> bool:
    unknown = statement.keys() - {"Sid", "Effect", "Action", "Resource", "Condition"}
    assert not unknown, f"the evaluation of {unknown} is missing"
    assert statement["Effect"] == "Allow"
    return (
        any(_matches(pattern, request.action) for pattern in actions_of(statement))
        and any(_matches(pattern, request.resource) for pattern in _listed(statement["Resource"]))
        and all(
            _holds(operator, _listed(values), request.context.get(key, []))
            for operator, conditions in statement.get("Condition", {}).items()
            for key, values in conditions.items()
        )
    )


def _holds(operator: str, wanted: Sequence[str], given: Sequence[str]) -> bool:
    """Return whether the values of a condition key fulfil a condition. An absent key has no values."""
    if operator == "Null":
        return wanted == ["false" if given else "true"]
    if operator == "StringEquals":
        return any(value in wanted for value in given)
    if operator == "StringLike":
        return any(_matches(pattern, value) for pattern in wanted for value in given)
    if operator == "ForAllValues:StringEquals":
        return all(value in wanted for value in given)
    raise AssertionError(f"the evaluation of {operator} is missing")


def _matches(pattern: str, text: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", ".*").replace(r"\?", "."), text) is not None


def _listed(value: str | Sequence[str]) -> list[str]:
    return [value] if isinstance(value, str) else list(value)


def _requests(aws: ServedAws, service: str, operation: str, given: Mapping[str, Any]) -> Iterator[Request]:
    """Yield the requests that AWS authorizes for one boto3 call."""
    action = f"{service}:{operation}"
    match service, operation:
        case "sts", "GetCallerIdentity":
            pass  # AWS permits this call to everybody, so it needs no policy
        case "sts", "AssumeRole":
            yield Request(action, given["RoleArn"])
            if given.get("Tags"):
                keys = [each["Key"] for each in given["Tags"]]
                yield Request("sts:TagSession", given["RoleArn"], {"aws:TagKeys": keys})
        case (("autoscaling" | "ec2"), _) if operation.startswith(("Describe", "GetConsoleOutput")):
            yield Request(action, "*")
        case "autoscaling", _:
            yield _of_group(aws, action, given)
            if operation == "LaunchInstances":
                yield from _of_launch(aws, given["AutoScalingGroupName"])
        case "ec2", ("CreateTags" | "DeleteTags"):
            for instance in given["Resources"]:
                tags = _tagged(aws.instance(instance).get("Tags", []))
                keys = {"aws:TagKeys": [each["Key"] for each in given["Tags"]]}
                yield Request(action, f"arn:aws:ec2:{ACCOUNT}:instance/{instance}", {**tags, **keys})
        case "ec2", ("RebootInstances" | "TerminateInstances"):
            for instance in given["InstanceIds"]:
                tags = aws.instance(instance).get("Tags", [])
                yield Request(action, f"arn:aws:ec2:{ACCOUNT}:instance/{instance}", _tagged(tags))
        case "s3", _:
            yield from _of_object(operation, given)
        case "secretsmanager", ("GetSecretValue" | "PutSecretValue"):
            yield Request(action, aws.client(service).describe_secret(SecretId=given["SecretId"])["ARN"])
        case "ssm", "GetParameter":
            yield Request(action, aws.client(service).get_parameter(Name=given["Name"])["Parameter"]["ARN"])
        case "sqs", ("ReceiveMessage" | "DeleteMessageBatch"):
            queue = given["QueueUrl"].rpartition("/")[2]
            yield Request(action.removesuffix("Batch"), f"arn:aws:sqs:{ACCOUNT}:{queue}")
        case "events", "PutEvents":
            for entry in given["Entries"]:
                yield Request(action, entry["EventBusName"])
        case _:
            raise AssertionError(f"the resource of {action} is missing")


def _of_group(aws: ServedAws, action: str, given: Mapping[str, Any]) -> Request:
    """Return the request of a call that changes a group, or a member of a group."""
    scaling = aws.client("autoscaling")
    name = given.get("AutoScalingGroupName")
    if name is None:
        (member,) = scaling.describe_auto_scaling_instances(InstanceIds=[given["InstanceId"]])["AutoScalingInstances"]
        name = member["AutoScalingGroupName"]
    group = aws.group(name)
    return Request(action, group["AutoScalingGroupARN"], _tagged(group["Tags"]))


def _of_launch(aws: ServedAws, name: str) -> Iterator[Request]:
    """Yield the requests of the EC2 Fleet that LaunchInstances creates from the group's launch template.

    Source: https://docs.aws.amazon.com/autoscaling/ec2/userguide/launching-instances-synchronous-provisioning.html.
    AWS's policy BedrockAgentCoreRuntimeInstancesOperatorRolePolicy lists the kinds of resources.
    """
    template = aws.group(name)["LaunchTemplate"]["LaunchTemplateId"]
    found = aws.client("ec2").describe_tags(Filters=[{"Name": "resource-id", "Values": [template]}])["Tags"]
    tags = _tagged(found)
    yield Request("ec2:CreateFleet", f"arn:aws:ec2:{ACCOUNT}:launch-template/{template}", tags)
    for kind in ("fleet", "instance", "network-interface", "security-group", "subnet", "volume"):
        yield Request("ec2:CreateFleet", f"arn:aws:ec2:{ACCOUNT}:{kind}/*")
    yield Request("ec2:CreateFleet", "arn:aws:ec2:us-east-1::image/ami-1")


def _of_object(operation: str, given: Mapping[str, Any]) -> Iterator[Request]:
    """Yield the requests of a call to S3."""
    bucket = f"arn:aws:s3:::{given['Bucket']}"
    match operation:
        case "ListObjectsV2":
            yield Request("s3:ListBucket", bucket, {"s3:prefix": [given["Prefix"]]})
        case "ListMultipartUploads":
            yield Request("s3:ListBucketMultipartUploads", bucket, {"s3:prefix": [given["Prefix"]]})
        case "DeleteObjects":
            for each in given["Delete"]["Objects"]:
                yield Request("s3:DeleteObject", f"{bucket}/{each['Key']}")
        case "GetObject" | "HeadObject":
            yield Request("s3:GetObject", f"{bucket}/{given['Key']}")
        case "PutObject" | "CreateMultipartUpload" | "UploadPart" | "CompleteMultipartUpload":
            yield Request("s3:PutObject", f"{bucket}/{given['Key']}")
        case "AbortMultipartUpload":
            yield Request("s3:AbortMultipartUpload", f"{bucket}/{given['Key']}")
        case _:
            raise AssertionError(f"the action of s3:{operation} is missing")


def _tagged(tags: Sequence[Mapping[str, str]]) -> dict[str, Sequence[str]]:
    return {f"aws:ResourceTag/{each['Key']}": [each["Value"]] for each in tags}
