"""The kinds of faults and their fields, for `everstep local fault`, fault scripts and `POST /_everstep/faults`.

    {"fault": "kill-rank", "target": "i-0123…", "rank": 3}

A target is an instance id, a number n (the n-th running instance in launch order, modulo their number), or empty for a
random instance. The command line and scripts also accept a role, such as `job 0 node 2` (`roles`). A fault that needs a
rank or a replica tries the next instances in launch order, unless the target is an id.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, Union, get_args

import msgspec

from infra.local_cloud.ec2 import StatusCheck
from infra.local_cloud.faults import Count, Delay, Seconds, Service, Share

Target = Annotated[
    str,
    msgspec.Meta(
        description="instance id; number of a running instance; or role: 'job 0 node 2', 'job 0 rank 5', "
        "'job 0 shard 1'; by default the seed chooses"
    ),
]
After = Annotated[Seconds, msgspec.Meta(description="seconds from the warning to the end")]
RankNumber = Annotated[Count | None, msgspec.Meta(description="rank to hit; by default the lowest on the node")]


def _kebab(name: str) -> str:
    return "".join(f"-{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("-")


class _Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="fault", tag=_kebab):
    """Base class of all faults. In JSON, a fault's name is its class name in kebab case."""


class _OnInstance(_Fault, frozen=True, kw_only=True):
    target: Target = ""


# Each of the following faults affects one EC2 instance of the local AWS.


class SpotWarning(_OnInstance, frozen=True):
    """Interrupt a Spot instance.

    The event and the metadata announce the interruption immediately. The instance ends after the notice period.
    """

    after: After = 120.0
    action: Annotated[Literal["terminate", "stop"], msgspec.Meta(description="action at the end")] = "terminate"


class Rebalance(_OnInstance, frozen=True):
    """Send a rebalance recommendation for an instance, by an event and in the instance's metadata.

    No spot interruption follows.
    """


class Maintenance(_OnInstance, frozen=True):
    """Schedule a maintenance event, and carry it out at its time.

    DescribeInstanceStatus, AWS Health and the metadata service announce the event immediately.
    """

    code: Annotated[
        Literal["instance-retirement", "instance-stop", "instance-reboot", "system-reboot", "system-maintenance"],
        msgspec.Meta(
            description="EC2's code; retirement and stop stop the instance, reboots reboot it, maintenance does nothing"
        ),
    ] = "instance-retirement"
    after: After = 120.0


class BlockEnd(_OnInstance, frozen=True):
    """End an instance half an hour before the end of its Capacity Block.

    AWS's event that announces the end contains the id of the reservation and the end time of the block.
    """

    after: After = 600.0


class Terminate(_OnInstance, frozen=True):
    """Terminate an instance directly, bypassing its Auto Scaling group."""


class Crash(_OnInstance, frozen=True):
    """Crash an instance's host.

    All processes end. EC2 reports the instance as running, and its status checks fail.
    """


class FailStatus(_OnInstance, frozen=True):
    """Make a status check of a healthy instance fail."""

    check: Annotated[StatusCheck, msgspec.Meta(description="status check that fails")] = "instance"


# The following faults affect the whole cloud.


class Throttle(_Fault, frozen=True):
    """Refuse a fraction of the API calls with AWS's throttling errors."""

    share: Annotated[Share, msgspec.Meta(description="share of the calls")] = 0.3
    service: Annotated[
        Service | None, msgspec.Meta(description="service to throttle; by default autoscaling, ec2, events and sqs")
    ] = None


class RateLimits(_Fault, frozen=True):
    """Limit the rate of EC2's and Auto Scaling's API calls with token buckets, as AWS does."""

    share: Annotated[float, msgspec.Meta(description="share of AWS's limits", gt=0, le=10)] = 0.1


class StaleView(_Fault, frozen=True):
    """Delay what EC2's Describe operations show of new and changed instances."""

    delay: Annotated[
        Delay | None,
        msgspec.Meta(description="seconds, or JSON as for slow-boot; by default AWS's longest delay (docs/aws.md)"),
    ] = None
    omit: Annotated[Share, msgspec.Meta(description="share of instances that one answer omits")] = 0.0


class ZoneDisruption(_Fault, frozen=True):
    """Make EC2's Describe calls for instances in an Availability Zone fail.

    Describe calls without instance ids fail, too. The instances continue to run.
    """

    zone: Annotated[str, msgspec.Meta(description="Availability Zone; by default the zones of all groups")] = ""


class Capacity(_Fault, frozen=True):
    """Limit the number of instances. Further launches fail with InsufficientInstanceCapacity."""

    count: Annotated[Count, msgspec.Meta(description="maximum number of instances, running ones included")] = 0
    instance_type: Annotated[str, msgspec.Meta(description="instance type; by default the types of all groups")] = ""


class SlowBoot(_Fault, frozen=True):
    """Delay the boots of instances."""

    delay: Annotated[
        Delay, msgspec.Meta(description='seconds, or JSON: {"kind":"lognormal","median_seconds":20,"sigma":0.5}')
    ] = 30.0


class SlotsTaken(_Fault, frozen=True):
    """Keep the capacity of ended instances occupied for a while."""

    delay: Annotated[Delay, msgspec.Meta(description="seconds, or JSON as for slow-boot")] = 180.0


class BadEvents(_Fault, frozen=True):
    """Delay, duplicate or drop events that AWS sends."""

    delay: Annotated[Delay, msgspec.Meta(description="seconds, or JSON as for slow-boot")] = 0.0
    double: Annotated[Share, msgspec.Meta(description="share of events that are duplicated")] = 0.0
    drop: Annotated[Share, msgspec.Meta(description="share of events that are dropped")] = 0.0


class SuspendLaunch(_Fault, frozen=True):
    """Suspend the process Launch of an Auto Scaling group."""

    group: Annotated[str, msgspec.Meta(description="Auto Scaling group; by default all")] = ""
    administrative: Annotated[
        bool, msgspec.Meta(description="suspend as AWS does after failed launches, not as a user")
    ] = False


# The following faults affect Everstep's own processes and nodes.


class KillRank(_OnInstance, frozen=True):
    """End one rank with SIGKILL."""

    rank: RankNumber = None


class KillAgent(_OnInstance, frozen=True):
    """SIGKILL the agent of a node. The node's user data restarts it."""


class KillControlPlane(_Fault, frozen=True):
    """SIGKILL the control plane, and restart it at the same address."""

    down: Annotated[Seconds, msgspec.Meta(description="seconds until the restart")] = 0.0
    server: Annotated[Literal["control-plane", "standby"], msgspec.Meta(description="server of a pair")] = (
        "control-plane"
    )


class Hang(_OnInstance, frozen=True):
    """SIGSTOP one rank, so that it hangs."""

    rank: RankNumber = None


class Partition(_OnInstance, frozen=True):
    """Drop packets between a node and the addresses that `separate_from` selects. Needs `up --network namespaces`."""

    separate_from: Annotated[
        str, msgspec.Meta(description="rest, aws, control-plane, peers, or instance ids, separated by commas")
    ] = "rest"


class SlowNetwork(_OnInstance, frozen=True):
    """Limit the bandwidth of a node's link. Needs `up --network namespaces`."""

    megabits: Annotated[float, msgspec.Meta(description="megabits per second, in each direction", gt=0, le=100_000)] = (
        10.0
    )


class CorruptReplica(_OnInstance, frozen=True):
    """Flip one bit of the newest sealed replica on a node."""

    rank: Annotated[
        Count | None, msgspec.Meta(description="owner of the shard; by default any rank that does not run on the node")
    ] = None


class Xid(_OnInstance, frozen=True):
    """Report a GPU error (NVIDIA's Xid code) through the file that replaces NVIDIA's library NVML on a node."""

    code: Annotated[Count, msgspec.Meta(description="NVIDIA's Xid; 0: none")] = 79
    gpu: Annotated[Count, msgspec.Meta(description="index of the GPU")] = 0
    ecc: Annotated[Count, msgspec.Meta(description="uncorrectable ECC errors")] = 0
    throttled: Annotated[bool, msgspec.Meta(description="whether the GPU is throttled")] = False
    lost: Annotated[bool, msgspec.Meta(description="whether the GPU has fallen off the bus")] = False


class Unfit(_OnInstance, frozen=True):
    """Spoil a test of a node. The agent runs its tests after a reboot of the node."""

    test: Annotated[
        Literal["matmul", "disk-write", "disk-read", "loopback", "all-reduce"],
        msgspec.Meta(description="matmul: wrong product; all-reduce: wrong sum; any other: slow"),
    ] = "matmul"


AnyFault = Union[  # noqa: UP007
    SpotWarning, Rebalance, Maintenance, BlockEnd, Terminate, Crash, FailStatus,
    Throttle, RateLimits, StaleView, ZoneDisruption, Capacity, SlowBoot, SlotsTaken, BadEvents, SuspendLaunch,
    KillRank, KillAgent, KillControlPlane, Hang, Partition, SlowNetwork, CorruptReplica, Xid, Unfit,
]  # fmt: skip
FAULT: Final = msgspec.json.Decoder(AnyFault)
FAULT_IN_WORDS: Final = msgspec.json.Decoder(AnyFault, strict=False)
"""Decoder for the command line. It also accepts numbers that are written as text."""


WARNINGS: Final = frozenset({"spot-warning", "rebalance", "maintenance", "block-end"})
"""Kinds that announce the end of an instance. `clear` cancels all together, because an instance has one planned end."""
LASTING: Final = WARNINGS | {
    "throttle", "rate-limits", "stale-view", "zone-disruption",
    "capacity", "slow-boot", "slots-taken", "bad-events", "suspend-launch",
    "fail-status", "hang", "xid", "unfit", "partition", "slow-network",
}  # fmt: skip
"""Kinds whose effect lasts until `clear` ends it."""


class Effect(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an injected fault."""

    fault: str
    target: str
    """Instance or group; empty if the fault affects the whole cloud."""
    did: str
    """One sentence for users."""
    facts: dict[str, Any] = {}
    """Values with which a test can verify the effect: pids, instance ids, files, times."""


EFFECT: Final = msgspec.json.Decoder(Effect)
EFFECTS: Final = msgspec.json.Decoder(list[Effect])


def kinds() -> dict[str, type[msgspec.Struct]]:
    """Return the fault classes by name, in the order of `AnyFault`."""
    return {_kebab(kind.__name__): kind for kind in get_args(AnyFault)}


def name_of(fault: AnyFault) -> str:
    """Return the name of a fault's kind in commands and scripts."""
    return _kebab(type(fault).__name__)
