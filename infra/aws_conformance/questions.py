"""Defines the questions of a conformance run, and the experiments that answer them.

A question is a behaviour that AWS's documentation leaves open. Its answer consists of fields of `AwsAnswers`, and of
details for people. The experiments run in the order of `QUESTIONS`, each on the members that the previous one left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from botocore.exceptions import ClientError

from infra.aws_conformance.account import MAX_INSTANCES, Account, Unanswered, code_of, words_of

ABSENT_IDS: Final = ("i-0123456789abcdef0", "i-0123456789abcdef1")
"""Ids in EC2's format, but of no instance."""
MOST_CALLS: Final = 600
"""Largest number of calls of an experiment that searches a rate limit."""
STATE_CHANGE: Final = "EC2 Instance State-change Notification"


@dataclass(frozen=True, slots=True)
class Answer:
    """The observed answer to one question."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `AwsAnswers`."""
    observed: Mapping[str, Any] = field(default_factory=dict)
    """Details for readers of the file. The local cloud ignores them."""


@dataclass(frozen=True, slots=True)
class Question:
    """One question about AWS's behaviour."""

    name: str
    sentence: str
    ask: Callable[[Account], Answer]
    """Raises Unanswered or ClientError if the experiment fails."""


def _protection_of_a_pending_member(account: Account) -> Answer:
    account.set_desired(1)
    id, member = account.until("a new member", lambda: next(iter(account.members().items()), None))
    if not member["LifecycleState"].startswith("Pending"):
        raise Unanswered(f"the first answer shows the new member as {member['LifecycleState']}, not as Pending")
    refused = _refusal_of(lambda: account.protect([id], is_protected=True))
    return Answer(
        {
            "pending_member_shows_protection": member["ProtectedFromScaleIn"],
            "pending_member_is_protectable": not refused,
        },
        {"LifecycleState": member["LifecycleState"], **refused},
    )


def _protection_of_a_new_member(account: Account) -> Answer:
    """Turn NewInstancesProtectedFromScaleIn off while a member is Pending, and observe the InService member."""
    scaling, known = account.client("autoscaling"), set(account.in_service(1))
    account.set_desired(len(known) + 1)
    id = account.until("a new member", lambda: next(iter(set(account.members()) - known), None))
    try:
        scaling.update_auto_scaling_group(AutoScalingGroupName=account.name, NewInstancesProtectedFromScaleIn=False)
        state = account.members()[id]["LifecycleState"]
        if not state.startswith("Pending"):
            raise Unanswered(f"the new member was {state}, not Pending, when the group's setting changed")
        account.in_service(len(known) + 1)
        is_protected = account.members()[id]["ProtectedFromScaleIn"]
    finally:
        scaling.update_auto_scaling_group(AutoScalingGroupName=account.name, NewInstancesProtectedFromScaleIn=True)
    return Answer(
        {"protection_set_at": "launch" if is_protected else "service"}, {"ProtectedFromScaleIn": is_protected}
    )


def _visibility_of_launches(account: Account) -> Answer:
    known = set(account.members())
    account.set_desired(MAX_INSTANCES)
    seen: dict[str, float] = {}
    lags: dict[str, float] = {}

    def all_are_visible() -> bool:
        for id in set(account.members()) - known:
            seen.setdefault(id, account.monotonic())
        for id in seen.keys() - lags.keys():
            if account.state(id):
                lags[id] = account.monotonic() - seen[id]
        return len(lags) >= MAX_INSTANCES - len(known)

    account.until("the new instances in DescribeInstances", all_are_visible)
    return Answer({"visibility_seconds": max(lags.values())}, {"SecondsByInstance": lags})


def _topology(account: Account) -> Answer:
    ids = account.in_service(MAX_INSTANCES)
    instances = account.client("ec2").describe_instance_topology(InstanceIds=ids)["Instances"]
    layers = [len(each.get("NetworkNodes", ())) for each in instances]
    return Answer({"topology_layers": min(layers, default=0)}, {"Instances": len(instances), "Layers": layers})


def _protection_of_several_members(account: Account) -> Answer:
    """Change the protection of a member in service and of a terminating member with one call."""
    scaling = account.client("autoscaling")
    kept, leaving, *_ = account.in_service(2)
    account.protect([kept], is_protected=True)
    scaling.terminate_instance_in_auto_scaling_group(InstanceId=leaving, ShouldDecrementDesiredCapacity=True)
    account.until(
        f"{leaving} held by the hook",
        lambda: account.members().get(leaving, {}).get("LifecycleState") == "Terminating:Wait",
    )
    refused = _refusal_of(lambda: account.protect([kept, leaving], is_protected=False))
    is_protected = account.members()[kept]["ProtectedFromScaleIn"]
    account.release(leaving)
    if not refused:
        raise Unanswered("SetInstanceProtection accepted a terminating member")
    return Answer({"protection_is_all_or_nothing": is_protected}, refused)


def _unknown_ids(account: Account) -> Answer:
    ids = [*account.in_service(1)[:1], *ABSENT_IDS]
    ec2 = account.client("ec2")
    described = _refusal_of(lambda: ec2.describe_instances(InstanceIds=ids))
    status = _refusal_of(lambda: ec2.describe_instance_status(InstanceIds=ids, IncludeAllInstances=True))
    named = sum(id in described.get("Message", "") for id in ABSENT_IDS)
    return Answer(
        {"unknown_ids_named": "all" if named == len(ABSENT_IDS) else "one"},
        {"DescribeInstances": described, "DescribeInstanceStatus": status},
    )


def _refusals(account: Account) -> Answer:
    ec2 = account.client("ec2")
    many = [f"i-{number:017x}" for number in range(201)]
    calls: dict[str, Callable[[], Any]] = {
        "UnknownFilter": lambda: ec2.describe_instance_status(Filters=[{"Name": "instance-id", "Values": many[:1]}]),
        "FilterValues201": lambda: ec2.describe_instances(Filters=[{"Name": "instance-id", "Values": many}]),
        "StatusIds101": lambda: ec2.describe_instance_status(InstanceIds=many[:101]),
        "ProtectedIds51": lambda: account.protect(many[:51], is_protected=True),
    }
    return Answer({}, {name: _refusal_of(call) for name, call in calls.items()})


def _rate_of_auto_scaling(account: Account) -> Answer:
    scaling = account.single_attempt("autoscaling")

    def call() -> None:
        scaling.describe_auto_scaling_groups(AutoScalingGroupNames=[account.name])

    # Wait until AWS's token bucket is full, because the calls of earlier experiments have taken tokens.
    account.pause(account.refill_seconds)
    burst = _calls_until_throttled(call)
    account.pause(account.refill_seconds)
    refilled = _calls_until_throttled(call)
    # Wait for the refill again, so that AWS does not throttle the calls of the next experiments.
    account.pause(account.refill_seconds)
    rate = {"burst": float(burst), "per_second": max(refilled / account.refill_seconds, 0.1)}
    return Answer({"auto_scaling_rate": rate}, {"Burst": burst, "CallsAfterRefill": refilled})


def _ended_member(account: Account) -> Answer:
    id = account.in_service(1)[0]
    account.client("ec2").terminate_instances(InstanceIds=[id])
    began = account.monotonic()
    seconds: dict[str, float] = {}

    def is_over() -> bool:
        after = account.monotonic() - began
        member = account.members().get(id)
        if account.state(id) in ("shutting-down", "terminated", ""):
            seconds.setdefault("Described", after)
        if member and member["HealthStatus"] == "Unhealthy":
            seconds.setdefault("Unhealthy", after)
        if not member or member["LifecycleState"].startswith("Terminat"):
            seconds.setdefault("Removed", after)
        if any(_tells_end(event, id) for event in account.read_events()):
            seconds.setdefault("Event", after)
        return after >= account.watch_seconds

    while not is_over():
        account.pause(account.poll_seconds)
    fields: dict[str, Any] = {"ended_member_stays": "Removed" not in seconds}
    if "Described" in seconds:
        fields["visibility_seconds"] = seconds["Described"]
    return Answer(fields, {"SecondsUntil": seconds})


def _hook_of_an_ended_member(account: Account) -> Answer:
    ended = [id for id, member in account.members().items() if account.state(id) in ("shutting-down", "terminated", "")]
    if not ended:
        raise Unanswered("the group has no member whose instance has ended")
    id = ended[0]
    scaling = account.client("autoscaling")
    scaling.terminate_instance_in_auto_scaling_group(InstanceId=id, ShouldDecrementDesiredCapacity=True)

    def outcome() -> str:
        member = account.members().get(id)
        state = member["LifecycleState"] if member else "removed"
        return state if state in ("removed", "Terminating:Wait") else ""

    found = account.until(f"{id} held by the hook, or removed", outcome)
    if found == "Terminating:Wait":
        account.release(id)
    return Answer({"hook_holds_ended_member": found == "Terminating:Wait"}, {"State": found})


QUESTIONS: Final = (
    Question(
        "pending-protection",
        "Does AWS show and accept protection from scale-in for a Pending member?",
        _protection_of_a_pending_member,
    ),
    Question(
        "new-protection",
        "Does a new member's protection follow the group's setting at its launch, or when it enters service?",
        _protection_of_a_new_member,
    ),
    Question("launch-visibility", "How long does DescribeInstances omit a new instance?", _visibility_of_launches),
    Question("topology", "How many network nodes does EC2 return for these instances?", _topology),
    Question(
        "several-protections",
        "Does one unprotectable member make SetInstanceProtection refuse all members of the call?",
        _protection_of_several_members,
    ),
    Question("unknown-ids", "Does an error about several unknown instance ids name all of them?", _unknown_ids),
    Question("refusals", "With which codes does AWS refuse wrong filters and too many values?", _refusals),
    Question("auto-scaling-rate", "How many calls of Auto Scaling does AWS accept?", _rate_of_auto_scaling),
    Question(
        "ended-member",
        "Does an ended instance stay a member while ReplaceUnhealthy is suspended, and when do Describe and events "
        "show its end?",
        _ended_member,
    ),
    Question(
        "hook-of-ended-member",
        "Does a terminating hook hold a member whose instance has already ended?",
        _hook_of_an_ended_member,
    ),
)


def _refusal_of(call: Callable[[], Any]) -> dict[str, str]:
    try:
        call()
    except ClientError as error:
        return {"Code": code_of(error), "Message": words_of(error)}
    return {}


def _calls_until_throttled(call: Callable[[], None]) -> int:
    for count in range(MOST_CALLS):
        try:
            call()
        except ClientError as error:
            if code_of(error) in ("Throttling", "RequestLimitExceeded"):
                return count
            raise
    raise Unanswered(f"AWS throttled none of {MOST_CALLS} calls")


def _tells_end(event: Mapping[str, Any], instance_id: str) -> bool:
    detail = event["detail"]
    return (
        event["detail-type"] == STATE_CHANGE
        and detail.get("instance-id") == instance_id
        and detail.get("state") in ("shutting-down", "terminated")
    )
