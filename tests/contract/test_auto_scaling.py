"""The local cloud's Auto Scaling behaves as AWS documents.

The tests cover behavior on which Everstep relies and which the library moto lacks.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from infra.local_cloud.aws import LocalAws
from infra.local_cloud.faults import Conditions
from infra.local_cloud.processes import Process, identify
from tests.unit.local_cloud.served import QUICK, ServedAws, encoded, eventually, served_aws


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedAws]:
    with served_aws(tmp_path_factory.mktemp("aws")) as aws:
        yield aws


@pytest.fixture
def aws(served: ServedAws) -> Iterator[ServedAws]:
    yield served
    served.set_conditions(QUICK)
    for group in served.client("autoscaling").describe_auto_scaling_groups()["AutoScalingGroups"]:
        served.client("autoscaling").delete_auto_scaling_group(
            AutoScalingGroupName=group["AutoScalingGroupName"], ForceDelete=True
        )


def hook(
    aws: ServedAws, group: str, *, transition: str = "TERMINATING", timeout: int = 30, result: str = "CONTINUE"
) -> None:
    aws.client("autoscaling").put_lifecycle_hook(
        AutoScalingGroupName=group,
        LifecycleHookName="notice",
        LifecycleTransition=f"autoscaling:EC2_INSTANCE_{transition}",
        HeartbeatTimeout=timeout,
        DefaultResult=result,
    )


def code_and_message(error: pytest.ExceptionInfo[ClientError]) -> tuple[str, str]:
    return error.value.response["Error"]["Code"], error.value.response["Error"]["Message"]


# Launches of instances


def test_a_launch_is_pending_until_the_boot_is_over(aws: ServedAws) -> None:
    aws.set_conditions(Conditions(boot_delay_seconds=600))
    group = aws.make_group(desired=2)
    eventually(lambda: len(aws.members(group, "Pending")) == 2)
    assert {aws.instance(id)["State"]["Name"] for id in aws.members(group)} == {"pending"}
    aws.set_conditions(QUICK)
    aws.client("autoscaling").set_desired_capacity(AutoScalingGroupName=group, DesiredCapacity=3)
    eventually(lambda: len(aws.members(group, "InService")) == 1)
    assert len(aws.members(group, "Pending")) == 2, "a boot that has begun keeps its delay"


def test_every_instance_has_a_loopback_address_of_its_own_and_runs_its_user_data(aws: ServedAws) -> None:
    group = aws.make_group(
        desired=3,
        user_data="#!/bin/sh\necho address $EVERSTEP_ADDRESS id $EVERSTEP_INSTANCE_ID in $PWD\nexec sleep 1000\n",
    )
    ids = aws.in_service(group, 3)
    addresses = {aws.instance(id)["PrivateIpAddress"] for id in ids}
    assert len(addresses) == 3
    assert all(address.startswith("127.") for address in addresses)
    for id in ids:
        expected = f"address {aws.instance(id)['PrivateIpAddress']} id {id} in {aws.nodes_directory / id}"
        eventually(lambda id=id, expected=expected: expected in aws.console(id))


def test_user_data_sees_nothing_of_the_users_aws_settings(aws: ServedAws) -> None:
    group = aws.make_group(desired=1, user_data="#!/bin/sh\nenv\necho done\nexec sleep 1000\n")
    (id,) = aws.in_service(group, 1)
    eventually(lambda: "done" in aws.console(id))
    variables = dict(line.split("=", 1) for line in aws.console(id).splitlines() if "=" in line)
    assert variables.pop("AWS_EC2_METADATA_SERVICE_ENDPOINT").startswith("http://127.")
    aws_variables = {name: value for name, value in variables.items() if name.startswith("AWS_")}
    assert aws_variables == {
        "AWS_ENDPOINT_URL": aws.url,
        "AWS_ACCESS_KEY_ID": aws.keys.access_key_id,
        "AWS_SECRET_ACCESS_KEY": aws.keys.secret_access_key,
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    assert not any("proxy" in name.lower() for name in variables)


def test_new_instances_are_protected_when_the_group_says_so(aws: ServedAws) -> None:
    group = aws.make_group(desired=1, NewInstancesProtectedFromScaleIn=True)
    aws.in_service(group, 1)
    assert aws.group(group)["Instances"][0]["ProtectedFromScaleIn"] is True


def test_a_lack_of_capacity_is_an_activity_in_awss_words_and_the_launch_is_repeated(aws: ServedAws) -> None:
    group = aws.make_group(instance_type="p5.48xlarge")
    aws.set_conditions(Conditions(boot_delay_seconds=0.05, launch_retry_seconds=0.1, capacity={"p5.48xlarge": 1}))
    aws.client("autoscaling").set_desired_capacity(AutoScalingGroupName=group, DesiredCapacity=3)
    activities = aws.client("autoscaling").describe_scaling_activities

    def failures() -> list[dict[str, Any]]:
        return [
            activity
            for activity in activities(AutoScalingGroupName=group)["Activities"]
            if activity["StatusCode"] == "Failed"
        ]

    failed = eventually(lambda: len(failures()) >= 3 and failures()[0])
    assert (
        "We currently do not have sufficient p5.48xlarge capacity in the Availability Zone you requested (us-east-1a)"
        in failed["StatusMessage"]
    )
    assert failed["Description"].startswith("Launching a new EC2 instance")
    assert failed["AutoScalingGroupName"] == group
    assert len(aws.members(group)) == 1
    aws.set_conditions(QUICK)
    aws.in_service(group, 3)
    newest = activities(AutoScalingGroupName=group)["Activities"][0]
    assert newest["StatusCode"] == "Successful"
    assert newest["EndTime"] >= newest["StartTime"]


def test_suspended_launch_launches_nothing(aws: ServedAws) -> None:
    group = aws.make_group()
    aws.client("autoscaling").suspend_processes(AutoScalingGroupName=group, ScalingProcesses=["Launch"])
    aws.client("autoscaling").set_desired_capacity(AutoScalingGroupName=group, DesiredCapacity=1)
    witness = aws.make_group(desired=1)
    # The second group's instance is in service, so the local cloud has had several chances to launch one for the first.
    aws.in_service(witness, 1)
    assert aws.members(group) == []
    aws.client("autoscaling").resume_processes(AutoScalingGroupName=group, ScalingProcesses=["Launch"])
    aws.in_service(group, 1)


def test_a_launching_hook_holds_the_member(aws: ServedAws) -> None:
    group = aws.make_group()
    hook(aws, group, transition="LAUNCHING", result="ABANDON")
    aws.client("autoscaling").set_desired_capacity(AutoScalingGroupName=group, DesiredCapacity=1)
    (id,) = eventually(lambda: aws.members(group, "Pending:Wait"))
    aws.client("autoscaling").complete_lifecycle_action(
        AutoScalingGroupName=group, LifecycleHookName="notice", InstanceId=id, LifecycleActionResult="CONTINUE"
    )
    assert aws.in_service(group, 1) == [id]


def test_the_latest_template_version_is_what_the_next_instance_runs(aws: ServedAws) -> None:
    group = aws.make_group(desired=1, user_data="#!/bin/sh\necho one\nexec sleep 1000\n")
    (old,) = aws.in_service(group, 1)
    template = aws.group(group)["LaunchTemplate"]["LaunchTemplateId"]
    data = {"UserData": encoded("#!/bin/sh\necho two\nexec sleep 1000\n")}
    aws.client("ec2").create_launch_template_version(
        LaunchTemplateId=template, SourceVersion="1", LaunchTemplateData=data
    )
    aws.client("autoscaling").set_desired_capacity(AutoScalingGroupName=group, DesiredCapacity=2)
    aws.in_service(group, 2)
    members = {member["InstanceId"]: member for member in aws.group(group)["Instances"]}
    (new,) = set(members) - {old}
    assert members[old]["LaunchTemplate"]["Version"] == "1"
    assert members[new]["LaunchTemplate"]["Version"] == "2"
    assert aws.instance(new)["InstanceType"] == aws.instance(old)["InstanceType"], "SourceVersion is merged"
    eventually(lambda: "two" in aws.console(new))


# Instances that are terminated outside Auto Scaling


def test_an_instance_ended_from_outside_stays_an_unhealthy_member_until_it_is_removed_by_id(aws: ServedAws) -> None:
    group = aws.make_group(desired=2)
    aws.client("autoscaling").suspend_processes(
        AutoScalingGroupName=group, ScalingProcesses=["ReplaceUnhealthy", "AZRebalance"]
    )
    lost, kept = aws.in_service(group, 2)
    aws.client("ec2").terminate_instances(InstanceIds=[lost])
    eventually(
        lambda: [
            m for m in aws.group(group)["Instances"] if m["InstanceId"] == lost and m["HealthStatus"] == "Unhealthy"
        ]
    )
    witness = aws.make_group(desired=1)
    # The second group's instance is in service, so the local cloud has had several chances to act on the first group.
    aws.in_service(witness, 1)
    assert sorted(aws.members(group)) == sorted([lost, kept]), "not replaced"
    aws.client("autoscaling").terminate_instance_in_auto_scaling_group(
        InstanceId=lost, ShouldDecrementDesiredCapacity=False
    )
    ids = eventually(lambda: (ids := aws.members(group, "InService")) and len(ids) == 2 and ids)
    assert lost not in ids
    assert kept in ids
    assert aws.group(group)["DesiredCapacity"] == 2


@pytest.mark.parametrize("how", ["terminate", "stop", "set_health"])
def test_without_the_suspension_an_unhealthy_member_is_replaced(aws: ServedAws, how: str) -> None:
    group = aws.make_group(desired=1)
    (lost,) = aws.in_service(group, 1)
    if how == "terminate":
        aws.client("ec2").terminate_instances(InstanceIds=[lost])
    elif how == "stop":
        aws.client("ec2").stop_instances(InstanceIds=[lost])
    else:
        aws.client("autoscaling").set_instance_health(InstanceId=lost, HealthStatus="Unhealthy")
    eventually(lambda: lost not in aws.members(group))
    aws.in_service(group, 1)
    assert aws.instance(lost)["State"]["Name"] == "terminated"


def test_a_suspended_health_check_sees_nothing(aws: ServedAws) -> None:
    group = aws.make_group(desired=1)
    (id,) = aws.in_service(group, 1)
    aws.client("autoscaling").suspend_processes(AutoScalingGroupName=group, ScalingProcesses=["HealthCheck"])
    aws.client("ec2").terminate_instances(InstanceIds=[id])
    aws.in_service(aws.make_group(desired=1), 1)
    assert [(member["InstanceId"], member["HealthStatus"]) for member in aws.group(group)["Instances"]] == [
        (id, "Healthy")
    ]


def test_ec2_forgets_an_instance_some_time_after_its_end(aws: ServedAws) -> None:
    group = aws.make_group(desired=1)
    (id,) = aws.in_service(group, 1)
    aws.client("autoscaling").terminate_instance_in_auto_scaling_group(
        InstanceId=id, ShouldDecrementDesiredCapacity=True
    )
    eventually(lambda: aws.instance(id)["State"]["Name"] == "terminated")
    aws.set_conditions(Conditions(boot_delay_seconds=0.05, remember_terminated_seconds=0))

    def is_forgotten() -> bool:
        filters = [{"Name": "instance-id", "Values": [id]}]
        return not aws.client("ec2").describe_instances(Filters=filters)["Reservations"]

    eventually(is_forgotten)


# Suspended and resumed processes of Auto Scaling


def process_of(aws: ServedAws, instance_id: str) -> Process:
    pid = eventually(lambda: aws.pids().get(instance_id))
    process = identify(pid)
    assert process is not None
    return process


def test_a_terminated_instance_takes_its_daemons_and_its_memory_along(aws: ServedAws, tmp_path: Path) -> None:
    pid_file = tmp_path / "daemon"
    daemon = f"(setsid sh -c 'setsid sleep 1000 & echo $! > {pid_file}.draft; mv {pid_file}.draft {pid_file}' &)"
    group = aws.make_group(
        desired=1,
        user_data=f"#!/bin/sh\n{daemon}\nmkdir /dev/shm/everstep-{os.getuid()}-$EVERSTEP_INSTANCE_ID\nexit 0\n",
    )
    (id,) = aws.in_service(group, 1)
    memory = Path(f"/dev/shm/everstep-{os.getuid()}-{id}")
    eventually(lambda: pid_file.exists() and memory.exists())
    left = identify(int(pid_file.read_text()))
    assert left is not None
    init = process_of(aws, id)
    assert init.is_alive, "a machine lives on when its user data has ended"
    aws.client("ec2").terminate_instances(InstanceIds=[id])
    eventually(lambda: not left.is_alive and not init.is_alive and not memory.exists())


def test_a_stopped_instance_loses_its_processes_and_boots_again_at_the_same_address(aws: ServedAws) -> None:
    group = aws.make_group(desired=1)
    aws.client("autoscaling").suspend_processes(AutoScalingGroupName=group, ScalingProcesses=["ReplaceUnhealthy"])
    (id,) = aws.in_service(group, 1)
    first, address = process_of(aws, id), aws.instance(id)["PrivateIpAddress"]
    aws.client("ec2").stop_instances(InstanceIds=[id])
    eventually(lambda: not first.is_alive)
    assert aws.instance(id)["State"]["Name"] == "stopped"
    aws.client("ec2").start_instances(InstanceIds=[id])
    eventually(lambda: aws.instance(id)["State"]["Name"] == "running")
    assert process_of(aws, id) != first
    assert aws.instance(id)["PrivateIpAddress"] == address


@pytest.mark.parametrize("boot_delay", [0.0, 0.05])
def test_a_rebooted_instance_begins_anew(aws: ServedAws, boot_delay: float) -> None:
    aws.set_conditions(Conditions(boot_delay_seconds=boot_delay))
    group = aws.make_group(desired=1)
    (id,) = aws.in_service(group, 1)
    first = process_of(aws, id)
    aws.client("ec2").reboot_instances(InstanceIds=[id])
    eventually(lambda: not first.is_alive)
    assert eventually(lambda: aws.pids().get(id)) != first.pid


# A lower desired capacity


def test_a_lower_desired_capacity_ends_only_unprotected_members(aws: ServedAws) -> None:
    group = aws.make_group(desired=3)
    ids = aws.in_service(group, 3)
    auto_scaling = aws.client("autoscaling")
    auto_scaling.set_instance_protection(AutoScalingGroupName=group, InstanceIds=ids[:2], ProtectedFromScaleIn=True)
    auto_scaling.set_desired_capacity(AutoScalingGroupName=group, DesiredCapacity=0)
    eventually(lambda: sorted(aws.members(group)) == sorted(ids[:2]))
    texts = [
        activity.get("StatusMessage", "")
        for activity in auto_scaling.describe_scaling_activities(AutoScalingGroupName=group)["Activities"]
    ]
    assert any("protected from scale-in" in text for text in texts)
    auto_scaling.set_instance_protection(AutoScalingGroupName=group, InstanceIds=ids[:2], ProtectedFromScaleIn=False)
    eventually(lambda: aws.members(group) == [])


def test_suspended_terminate_ends_nobody(aws: ServedAws) -> None:
    group = aws.make_group(desired=1)
    ids = aws.in_service(group, 1)
    aws.client("autoscaling").suspend_processes(AutoScalingGroupName=group, ScalingProcesses=["Terminate"])
    aws.client("autoscaling").set_desired_capacity(AutoScalingGroupName=group, DesiredCapacity=0)
    aws.in_service(aws.make_group(desired=1), 1)
    assert aws.members(group) == ids


@pytest.mark.parametrize(("decrement", "desired"), [(True, 1), (False, 2)])
def test_terminate_by_id_ends_a_protected_member_with_or_without_replacement(
    aws: ServedAws, decrement: bool, desired: int
) -> None:
    group = aws.make_group(desired=2, NewInstancesProtectedFromScaleIn=True)
    gone, kept = aws.in_service(group, 2)
    answer = aws.client("autoscaling").terminate_instance_in_auto_scaling_group(
        InstanceId=gone, ShouldDecrementDesiredCapacity=decrement
    )
    assert gone in answer["Activity"]["Description"]
    eventually(lambda: gone not in aws.members(group))
    ids = aws.in_service(group, desired)
    assert kept in ids
    assert aws.group(group)["DesiredCapacity"] == desired


def test_a_decrement_below_the_minimum_is_refused(aws: ServedAws) -> None:
    group = aws.make_group(desired=1, min_size=1)
    (id,) = aws.in_service(group, 1)
    with pytest.raises(ClientError) as error:
        aws.client("autoscaling").terminate_instance_in_auto_scaling_group(
            InstanceId=id, ShouldDecrementDesiredCapacity=True
        )
    assert code_and_message(error)[0] == "ValidationError"
    assert aws.in_service(group, 1) == [id]


# The terminating hook


def test_a_terminating_hook_holds_the_instance_alive_until_it_is_completed(aws: ServedAws) -> None:
    group = aws.make_group(desired=1)
    (id,) = aws.in_service(group, 1)
    hook(aws, group)
    auto_scaling = aws.client("autoscaling")
    auto_scaling.terminate_instance_in_auto_scaling_group(InstanceId=id, ShouldDecrementDesiredCapacity=True)
    assert eventually(lambda: aws.members(group, "Terminating:Wait")) == [id]
    assert aws.instance(id)["State"]["Name"] == "running"
    auto_scaling.record_lifecycle_action_heartbeat(
        AutoScalingGroupName=group, LifecycleHookName="notice", InstanceId=id
    )
    with pytest.raises(ClientError):
        auto_scaling.complete_lifecycle_action(
            AutoScalingGroupName=group, LifecycleHookName="other", InstanceId=id, LifecycleActionResult="CONTINUE"
        )
    with pytest.raises(ClientError):
        auto_scaling.complete_lifecycle_action(
            AutoScalingGroupName=group, LifecycleHookName="notice", InstanceId=id, LifecycleActionResult="GO"
        )
    auto_scaling.complete_lifecycle_action(
        AutoScalingGroupName=group, LifecycleHookName="notice", InstanceId=id, LifecycleActionResult="CONTINUE"
    )
    eventually(lambda: aws.members(group) == [])
    with pytest.raises(ClientError) as error:
        auto_scaling.complete_lifecycle_action(
            AutoScalingGroupName=group, LifecycleHookName="notice", InstanceId=id, LifecycleActionResult="CONTINUE"
        )
    assert code_and_message(error) == ("ValidationError", f"No active Lifecycle Action found with instance ID {id}")


def test_a_hook_that_nobody_answers_ends_with_its_timeout(aws: ServedAws) -> None:
    group = aws.make_group(desired=1)
    (id,) = aws.in_service(group, 1)
    hook(aws, group, timeout=5)
    aws.client("autoscaling").terminate_instance_in_auto_scaling_group(
        InstanceId=id, ShouldDecrementDesiredCapacity=True
    )
    eventually(lambda: aws.members(group, "Terminating:Wait"))
    eventually(lambda: aws.members(group) == [])


def test_a_replacement_is_launched_while_the_hook_still_holds(aws: ServedAws) -> None:
    group = aws.make_group(desired=1)
    (id,) = aws.in_service(group, 1)
    hook(aws, group)
    aws.client("autoscaling").terminate_instance_in_auto_scaling_group(
        InstanceId=id, ShouldDecrementDesiredCapacity=False
    )
    eventually(lambda: aws.members(group, "Terminating:Wait") == [id] and len(aws.members(group, "InService")) == 1)


def test_an_instance_refresh_replaces_all_members(aws: ServedAws) -> None:
    auto_scaling = aws.client("autoscaling")
    group = aws.make_group(desired=2)
    before = aws.in_service(group, 2)
    started = auto_scaling.start_instance_refresh(AutoScalingGroupName=group)["InstanceRefreshId"]
    with pytest.raises(ClientError) as error:
        auto_scaling.start_instance_refresh(AutoScalingGroupName=group)
    assert code_and_message(error)[0] == "InstanceRefreshInProgress"

    def refresh() -> dict[str, Any]:
        (found,) = auto_scaling.describe_instance_refreshes(AutoScalingGroupName=group)["InstanceRefreshes"]
        return dict(found)

    eventually(lambda: refresh()["Status"] == "Successful")
    assert refresh()["InstanceRefreshId"] == started
    assert not set(aws.in_service(group, 2)) & set(before)


# Requests about groups


def test_the_same_name_twice_is_refused_and_harms_nobody(aws: ServedAws) -> None:
    group = aws.make_group(desired=1)
    ids = aws.in_service(group, 1)
    with pytest.raises(ClientError) as error:
        aws.client("autoscaling").create_auto_scaling_group(
            AutoScalingGroupName=group,
            LaunchTemplate={"LaunchTemplateName": group, "Version": "$Latest"},
            MinSize=0,
            MaxSize=1,
            AvailabilityZones=["us-east-1a"],
        )
    assert code_and_message(error)[0] == "AlreadyExists"
    assert aws.members(group) == ids


def test_a_group_with_instances_is_deleted_only_by_force_and_then_wholly(aws: ServedAws) -> None:
    group = aws.make_group(desired=2, NewInstancesProtectedFromScaleIn=True)
    hook(aws, group)
    ids = aws.in_service(group, 2)
    processes = [process_of(aws, id) for id in ids]
    with pytest.raises(ClientError) as error:
        aws.client("autoscaling").delete_auto_scaling_group(AutoScalingGroupName=group)
    assert code_and_message(error)[0] == "ResourceInUse"
    aws.client("autoscaling").delete_auto_scaling_group(AutoScalingGroupName=group, ForceDelete=True)
    eventually(lambda: not any(process.is_alive for process in processes))
    assert {aws.instance(id)["State"]["Name"] for id in ids} == {"terminated"}


def test_desired_capacity_outside_of_the_bounds_is_refused_in_awss_words(aws: ServedAws) -> None:
    group = aws.make_group(desired=1, min_size=1, max_size=8)
    auto_scaling = aws.client("autoscaling")
    for desired, words in ((99, "99 is above max value 8"), (0, "0 is below min value 1")):
        with pytest.raises(ClientError) as error:
            auto_scaling.set_desired_capacity(AutoScalingGroupName=group, DesiredCapacity=desired)
        assert code_and_message(error) == (
            "ValidationError",
            f"New SetDesiredCapacity value {words} for the AutoScalingGroup.",
        )
    with pytest.raises(ClientError) as error:
        auto_scaling.update_auto_scaling_group(AutoScalingGroupName=group, DesiredCapacity=9)
    assert code_and_message(error)[0] == "ValidationError"
    auto_scaling.update_auto_scaling_group(AutoScalingGroupName=group, MinSize=3)
    assert aws.group(group)["DesiredCapacity"] == 3
    aws.in_service(group, 3)


def test_what_does_not_exist_is_a_validation_error(aws: ServedAws) -> None:
    auto_scaling = aws.client("autoscaling")
    group = {"AutoScalingGroupName": "none"}
    refused = [
        lambda: auto_scaling.set_desired_capacity(**group, DesiredCapacity=1),
        lambda: auto_scaling.update_auto_scaling_group(**group, MinSize=1),
        lambda: auto_scaling.delete_auto_scaling_group(**group),
        lambda: auto_scaling.suspend_processes(**group, ScalingProcesses=["Launch"]),
        lambda: auto_scaling.resume_processes(**group),
        lambda: auto_scaling.detach_instances(**group, InstanceIds=["i-0"], ShouldDecrementDesiredCapacity=True),
        lambda: auto_scaling.set_instance_protection(**group, InstanceIds=["i-0"], ProtectedFromScaleIn=True),
        lambda: auto_scaling.describe_scaling_activities(**group),
        lambda: auto_scaling.put_lifecycle_hook(
            **group, LifecycleHookName="h", LifecycleTransition="autoscaling:EC2_INSTANCE_TERMINATING"
        ),
        lambda: auto_scaling.complete_lifecycle_action(
            **group, LifecycleHookName="h", LifecycleActionResult="CONTINUE", InstanceId="i-00000000"
        ),
        lambda: auto_scaling.terminate_instance_in_auto_scaling_group(
            InstanceId="i-00000000", ShouldDecrementDesiredCapacity=True
        ),
        lambda: auto_scaling.set_instance_health(InstanceId="i-00000000", HealthStatus="Unhealthy"),
    ]
    for call in refused:
        with pytest.raises(ClientError) as error:
            call()
        assert code_and_message(error)[0] == "ValidationError"
        assert "not found" in code_and_message(error)[1].lower()


def test_unknown_processes_and_foreign_instances_are_refused(aws: ServedAws) -> None:
    group = aws.make_group()
    with pytest.raises(ClientError) as error:
        aws.client("autoscaling").suspend_processes(AutoScalingGroupName=group, ScalingProcesses=["Lunch"])
    assert code_and_message(error)[0] == "ValidationError"
    with pytest.raises(ClientError) as error:
        aws.client("autoscaling").set_instance_protection(
            AutoScalingGroupName=group, InstanceIds=["i-00000000"], ProtectedFromScaleIn=True
        )
    assert "is not part of Auto Scaling group" in code_and_message(error)[1]


def test_activities_come_in_pages(aws: ServedAws) -> None:
    group = aws.make_group(desired=3)
    aws.in_service(group, 3)
    pages = aws.client("autoscaling").get_paginator("describe_scaling_activities")
    pages = list(pages.paginate(AutoScalingGroupName=group, PaginationConfig={"PageSize": 2}))
    assert [len(page["Activities"]) for page in pages] == [2, 1]


def test_bad_conditions_are_refused(aws: ServedAws) -> None:
    for body in (b"{", b'{"boot_delay_seconds": -1}', b'{"boot_delay": 1}', b'{"capacity": {"p5.48xlarge": "many"}}'):
        assert aws.ask("PUT", "/_everstep/config", body).status_code == 400
    assert aws.ask("GET", "/_everstep/else").status_code == 404
    assert aws.ask("GET", "/_everstep/config").json()["boot_delay_seconds"] == QUICK.boot_delay_seconds


def test_stopping_takes_no_lock() -> None:
    """`stop` takes no lock, because a signal handler calls it.

    The interrupted code may hold any lock of the process.
    """
    # create the object without `__init__`, because `stop` needs neither the server nor the engine
    cloud = LocalAws.__new__(LocalAws)
    cloud._wake = threading.Event()
    with cloud._wake._cond:
        stopping = threading.Thread(target=cloud.stop, daemon=True)
        stopping.start()
        stopping.join(10)
        assert not stopping.is_alive()
    assert cloud._is_stopping
