"""Faults of the local AWS, as customers of AWS observe them.

The tests observe boto3 responses, the event queue, instance metadata and the processes of instances.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from botocore.exceptions import ClientError

from control_plane.cloud.aws import AwsOperator
from control_plane.cloud.connection import Connection
from control_plane.cloud.notices import SqsQueue
from control_plane.db import nodes, notices
from control_plane.loop.notice_reader import NoticeReader
from everstep.protocol.agent_messages import NoticeKind
from everstep.protocol.ids import NodeId
from infra.local_cloud.errors import FaultRefused
from infra.local_cloud.fault_kinds import (
    LASTING,
    BadEvents,
    BlockEnd,
    Capacity,
    Crash,
    FailStatus,
    Maintenance,
    Partition,
    Rebalance,
    SlotsTaken,
    SpotWarning,
    SuspendLaunch,
    Terminate,
    Throttle,
    Xid,
    kinds,
)
from infra.local_cloud.faults import Conditions
from infra.local_cloud.processes import identify
from tests.sim.world import FLEET, World
from tests.unit.local_cloud.served import QUICK, ServedAws, eventually, served_aws

Event = dict[str, Any]


def operator_of(aws: ServedAws) -> AwsOperator:
    """Return the control plane's client of this AWS."""
    return AwsOperator(connection_of(aws))


def connection_of(aws: ServedAws) -> Connection:
    return aws.connection()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedAws]:
    with served_aws(tmp_path_factory.mktemp("aws")) as aws:
        yield aws


@pytest.fixture
def aws(served: ServedAws) -> Iterator[ServedAws]:
    yield served
    served.clear()
    served.set_conditions(QUICK)
    for group in served.client("autoscaling").describe_auto_scaling_groups()["AutoScalingGroups"]:
        served.client("autoscaling").delete_auto_scaling_group(
            AutoScalingGroupName=group["AutoScalingGroupName"], ForceDelete=True
        )
    # wait until all processes have ended, because the next test may require that no instance runs
    eventually(lambda: not served.pids())


class Queue:
    """An SQS queue that receives the events of EC2, Auto Scaling and Health, and collects them."""

    def __init__(self, aws: ServedAws, name: str) -> None:
        self._sqs = aws.client("sqs")
        self.url = self._sqs.create_queue(QueueName=name)["QueueUrl"]
        arn = self._sqs.get_queue_attributes(QueueUrl=self.url, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
        pattern = {"source": ["aws.ec2", "aws.autoscaling", "aws.health"]}
        aws.client("events").put_rule(Name=name, EventPattern=json.dumps(pattern))
        aws.client("events").put_targets(Rule=name, Targets=[{"Id": "queue", "Arn": arn}])
        self.events: list[Event] = []

    def read(self) -> list[Event]:
        messages = self._sqs.receive_message(QueueUrl=self.url, MaxNumberOfMessages=10).get("Messages", [])
        for message in messages:
            self.events.append(json.loads(message["Body"]))
            self._sqs.delete_message(QueueUrl=self.url, ReceiptHandle=message["ReceiptHandle"])
        return self.events

    def first(self, detail_type: str, wanted: Callable[[Event], bool] = lambda _: True) -> Event:
        """Wait for the first event of a type that `wanted` accepts."""
        found: Event = eventually(
            lambda: next((one for one in self.read() if one["detail-type"] == detail_type and wanted(one)), None)
        )
        return found

    def of(self, instance_id: str) -> list[Event]:
        return [
            one
            for one in self.read()
            if instance_id in (one["detail"].get("instance-id"), one["detail"].get("EC2InstanceId"))
        ]


@pytest.fixture
def queue(aws: ServedAws, request: pytest.FixtureRequest) -> Iterator[Queue]:
    name = "".join(letter if letter.isalnum() else "-" for letter in request.node.name)[:60]
    yield Queue(aws, name)
    aws.client("events").remove_targets(Rule=name, Ids=["queue"])
    aws.client("events").delete_rule(Name=name)


def running(aws: ServedAws, count: int = 1, **more: Any) -> tuple[str, list[str]]:
    """Create a group and wait for its instances. As in Everstep, AWS does not replace unhealthy instances of the group.

    Return the group's name and the ids of its instances.
    """
    user_data = (
        "#!/bin/sh\necho metadata $AWS_EC2_METADATA_SERVICE_ENDPOINT stub $EVERSTEP_NVML_STUB\nexec sleep 1000\n"
    )
    group = aws.make_group(user_data=user_data, **more)
    aws.client("autoscaling").suspend_processes(AutoScalingGroupName=group, ScalingProcesses=["ReplaceUnhealthy"])
    aws.client("autoscaling").set_desired_capacity(AutoScalingGroupName=group, DesiredCapacity=count)
    ids = aws.in_service(group, count)
    eventually(lambda: set(ids) <= set(aws.pids()))
    return group, ids


def told(aws: ServedAws, instance_id: str, word: str) -> str:
    """Return the value that an instance printed after `word` on its console.

    The user data of `running` prints parts of the instance's environment.
    """
    console = aws.nodes_directory / instance_id / "console.log"
    words: list[str] = eventually(
        lambda: console.exists() and f"{word} " in console.read_text() and console.read_text().split()
    )
    return words[words.index(word) + 1]


def metadata(aws: ServedAws, instance_id: str, path: str) -> httpx.Response:
    url = told(aws, instance_id, "metadata")
    token = httpx.put(
        f"{url}/latest/api/token", headers={"X-aws-ec2-metadata-token-ttl-seconds": "60"}, trust_env=False, timeout=30
    ).text
    return httpx.get(
        f"{url}/latest/meta-data/{path}", headers={"X-aws-ec2-metadata-token": token}, trust_env=False, timeout=30
    )


def status(aws: ServedAws, instance_id: str) -> dict[str, Any]:
    (found,) = aws.client("ec2").describe_instance_status(InstanceIds=[instance_id], IncludeAllInstances=True)[
        "InstanceStatuses"
    ]
    answer: dict[str, Any] = found
    return answer


def test_what_lasts_can_be_cleared_and_nothing_else(aws: ServedAws) -> None:
    # The response shows that no lasting fault is active at the start.
    assert [name for name in sorted(LASTING) if aws.clear(name)] == []
    for name in kinds().keys() - LASTING:
        with pytest.raises(httpx.HTTPStatusError, match="409"):
            aws.clear(name)


# Warnings of AWS


def test_a_spot_warning_comes_by_event_and_metadata_and_the_end_follows(aws: ServedAws, queue: Queue) -> None:
    _, (id,) = running(aws)
    assert metadata(aws, id, "spot/instance-action").status_code == 404
    effect = aws.inject(SpotWarning(target=id, after=600))
    assert effect.target == id
    event = queue.first("EC2 Spot Instance Interruption Warning")
    assert set(event) == {"version", "id", "detail-type", "source", "account", "time", "region", "resources", "detail"}
    assert event["source"] == "aws.ec2"
    assert event["resources"] == [f"arn:aws:ec2:us-east-1:{event['account']}:instance/{id}"]
    assert event["detail"] == {"instance-id": id, "instance-action": "terminate"}
    assert metadata(aws, id, "spot/instance-action").json() == {"action": "terminate", "time": effect.facts["time"]}
    assert metadata(aws, id, "spot/termination-time").text == effect.facts["time"]
    aws.inject(SpotWarning(target=id, after=0))
    eventually(lambda: aws.instance(id)["State"]["Name"] == "terminated")
    assert aws.instance(id)["StateReason"]["Code"] == "Server.SpotInstanceTermination"
    eventually(lambda: id not in aws.pids())


def test_a_cleared_warning_is_not_carried_out(aws: ServedAws) -> None:
    _, (id,) = running(aws)
    aws.inject(SpotWarning(target=id, after=3600))
    aws.inject(Maintenance(target=id, after=3600))
    assert aws.clear("spot-warning") == [f"{id} has nothing to fear"]
    assert metadata(aws, id, "spot/instance-action").status_code == 404
    assert status(aws, id).get("Events", []) == []


def test_a_rebalance_recommendation_names_its_time(aws: ServedAws, queue: Queue) -> None:
    _, (id,) = running(aws)
    effect = aws.inject(Rebalance(target=id))
    assert queue.first("EC2 Instance Rebalance Recommendation")["detail"] == {"instance-id": id}
    assert metadata(aws, id, "events/recommendations/rebalance").json() == {"noticeTime": effect.facts["notice_time"]}


def test_maintenance_is_in_the_status_in_aws_health_and_in_the_metadata(aws: ServedAws, queue: Queue) -> None:
    _, (id,) = running(aws)
    assert metadata(aws, id, "events/maintenance/scheduled").status_code == 404
    effect = aws.inject(Maintenance(target=id, code="system-reboot", after=900))
    (scheduled,) = status(aws, id)["Events"]
    assert scheduled["InstanceEventId"] == effect.facts["event_id"]
    assert scheduled["Code"] == "system-reboot"
    assert timedelta(seconds=800) < scheduled["NotBefore"] - datetime.now(UTC) <= timedelta(seconds=900)
    assert scheduled["NotAfter"] > scheduled["NotBefore"]
    event = queue.first("AWS Health Event")
    assert event["source"] == "aws.health"
    assert event["detail"]["eventTypeCategory"] == "scheduledChange"
    assert event["detail"]["service"] == "EC2"
    assert [entity["entityValue"] for entity in event["detail"]["affectedEntities"]] == [id]
    (said,) = metadata(aws, id, "events/maintenance/scheduled").json()
    assert (said["Code"], said["EventId"], said["State"]) == ("system-reboot", effect.facts["event_id"], "active")
    assert datetime.strptime(said["NotBefore"], "%d %b %Y %H:%M:%S GMT").replace(tzinfo=UTC) == scheduled[
        "NotBefore"
    ].replace(microsecond=0)


def test_a_retirement_stops_the_instance_at_its_time(aws: ServedAws) -> None:
    _, (id,) = running(aws)
    aws.inject(Maintenance(target=id, after=0))
    eventually(lambda: aws.instance(id)["State"]["Name"] == "stopped")
    eventually(lambda: id not in aws.pids())


def test_the_end_of_a_block_names_the_reservation_that_the_instance_has(aws: ServedAws, queue: Queue) -> None:
    _, (id,) = running(aws)
    effect = aws.inject(BlockEnd(target=id, after=600))
    reservation = effect.facts["capacity_reservation_id"]
    event = queue.first("Capacity Block Reservation Expiration Warning")
    assert event["detail"] == {"capacity-reservation-id": reservation, "end-date": effect.facts["end_date"]}
    assert event["resources"] == [f"arn:aws:ec2:us-east-1:{event['account']}:capacity-reservation/{reservation}"]
    assert aws.instance(id)["CapacityReservationId"] == reservation
    begins_at, ends_at = (datetime.fromisoformat(str(effect.facts[name])) for name in ("time", "end_date"))
    assert ends_at - begins_at == timedelta(minutes=30), "AWS ends the instances of a block half an hour before it"


async def test_the_end_of_a_block_is_a_notice_with_the_moment_at_which_its_instance_ends(
    aws: ServedAws, queue: Queue, tmp_path: Path
) -> None:
    _, (id,) = running(aws)
    world = World(tmp_path)
    facts = nodes.AgentFacts(
        node_id=id, fleet_name=FLEET, address="127.0.1.1", peer_port=1, memory_bytes=1, agent_id="agent", version="1"
    )
    with world.database.write() as session:
        nodes.note_hello(session, facts, initial_state="spare", now=datetime.now(UTC))
    sqs = SqsQueue(connection_of(aws), queue.url)
    context = replace(world.context, operator=operator_of(aws), now=lambda: datetime.now(UTC))
    reader = NoticeReader(sqs, context, world.runner.cloud)
    effect = aws.inject(BlockEnd(target=id))
    stored: tuple[notices.NoticeRecord, ...] = ()
    while not stored:
        await reader.read()
        with world.database.read() as session:
            stored = notices.of_fleet(session, FLEET)
    world.close()
    (notice,) = stored
    assert (notice.node_id, notice.kind, notice.ends_at) == (
        id,
        NoticeKind.CAPACITY_BLOCK_END,
        datetime.fromisoformat(str(effect.facts["time"])),
    )


# Events of EC2 and Auto Scaling


def test_the_life_of_an_instance_is_told(aws: ServedAws, queue: Queue) -> None:
    _, (id,) = running(aws)
    aws.inject(Terminate(target=id))
    queue.first(
        "EC2 Instance State-change Notification",
        lambda one: one["detail"] == {"instance-id": id, "state": "terminated"},
    )
    states = [
        one["detail"]["state"] for one in queue.of(id) if one["detail-type"] == "EC2 Instance State-change Notification"
    ]
    assert states == ["pending", "running", "shutting-down", "terminated"]
    launch = queue.first("EC2 Instance Launch Successful", lambda one: one["detail"]["EC2InstanceId"] == id)
    assert launch["source"] == "aws.autoscaling"
    assert len(launch["resources"]) == 2


def test_a_hook_on_terminate_holds_the_instance_and_is_told(aws: ServedAws, queue: Queue) -> None:
    group, (id,) = running(aws)
    scaling = aws.client("autoscaling")
    scaling.put_lifecycle_hook(
        AutoScalingGroupName=group,
        LifecycleHookName="notice",
        LifecycleTransition="autoscaling:EC2_INSTANCE_TERMINATING",
        HeartbeatTimeout=600,
        DefaultResult="CONTINUE",
    )
    assert metadata(aws, id, "autoscaling/target-lifecycle-state").text == "InService"
    scaling.terminate_instance_in_auto_scaling_group(InstanceId=id, ShouldDecrementDesiredCapacity=True)
    detail = queue.first("EC2 Instance-terminate Lifecycle Action")["detail"]
    assert {name: detail[name] for name in detail if name != "LifecycleActionToken"} == {
        "AutoScalingGroupName": group,
        "LifecycleHookName": "notice",
        "EC2InstanceId": id,
        "LifecycleTransition": "autoscaling:EC2_INSTANCE_TERMINATING",
        "Origin": "AutoScalingGroup",
        "Destination": "EC2",
    }
    assert metadata(aws, id, "autoscaling/target-lifecycle-state").text == "Terminated"
    assert aws.members(group, "Terminating:Wait") == [id]
    given = {
        "AutoScalingGroupName": group,
        "LifecycleHookName": "notice",
        "LifecycleActionToken": detail["LifecycleActionToken"],
    }
    scaling.record_lifecycle_action_heartbeat(**given)
    scaling.complete_lifecycle_action(**given, LifecycleActionResult="CONTINUE")
    done = queue.first("EC2 Instance Terminate Successful", lambda one: one["detail"]["EC2InstanceId"] == id)
    assert done["detail"]["AutoScalingGroupName"] == group
    assert aws.members(group) == []


def test_bad_events_come_twice_with_one_id_or_never(aws: ServedAws, queue: Queue) -> None:
    _, ids = running(aws, 2)
    queue.first("EC2 Instance Launch Successful", lambda one: one["detail"]["EC2InstanceId"] == ids[1])
    aws.inject(BadEvents(drop=1))
    aws.inject(Rebalance(target=ids[0]))
    aws.inject(BadEvents(double=1))
    aws.inject(Rebalance(target=ids[1]))

    def recommendations() -> list[Event]:
        return [one for one in queue.read() if one["detail-type"] == "EC2 Instance Rebalance Recommendation"]

    first, second = eventually(lambda: len(recommendations()) >= 2 and recommendations())
    assert first == second
    assert first["detail"] == {"instance-id": ids[1]}


def test_who_waits_at_a_queue_keeps_nobody_waiting(aws: ServedAws) -> None:
    empty = aws.client("sqs").create_queue(QueueName="empty")["QueueUrl"]
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(aws.client("sqs").receive_message, QueueUrl=empty, WaitTimeSeconds=20)
        # The start of this group sends many requests. The waiting request must not delay them.
        running(aws)
        assert not waiting.done()
        aws.client("sqs").send_message(QueueUrl=empty, MessageBody="over")
        assert [message["Body"] for message in waiting.result(timeout=20)["Messages"]] == ["over"]


# Lack of capacity


def test_a_lack_of_capacity_is_said_to_who_runs_instances(aws: ServedAws) -> None:
    aws.inject(Capacity(count=1, instance_type="p5.48xlarge"))
    run = aws.client("ec2").run_instances
    wanted = {"ImageId": "ami-12c6146b", "InstanceType": "p5.48xlarge", "MinCount": 1, "MaxCount": 1}
    (first,) = run(**wanted)["Instances"]
    with pytest.raises(ClientError) as refused:
        run(**wanted)
    assert refused.value.response["Error"]["Code"] == "InsufficientInstanceCapacity"
    assert "do not have sufficient p5.48xlarge capacity" in refused.value.response["Error"]["Message"]
    aws.client("ec2").terminate_instances(InstanceIds=[first["InstanceId"]])
    (second,) = eventually(lambda: run(**wanted)["Instances"])
    aws.client("ec2").terminate_instances(InstanceIds=[second["InstanceId"]])


def test_a_reserved_slot_stays_taken_after_its_instance_has_ended(aws: ServedAws) -> None:
    group, (id,) = running(aws, instance_type="p5en.48xlarge")
    aws.inject(Capacity(count=1))
    aws.inject(SlotsTaken(delay=3600))
    aws.client("autoscaling").terminate_instance_in_auto_scaling_group(
        InstanceId=id, ShouldDecrementDesiredCapacity=False
    )
    activities = aws.client("autoscaling").describe_scaling_activities
    eventually(
        lambda: any(one["StatusCode"] == "Failed" for one in activities(AutoScalingGroupName=group)["Activities"])
    )
    assert aws.members(group) == []
    aws.clear("capacity")
    assert aws.in_service(group, 1) != [id]


def test_launches_that_fail_for_long_are_suspended_by_aws_and_may_be_resumed(aws: ServedAws, queue: Queue) -> None:
    group = aws.make_group(instance_type="p5e.48xlarge")
    none_there = Conditions(
        boot_delay_seconds=0.05,
        launch_retry_seconds=0.05,
        capacity={"p5e.48xlarge": 0},
        administrative_suspension_seconds=0.2,
    )
    aws.set_conditions(none_there)
    aws.client("autoscaling").set_desired_capacity(AutoScalingGroupName=group, DesiredCapacity=1)
    (suspended,) = eventually(lambda: aws.group(group)["SuspendedProcesses"])
    assert suspended["ProcessName"] == "Launch"
    assert "Amazon EC2 Auto Scaling suspended this process" in suspended["SuspensionReason"]
    failed = queue.first("EC2 Instance Launch Unsuccessful", lambda one: one["detail"]["AutoScalingGroupName"] == group)
    assert failed["detail"]["StatusCode"] == "Failed"
    assert "do not have sufficient p5e.48xlarge capacity" in failed["detail"]["StatusMessage"]
    aws.set_conditions(QUICK)
    aws.client("autoscaling").resume_processes(AutoScalingGroupName=group, ScalingProcesses=["Launch"])
    aws.in_service(group, 1)


@pytest.mark.parametrize(
    ("administrative", "words"), [(False, "User suspended at "), (True, "Amazon EC2 Auto Scaling suspended")]
)
def test_a_suspended_launch_says_by_whom_and_is_cleared(aws: ServedAws, administrative: bool, words: str) -> None:
    group, _ = running(aws)
    aws.inject(SuspendLaunch(group=group, administrative=administrative))
    reasons = {one["ProcessName"]: one["SuspensionReason"] for one in aws.group(group)["SuspendedProcesses"]}
    assert reasons["Launch"].startswith(words)
    seen = operator_of(aws).describe_group(group)
    assert (seen.is_suspended_by_aws("Launch"), seen.is_suspended_by_aws("ReplaceUnhealthy")) == (administrative, False)
    aws.clear()
    assert [one["ProcessName"] for one in aws.group(group)["SuspendedProcesses"]] == ["ReplaceUnhealthy"]


# Status checks, network topology and throttling


def test_a_failing_status_check_makes_a_healthy_instance_an_unhealthy_member(aws: ServedAws) -> None:
    group, (id,) = running(aws)
    pid = aws.pids()[id]
    aws.inject(FailStatus(target=id, check="instance"))
    seen = status(aws, id)
    assert (seen["InstanceStatus"]["Status"], seen["SystemStatus"]["Status"]) == ("impaired", "ok")
    assert seen["InstanceStatus"]["Details"][0]["Status"] == "failed"
    eventually(lambda: aws.group(group)["Instances"][0]["HealthStatus"] == "Unhealthy")
    assert aws.pids()[id] == pid, "nothing is wrong with it"
    aws.clear("fail-status")
    assert status(aws, id)["InstanceStatus"]["Status"] == "ok"


def test_a_crash_leaves_an_instance_that_ec2_calls_running(aws: ServedAws) -> None:
    _, (id,) = running(aws)
    init = identify(aws.pids()[id])
    assert init is not None
    assert aws.inject(Crash(target=id)).facts["init_pid"] == init.pid
    eventually(lambda: not init.is_alive and id not in aws.pids())
    assert aws.instance(id)["State"]["Name"] == "running"
    assert status(aws, id)["SystemStatus"]["Status"] == "impaired"
    assert operator_of(aws).statuses([NodeId(id)])[NodeId(id)].failed_checks == ("system", "instance"), (
        "evidence, beside an agent's silence"
    )
    aws.clear()
    assert status(aws, id)["SystemStatus"]["Status"] == "impaired", "it is dead still"
    aws.client("ec2").reboot_instances(InstanceIds=[id])
    eventually(lambda: id in aws.pids() and status(aws, id)["SystemStatus"]["Status"] == "ok")


def test_the_topology_of_an_instance_has_three_layers_and_stays(aws: ServedAws) -> None:
    _, ids = running(aws, 2)

    def nodes() -> dict[str, list[str]]:
        answer = aws.client("ec2").describe_instance_topology(InstanceIds=ids)["Instances"]
        return {instance["InstanceId"]: instance["NetworkNodes"] for instance in answer}

    first = nodes()
    assert set(first) == set(ids)
    assert all(len(layers) == 3 and all(layer.startswith("nn-") for layer in layers) for layers in first.values())
    assert first[ids[0]][0] == first[ids[1]][0], "one place, one outermost node"
    assert nodes() == first


@pytest.mark.long(keep=2)
@pytest.mark.parametrize(
    ("service", "code", "call"),
    [
        ("ec2", "RequestLimitExceeded", lambda client: client.describe_instances()),
        ("autoscaling", "Throttling", lambda client: client.describe_auto_scaling_groups()),
        ("sqs", "RequestThrottled", lambda client: client.list_queues()),
        ("events", "ThrottlingException", lambda client: client.list_rules()),
        ("s3", "SlowDown", lambda client: client.list_buckets()),
    ],
)
def test_a_throttled_service_says_so_in_its_own_words(
    aws: ServedAws, service: Any, code: str, call: Callable[[Any], Any]
) -> None:
    aws.inject(Throttle(share=1, service=service))
    with pytest.raises(ClientError) as refused:
        call(aws.client(service))
    assert refused.value.response["Error"]["Code"] == code
    assert refused.value.response["ResponseMetadata"]["RetryAttempts"] == 2, "botocore takes it for throttling"
    aws.clear("throttle")
    call(aws.client(service))


# Faults that are refused, and AWS without faults


def test_a_fault_that_cannot_happen_is_refused(aws: ServedAws) -> None:
    with pytest.raises(FaultRefused, match="no instance is running"):
        aws.inject(Terminate())
    _, (id,) = running(aws)
    with pytest.raises(FaultRefused, match="i-0 is not a running instance"):
        aws.inject(Terminate(target="i-0"))
    with pytest.raises(FaultRefused, match="--network namespaces"):
        aws.inject(Partition(target=id))
    answer = aws.ask("POST", "/_everstep/faults", b'{"fault":"terminate","force":true}')
    assert answer.status_code == 400
    assert id in aws.pids(), "nothing was done"


def test_numbers_count_instances_in_the_order_of_their_launch(aws: ServedAws) -> None:
    group, (first,) = running(aws)
    aws.client("autoscaling").set_desired_capacity(AutoScalingGroupName=group, DesiredCapacity=2)
    (second,) = set(aws.in_service(group, 2)) - {first}
    eventually(lambda: second in aws.pids())
    assert [aws.inject(Rebalance(target=str(number))).target for number in (0, 1, 2)] == [first, second, first]


def test_the_stub_of_nvml_has_no_fault_until_it_gets_one(aws: ServedAws) -> None:
    _, (id,) = running(aws)
    path = aws.nodes_directory / id / "nvml.json"
    assert told(aws, id, "stub") == str(path)
    assert json.loads(path.read_text()) == {"gpus": []}
    aws.inject(Xid(target=id, code=79, lost=True))
    assert json.loads(path.read_text()) == {
        "gpus": [{"index": 0, "xids": [79], "ecc_uncorrectable": 0, "throttled": False, "lost": True}]
    }
    aws.clear("xid")
    assert json.loads(path.read_text()) == {"gpus": []}


def test_what_faults_did_can_be_read_again(aws: ServedAws) -> None:
    _, (id,) = running(aws)
    effect = aws.inject(Rebalance(target=id))
    history = aws.ask("GET", "/_everstep/faults").json()
    assert history[-1] == {"fault": "rebalance", "target": id, "did": effect.did, "facts": effect.facts}
