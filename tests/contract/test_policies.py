"""The policies of Terraform's module `identity` allow the calls that servers and agents make, and nothing else.

The tests make each call of a server and of an agent against the local cloud, and evaluate the rendered policies for the
recorded calls: actions, resources and conditions.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from unittest.mock import patch

import pytest

from control_plane.cloud.aws import AwsOperator
from control_plane.cloud.connection import Connection
from control_plane.cloud.contract import TERMINATION_HOOK
from control_plane.cloud.errors import CloudError
from control_plane.cloud.notices import SqsQueue
from control_plane.cloud.s3 import S3ServiceStore
from control_plane.cloud.secrets import ManagedSecrets
from control_plane.cloud.sinks import EventBusSink
from everstep.doctor.node_facts import described_type
from everstep.protocol.ids import NodeId
from everstep.protocol.plan import ObjectReference
from infra.local_cloud.environment import aws_variables
from tests.contract.test_sinks import entries
from tests.policies import Policy, Request, actions_of, recorded, statements_for
from tests.terraform import needs_provider, needs_terraform, terraform_of
from tests.unit.local_cloud.served import ServedAws, served_aws
from worker.storage.aws import JobPrincipal
from worker.storage.node_aws import NodeAws
from worker.storage.s3 import S3ObjectStore as NodeObjectStore
from worker.storage.s3 import s3_store

BUCKET, ROLE = "everstep-bucket", "arn:aws:iam::123456789012:role/training"
NODE = "arn:aws:ec2:us-east-1:123456789012:instance/i-1"
OURS = {
    "aws:ResourceTag/everstep:fleet": ["everstep-main"],
    "aws:ResourceTag/everstep:installation": ["everstep"],
}
MIB = 1024 * 1024
TAGS = [
    {"Key": "everstep:fleet", "Value": "everstep-main", "PropagateAtLaunch": True},
    {"Key": "everstep:installation", "Value": "everstep", "PropagateAtLaunch": True},
]

pytestmark = [pytest.mark.timeout(900), needs_terraform, needs_provider]


@pytest.fixture(scope="module")
def aws(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedAws]:
    with served_aws(tmp_path_factory.mktemp("aws")) as served:
        yield served


@pytest.fixture(scope="module")
def places(aws: ServedAws) -> Mapping[str, str]:
    """Create the resources that an installation uses. Return their ARNs by the variable of the module `identity`."""
    aws.client("s3").create_bucket(Bucket=BUCKET)
    secret = aws.client("secretsmanager").create_secret
    queue = aws.client("sqs").create_queue(QueueName="everstep-notices")["QueueUrl"]
    aws.client("ssm").put_parameter(Name="/team/token", Value="secret", Type="SecureString")
    return {
        "bucket_arn": f"arn:aws:s3:::{BUCKET}",
        "secret_arns": secret(Name="everstep/server-secret")["ARN"],
        "database_secret_arn": secret(Name="rds!db", SecretString="{}")["ARN"],
        "queue_arn": f"arn:aws:sqs:us-east-1:123456789012:{queue.rpartition('/')[2]}",
        "event_bus_arns": aws.client("events").create_event_bus(Name="jobs")["EventBusArn"],
        "job_role_arns": ROLE,
        "job_secret_arns": secret(Name="team/token", SecretString="secret")["ARN"],
        "queue_url": queue,
    }


@pytest.fixture(scope="module")
def policies(aws: ServedAws, places: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Policy]:
    """Return the policy of each role, as Terraform's AWS provider renders it."""
    terraform = terraform_of("policies", aws.url, aws.keys, tmp_path_factory.mktemp("terraform"), root_file=ROOT)
    parameter = "arn:aws:ssm:us-east-1:123456789012:parameter/team/token"
    secrets = {"job_secret_arns": [places["job_secret_arns"], parameter], "projects": ["team"]}
    lists = {name: [arn] for name, arn in places.items() if name.endswith("_arns")}
    single = {name: arn for name, arn in places.items() if name.endswith("_arn")}
    rendered = terraform.outputs(settings={"name": "everstep", **single, **lists, **secrets})["policies"]
    return {role: json.loads(text) for role, text in rendered.items()}


ROOT = """
variable "settings" {
  type = any
}

terraform {
  required_providers {
    aws = { source = "hashicorp/aws" }
  }
}

provider "aws" {
  region = "us-east-1"
}

module "identity" {
  source              = "../modules/identity"
  name                = var.settings.name
  projects            = var.settings.projects
  bucket_arn          = var.settings.bucket_arn
  secret_arns         = var.settings.secret_arns
  database_secret_arn = var.settings.database_secret_arn
  queue_arn           = var.settings.queue_arn
  event_bus_arns      = var.settings.event_bus_arns
  job_role_arns       = var.settings.job_role_arns
  job_secret_arns     = var.settings.job_secret_arns
}

output "policies" {
  value = module.identity.policies
}
"""


def act_as_server(aws: ServedAws, places: Mapping[str, str]) -> list[Request]:
    """Make each call of a server, and return the requests."""
    group = aws.make_group(desired=1, Tags=TAGS)
    template = aws.group(group)["LaunchTemplate"]["LaunchTemplateId"]
    tags = [{"Key": each["Key"], "Value": each["Value"]} for each in TAGS]
    aws.client("ec2").create_tags(Resources=[template], Tags=tags)
    aws.in_service(group, 1)
    mixed = mixed_group(aws, group)
    with recorded(aws) as requests:
        connection = aws.connection()
        connection.identify()
        change_group(aws, AwsOperator(connection), group)
        AwsOperator(connection).describe_group(mixed)
        use_objects(S3ServiceStore(connection))
        fail_upload(S3ServiceStore(connection), connection)
        ManagedSecrets(connection, "everstep/").kept("server_secret", lambda: "ab" * 32)
        connection.client("secretsmanager").get_secret_value(SecretId="rds!db")
        assert EventBusSink(connection, places["event_bus_arns"]).put(entries("a")) is None
        queue = SqsQueue(connection, places["queue_url"])
        aws.client("sqs").send_message(QueueUrl=places["queue_url"], MessageBody="{}")
        queue.delete([message.receipt for message in queue.receive()])
    return requests


def mixed_group(aws: ServedAws, template: str) -> str:
    """Create a group with two instance types and no members."""
    overrides = [{"InstanceType": each} for each in ("g5.2xlarge", "g5.4xlarge")]
    specification = {"LaunchTemplateName": template, "Version": "$Latest"}
    aws.client("autoscaling").create_auto_scaling_group(
        AutoScalingGroupName="everstep-mixed",
        MixedInstancesPolicy={
            "LaunchTemplate": {"LaunchTemplateSpecification": specification, "Overrides": overrides},
        },
        MinSize=0,
        MaxSize=1,
        AvailabilityZones=["us-east-1a"],
        Tags=TAGS,
    )
    return "everstep-mixed"


def change_group(aws: ServedAws, operator: AwsOperator, name: str) -> None:
    """Make each call of the operator that describes or changes a group and its members."""
    (member,) = (NodeId(id) for id in aws.members(name))
    operator.describe_group(name)
    operator.describe_instances([member])
    operator.statuses([member])
    operator.network_nodes([member])
    operator.image_times(["ami-12c6146b"])
    operator.console_output(member)
    operator.recent_launch_failures(name)
    operator.protect_new_instances(name)
    operator.protect_members(name, [member])
    operator.suspend_processes(name, ["ReplaceUnhealthy", "AZRebalance"])
    operator.resume_processes(name, ["AZRebalance"])
    operator.put_termination_hook(name, TERMINATION_HOOK)
    operator.set_desired(name, 1)
    operator.launch_instances(name, 1, zone="us-east-1a", token="launch")
    operator.set_work_tags([member], {"everstep:job": "gpt", "everstep:project": "team"})
    operator.set_work_tags([member], {})
    operator.reboot_member(name, member)
    operator.hold_termination(name, TERMINATION_HOOK.name, member)
    operator.complete_termination(name, TERMINATION_HOOK.name, member)
    operator.strike_member(name, member)
    operator.terminate_member(member, decrement=False)


def use_objects(store: S3ServiceStore) -> None:
    """Make each call of a server's object store that succeeds."""
    source, job = (
        ObjectReference(bucket=BUCKET, key=f"projects/team/{key}") for key in ("sources/1.tar.gz", "jobs/gpt/manifest")
    )
    info = store.put(source, b"source")
    store.put_if_unchanged(source, b"other", etag=info.etag)
    store.put_file(job, io.BytesIO(b"x" * 17 * MIB))
    assert store.get(source) == b"other"
    assert b"".join(store.stream(source, begin=1)) == b"ther"
    assert len(list(store.list(ObjectReference(bucket=BUCKET, key="projects/")))) == 2
    store.delete(BUCKET, [source.key, job.key])


def fail_upload(store: S3ServiceStore, connection: Connection) -> None:
    """Upload a file of which S3 refuses a part. boto3 then aborts the upload."""
    client = connection.client("s3")

    def fail(**_: object) -> None:
        raise OSError("the connection is lost")

    client.meta.events.register("before-send.s3.UploadPart", fail, unique_id="fail")
    try:
        with pytest.raises((CloudError, OSError)):
            store.put_file(ObjectReference(bucket=BUCKET, key="uploads/2.tar.gz"), io.BytesIO(b"x" * 17 * MIB))
    finally:
        client.meta.events.unregister("before-send.s3.UploadPart", unique_id="fail")


def act_as_agent(aws: ServedAws) -> list[Request]:
    """Make each call of an agent, and return the requests."""
    environment = {**aws_variables(aws.url, aws.keys), "EVERSTEP_LOCAL": "1"}
    with recorded(aws) as requests, patch.dict(os.environ, environment):
        assert described_type("p5.48xlarge", "us-east-1") is not None
        node = NodeAws(environment)
        node.secret("secretsmanager:team/token", None)
        node.secret("ssm:/team/token", None)
        node.assume_role(JobPrincipal(project="team", job="gpt", run="r1", role_arn=ROLE))
        store = NodeObjectStore(s3_store(environment).client, part_bytes=5 * MIB)
        shard, source, evidence = (
            ObjectReference(bucket=BUCKET, key=key)
            for key in (
                "projects/team/jobs/gpt/run=r1/shard",
                "projects/team/sources/3.tar.gz",
                "evidence/i-1/agent.log",
            )
        )
        store.put_stream(shard, [b"x" * 6 * MIB], 6 * MIB)
        assert store.head(shard) is not None
        assert len(list(store.list(ObjectReference(bucket=BUCKET, key="projects/team/jobs/gpt/")))) == 1
        unfinished = ObjectReference(bucket=BUCKET, key="projects/team/jobs/gpt/run=r1/other")
        aws.client("s3").create_multipart_upload(Bucket=BUCKET, Key=unfinished.key)
        prefix = ObjectReference(bucket=BUCKET, key="projects/team/jobs/gpt/")
        assert store.abort_uploads(prefix, lambda key: key == unfinished.key) == 1
        aws.client("s3").put_object(Bucket=BUCKET, Key=source.key, Body=b"source")
        assert store.get_bytes(source) == b"source"
        store.put_bytes(evidence, b"a line")
        store.client.close()
    return requests


@pytest.fixture(scope="module")
def requests(aws: ServedAws, places: Mapping[str, str]) -> Mapping[str, list[Request]]:
    """Return the recorded requests of a server and of an agent, by role."""
    return {"server": act_as_server(aws, places), "node": act_as_agent(aws)}


@pytest.mark.parametrize("role", ["server", "node"])
def test_each_recorded_call_is_allowed_and_each_permission_is_used(
    policies: Mapping[str, Policy], requests: Mapping[str, list[Request]], role: str
) -> None:
    policy, made = policies[role], requests[role]
    assert [request for request in made if not statements_for(policy, request)] == []
    granted = {(each["Sid"], action) for each in policy["Statement"] for action in actions_of(each)}
    used = {(each["Sid"], request.action) for request in made for each in statements_for(policy, request)}
    assert granted - used == set(), "no recorded call needs these permissions"


def test_servers_change_only_groups_and_instances_of_their_installation(
    policies: Mapping[str, Policy], requests: Mapping[str, list[Request]]
) -> None:
    """Each recorded change is refused if the resource lacks a tag, or belongs to another installation."""
    server = policies["server"]
    tagged = [request for request in requests["server"] if "aws:ResourceTag/everstep:fleet" in request.context]
    assert {request.action for request in tagged} > {"ec2:TerminateInstances", "autoscaling:SetDesiredCapacity"}
    others = (
        {},
        {"aws:ResourceTag/everstep:fleet": ["everstep-main"]},
        {"aws:ResourceTag/everstep:installation": ["everstep"]},
        {"aws:ResourceTag/everstep:fleet": ["b"], "aws:ResourceTag/everstep:installation": ["everstep-b"]},
    )
    for request in tagged:
        assert statements_for(server, request)
        for context in others:
            assert statements_for(server, replace(request, context=context)) == [], (request.action, context)


@pytest.mark.long(keep=5)
@pytest.mark.parametrize(
    ("role", "request_"),
    [
        ("server", Request("s3:GetObject", "arn:aws:s3:::another/projects/team/jobs/gpt")),
        ("server", Request("secretsmanager:GetSecretValue", "arn:aws:secretsmanager:us-east-1:123456789012:secret:x")),
        ("server", Request("iam:PassRole", ROLE)),
        ("server", Request("ec2:CreateTags", NODE, {**OURS, "aws:TagKeys": ["everstep:job", "everstep:installation"]})),
        ("server", Request("ec2:DeleteTags", NODE, OURS)),
        ("server", Request("sts:AssumeRole", ROLE)),
        ("node", Request("s3:GetObject", f"arn:aws:s3:::{BUCKET}/projects/other/jobs/gpt/run=r1/shard")),
        ("node", Request("s3:PutObject", f"arn:aws:s3:::{BUCKET}/projects/team/sources/3.tar.gz")),
        ("node", Request("s3:GetObject", f"arn:aws:s3:::{BUCKET}/evidence/i-1/agent.log")),
        ("node", Request("s3:DeleteObject", f"arn:aws:s3:::{BUCKET}/projects/team/jobs/gpt/run=r1/shard")),
        ("node", Request("s3:ListBucket", f"arn:aws:s3:::{BUCKET}", {"s3:prefix": ["projects/"]})),
        ("node", Request("s3:ListBucket", f"arn:aws:s3:::{BUCKET}")),
        ("node", Request("sts:AssumeRole", "arn:aws:iam::123456789012:role/administrator")),
        ("node", Request("sts:TagSession", ROLE, {"aws:TagKeys": ["everstep:job", "department"]})),
        ("node", Request("autoscaling:SetDesiredCapacity", "*")),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value.action}-{value.resource.rpartition('/')[2]}",
)
def test_other_requests_are_refused(policies: Mapping[str, Policy], role: str, request_: Request) -> None:
    assert statements_for(policies[role], request_) == []
