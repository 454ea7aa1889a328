"""Creates and removes the AWS resources of a conformance run: an Auto Scaling group with its template, a rule, a queue.

Invariant: every resource has the tag `TAG` and a name that begins with `PREFIX`. `clean` deletes exactly these, also
those of a crashed run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from botocore.exceptions import ClientError

PREFIX: Final = "everstep-conformance-"
TAG: Final = "everstep:conformance"
HOOK: Final = "conformance-terminating"
HOOK_SECONDS: Final = 300
SUSPENDED: Final = ["AZRebalance", "AlarmNotification", "InstanceRefresh", "ReplaceUnhealthy", "ScheduledActions"]
EVENT_SOURCES: Final = {"source": ["aws.ec2", "aws.autoscaling"]}
MAX_INSTANCES: Final = 3


class Unanswered(Exception):
    """AWS did not reach an awaited state in time, so a question has no answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The settings of a run's instances."""

    zone: str
    instance_type: str
    image: str
    """An id, or `resolve:ssm:` and the name of a public parameter that contains the id."""
    subnet: str = ""
    """Empty: the zone's default subnet."""


@dataclass(slots=True, kw_only=True)
class Account:
    """An AWS account with boto3 clients, and the resources of one run in it.

    `single_attempt` returns clients that do not retry. `run` is random text in all names. `refill_seconds` is the time
    in which AWS refills its token bucket of API calls, which an experiment empties. `watch_seconds` is how long an
    experiment observes whether AWS changes a state by itself.
    """

    client: Callable[[str], Any]
    single_attempt: Callable[[str], Any]
    run: str
    monotonic: Callable[[], float]
    pause: Callable[[float], None]
    patience_seconds: float = 600.0
    watch_seconds: float = 600.0
    poll_seconds: float = 0.5
    refill_seconds: float = 10.0
    queue_url: str = ""
    events: list[dict[str, Any]] = field(default_factory=list)
    """Oldest first, each with the time of its delivery under `ReadAt`."""

    @property
    def name(self) -> str:
        """The name of the run's group, launch template, rule and queue."""
        return PREFIX + self.run

    def create(self, place: Place) -> None:
        """Create an empty group with the settings that Everstep requires, and a queue for AWS's events."""
        tags = [{"Key": TAG, "Value": self.run}]
        sqs, events = self.client("sqs"), self.client("events")
        self.queue_url = sqs.create_queue(QueueName=self.name, tags={TAG: self.run})["QueueUrl"]
        arn = sqs.get_queue_attributes(QueueUrl=self.queue_url, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
        policy = {
            "Version": "2012-10-17",
            "Statement": [
                {
                    "Effect": "Allow",
                    "Principal": {"Service": "events.amazonaws.com"},
                    "Action": "sqs:SendMessage",
                    "Resource": arn,
                }
            ],
        }
        sqs.set_queue_attributes(QueueUrl=self.queue_url, Attributes={"Policy": json.dumps(policy)})
        events.put_rule(Name=self.name, EventPattern=json.dumps(EVENT_SOURCES), Tags=tags)
        events.put_targets(Rule=self.name, Targets=[{"Id": "queue", "Arn": arn}])
        self.client("ec2").create_launch_template(
            LaunchTemplateName=self.name,
            LaunchTemplateData={"ImageId": place.image, "InstanceType": place.instance_type},
            TagSpecifications=[{"ResourceType": "launch-template", "Tags": tags}],
        )
        self.client("autoscaling").create_auto_scaling_group(
            AutoScalingGroupName=self.name,
            LaunchTemplate={"LaunchTemplateName": self.name, "Version": "$Latest"},
            MinSize=0,
            MaxSize=MAX_INSTANCES,
            DesiredCapacity=0,
            NewInstancesProtectedFromScaleIn=True,
            Tags=[{**tag, "PropagateAtLaunch": True} for tag in tags],
            **({"VPCZoneIdentifier": place.subnet} if place.subnet else {"AvailabilityZones": [place.zone]}),
        )
        self.client("autoscaling").suspend_processes(AutoScalingGroupName=self.name, ScalingProcesses=SUSPENDED)
        self.client("autoscaling").put_lifecycle_hook(
            AutoScalingGroupName=self.name,
            LifecycleHookName=HOOK,
            LifecycleTransition="autoscaling:EC2_INSTANCE_TERMINATING",
            HeartbeatTimeout=HOOK_SECONDS,
            DefaultResult="CONTINUE",
        )

    def set_desired(self, count: int) -> None:
        """Set the group's desired capacity."""
        self.client("autoscaling").set_desired_capacity(AutoScalingGroupName=self.name, DesiredCapacity=count)

    def protect(self, ids: Sequence[str], *, is_protected: bool) -> None:
        """Set or remove the protection of members from scale-in."""
        self.client("autoscaling").set_instance_protection(
            AutoScalingGroupName=self.name, InstanceIds=ids, ProtectedFromScaleIn=is_protected
        )

    def release(self, instance_id: str) -> None:
        """Release a terminating member that the group's hook holds."""
        self.client("autoscaling").complete_lifecycle_action(
            AutoScalingGroupName=self.name,
            LifecycleHookName=HOOK,
            InstanceId=instance_id,
            LifecycleActionResult="CONTINUE",
        )

    def members(self) -> dict[str, dict[str, Any]]:
        """Return the group's members by instance id, as Auto Scaling describes them."""
        groups = self.client("autoscaling").describe_auto_scaling_groups(AutoScalingGroupNames=[self.name])
        return {member["InstanceId"]: member for group in groups["AutoScalingGroups"] for member in group["Instances"]}

    def in_service(self, count: int) -> list[str]:
        """Wait until at least `count` members are InService, and return the ids of all such members."""

        def found() -> list[str]:
            ids = [id for id, member in self.members().items() if member["LifecycleState"] == "InService"]
            return ids if len(ids) >= count else []

        ids: list[str] = self.until(f"{count} members in service", found)
        return ids

    def state(self, instance_id: str) -> str:
        """Return an instance's state in DescribeInstances; empty if the answer does not contain it."""
        try:
            answer = self.client("ec2").describe_instances(InstanceIds=[instance_id])
        except ClientError as error:
            if code_of(error) == "InvalidInstanceID.NotFound":
                return ""
            raise
        return next((each["State"]["Name"] for each in _instances(answer)), "")

    def read_events(self) -> list[dict[str, Any]]:
        """Receive new events from the run's queue, and return all events so far."""
        sqs = self.client("sqs")
        for message in sqs.receive_message(QueueUrl=self.queue_url, MaxNumberOfMessages=10).get("Messages", ()):
            self.events.append({**json.loads(message["Body"]), "ReadAt": self.monotonic()})
            sqs.delete_message(QueueUrl=self.queue_url, ReceiptHandle=message["ReceiptHandle"])
        return self.events

    def until(self, what: str, look: Callable[[], Any]) -> Any:
        """Call `look` until it returns a true value, and return this value.

        Raises Unanswered with the words `what` after `patience_seconds`.
        """
        ends = self.monotonic() + self.patience_seconds
        while not (found := look()):
            if self.monotonic() >= ends:
                raise Unanswered(f"AWS did not show {what} within {self.patience_seconds:g} s")
            self.pause(self.poll_seconds)
        return found


def clean(client: Callable[[str], Any], pause: Callable[[float], None], *, patience: int = 600) -> list[str]:
    """Delete the resources of all conformance runs in the account. Return one sentence per deleted resource.

    `patience` is the maximum number of polls until a deleted group has disappeared.
    """
    scaling, ec2, sqs, events = (client(service) for service in ("autoscaling", "ec2", "sqs", "events"))
    sentences: list[str] = []
    for name in _groups(scaling):
        scaling.delete_auto_scaling_group(AutoScalingGroupName=name, ForceDelete=True)
        sentences.append(f"deleted the Auto Scaling group {name} and its instances")
    for _ in range(patience):
        if not list(_groups(scaling)):
            break
        pause(1.0)
    else:
        sentences.append("a deleted group still exists; run --clean again")
    tagged = [{"Name": "tag-key", "Values": [TAG]}]
    for template in ec2.describe_launch_templates(Filters=tagged)["LaunchTemplates"]:
        ec2.delete_launch_template(LaunchTemplateId=template["LaunchTemplateId"])
        sentences.append(f"deleted the launch template {template['LaunchTemplateName']}")
    for rule in events.list_rules(NamePrefix=PREFIX)["Rules"]:
        events.remove_targets(Rule=rule["Name"], Ids=["queue"])
        events.delete_rule(Name=rule["Name"])
        sentences.append(f"deleted the event rule {rule['Name']}")
    for url in sqs.list_queues(QueueNamePrefix=PREFIX).get("QueueUrls", ()):
        sqs.delete_queue(QueueUrl=url)
        sentences.append(f"deleted the queue {url}")
    return sentences


def code_of(error: ClientError) -> str:
    """Return the error code with which AWS refused a call."""
    return str(error.response.get("Error", {}).get("Code", ""))


def words_of(error: ClientError) -> str:
    """Return the error message with which AWS refused a call."""
    return str(error.response.get("Error", {}).get("Message", ""))


def _groups(scaling: Any) -> Iterator[str]:
    pages = scaling.get_paginator("describe_auto_scaling_groups")
    for page in pages.paginate(Filters=[{"Name": "tag-key", "Values": [TAG]}]):
        yield from (group["AutoScalingGroupName"] for group in page["AutoScalingGroups"])


def _instances(answer: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for reservation in answer["Reservations"]:
        yield from reservation["Instances"]
