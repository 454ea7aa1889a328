"""The faults by name: what `everstep local fault`, a fault script and `POST /_everstep/faults` may ask for. Data only.

    {"fault": "kill-rank", "target": "i-0123…", "rank": 3}

A target is an instance: its id, or a number n for the n-th that runs, in the order of their launch and counted around,
or nothing for one that the seed chooses. The command line and fault scripts also take roles (`roles`), and make ids of
them before they ask. Where no id is given and a fault needs what not every node has, a rank or a replica, the next node
that has it is meant. Whatever else a fault takes are its fields; the command line's options are made from them.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, Union, get_args

import msgspec

from infra.local_cloud.ec2 import StatusCheck
from infra.local_cloud.faults import Count, Delay, Seconds, Service, Share

Target = Annotated[
    str,
    msgspec.Meta(
        description="instance id; number: the n-th that runs; or role: 'job 0 node 2', 'job 0 rank 5', 'job 0 shard 1'; "
        "the seed chooses unless said"
    ),
]
After = Annotated[Seconds, msgspec.Meta(description="seconds from the warning to the end")]
RankNumber = Annotated[Count | None, msgspec.Meta(description="which rank; the lowest on the node unless said")]


def _kebab(name: str) -> str:
    return "".join(f"-{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("-")


class _Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="fault", tag=_kebab):
    """Base: the name on the wire is the class's in kebab case."""


class _OnInstance(_Fault, frozen=True, kw_only=True):
    target: Target = ""


# AWS's doing, to one instance


class SpotWarning(_OnInstance, frozen=True):
    """A Spot interruption: event and metadata now, the end after the notice."""

    after: After = 120.0
    action: Annotated[Literal["terminate", "stop"], msgspec.Meta(description="what becomes of the instance")] = (
        "terminate"
    )


class Rebalance(_OnInstance, frozen=True):
    """A rebalance recommendation: event and metadata; nothing need follow."""


class Maintenance(_OnInstance, frozen=True):
    """A scheduled event: DescribeInstanceStatus, AWS Health event and metadata now, what they announce at its time."""

    code: Annotated[
        Literal["instance-retirement", "instance-stop", "instance-reboot", "system-reboot", "system-maintenance"],
        msgspec.Meta(
            description="EC2's code; a retirement and a stop stop the instance, reboots reboot it, maintenance leaves it"
        ),
    ] = "instance-retirement"
    after: After = 120.0


class BlockEnd(_OnInstance, frozen=True):
    """The capacity block of an instance ends half an hour after the instance does: the warning names the reservation and its end."""

    after: After = 600.0


class Terminate(_OnInstance, frozen=True):
    """Somebody terminates an instance, past its group."""


class Crash(_OnInstance, frozen=True):
    """An instance's host dies: nothing runs any more, EC2 says running, and its status checks fail."""


class FailStatus(_OnInstance, frozen=True):
    """A status check fails on an instance that is well."""

    check: Annotated[StatusCheck, msgspec.Meta(description="which of the two")] = "instance"


# AWS's doing, to everything


class Throttle(_Fault, frozen=True):
    """A share of API calls is refused with AWS's throttling errors."""

    share: Annotated[Share, msgspec.Meta(description="of the calls")] = 0.3
    service: Annotated[
        Service | None, msgspec.Meta(description="which; autoscaling, ec2, events and sqs unless said")
    ] = None


class Capacity(_Fault, frozen=True):
    """No more than so many instances can exist: launches beyond fail with InsufficientInstanceCapacity."""

    count: Annotated[Count, msgspec.Meta(description="instances, those that run included")] = 0
    instance_type: Annotated[str, msgspec.Meta(description="of which type; every type of a group unless said")] = ""


class SlowBoot(_Fault, frozen=True):
    """Instances take longer to boot."""

    delay: Annotated[
        Delay, msgspec.Meta(description='seconds, or JSON: {"kind":"lognormal","median_seconds":20,"sigma":0.5}')
    ] = 30.0


class SlotsTaken(_Fault, frozen=True):
    """The slot of an instance that ends stays taken for a while."""

    delay: Annotated[Delay, msgspec.Meta(description="seconds, or JSON as for slow-boot")] = 180.0


class BadEvents(_Fault, frozen=True):
    """Events come late, twice or never."""

    delay: Annotated[Delay, msgspec.Meta(description="seconds, or JSON as for slow-boot")] = 0.0
    double: Annotated[Share, msgspec.Meta(description="share that comes twice")] = 0.0
    drop: Annotated[Share, msgspec.Meta(description="share that never comes")] = 0.0


class SuspendLaunch(_Fault, frozen=True):
    """The Launch process of a group is suspended."""

    group: Annotated[str, msgspec.Meta(description="Auto Scaling group; all unless said")] = ""
    administrative: Annotated[bool, msgspec.Meta(description="by AWS, as after long failure, instead of by a user")] = (
        False
    )


# Our own


class KillRank(_OnInstance, frozen=True):
    """SIGKILL one rank."""

    rank: RankNumber = None


class KillAgent(_OnInstance, frozen=True):
    """SIGKILL the agent of a node; its user data starts it again."""


class KillControlPlane(_Fault, frozen=True):
    """SIGKILL the control plane, and start it again at the same address."""

    down: Annotated[Seconds, msgspec.Meta(description="seconds until it is started again")] = 0.0


class Hang(_OnInstance, frozen=True):
    """SIGSTOP one rank."""

    rank: RankNumber = None


class Partition(_OnInstance, frozen=True):
    """Nothing passes between a node and the rest; needs `up --network namespaces`."""

    separate_from: Annotated[
        str, msgspec.Meta(description="rest, aws, control-plane, peers, or instance ids with commas")
    ] = "rest"


class SlowNetwork(_OnInstance, frozen=True):
    """A node's line carries little; needs `up --network namespaces`."""

    megabits: Annotated[float, msgspec.Meta(description="per second, in each direction", gt=0, le=100_000)] = 10.0


class CorruptReplica(_OnInstance, frozen=True):
    """One bit of the newest sealed replica on a node changes."""

    rank: Annotated[Count | None, msgspec.Meta(description="whose shard; any that does not run there unless said")] = (
        None
    )


class FillMemory(_OnInstance, frozen=True):
    """Something takes up the memory that a node has for slots."""

    mib: Annotated[Count | None, msgspec.Meta(description="how much; all that is left unless said")] = None


class Xid(_OnInstance, frozen=True):
    """NVML reports a GPU fault on a node."""

    code: Annotated[Count, msgspec.Meta(description="NVIDIA's Xid; 0 for none")] = 79
    gpu: Annotated[Count, msgspec.Meta(description="which GPU")] = 0
    ecc: Annotated[Count, msgspec.Meta(description="uncorrectable ECC errors")] = 0
    throttled: Annotated[bool, msgspec.Meta(description="it is throttled")] = False
    lost: Annotated[bool, msgspec.Meta(description="it has fallen off the bus")] = False


AnyFault = Union[  # noqa: UP007
    SpotWarning, Rebalance, Maintenance, BlockEnd, Terminate, Crash, FailStatus,
    Throttle, Capacity, SlowBoot, SlotsTaken, BadEvents, SuspendLaunch,
    KillRank, KillAgent, KillControlPlane, Hang, Partition, SlowNetwork, CorruptReplica, FillMemory, Xid,
]  # fmt: skip
FAULT: Final = msgspec.json.Decoder(AnyFault)
FAULT_IN_WORDS: Final = msgspec.json.Decoder(AnyFault, strict=False)
"""From a command line, where numbers are words, too."""


WARNINGS: Final = frozenset({"spot-warning", "rebalance", "maintenance", "block-end"})
"""Taken back together: an instance has one end that is planned."""
LASTING: Final = WARNINGS | {
    "throttle", "capacity", "slow-boot", "slots-taken", "bad-events", "suspend-launch",
    "fail-status", "hang", "fill-memory", "xid", "partition", "slow-network",
}  # fmt: skip
"""What goes on until it is cleared."""


class Effect(msgspec.Struct, frozen=True, kw_only=True):
    """What a fault has done."""

    fault: str
    target: str
    """The instance or group; empty where it is everything."""
    did: str
    """One sentence."""
    facts: dict[str, Any] = {}
    """What can be looked up to see that it is so: pids, instance ids, files, times."""


EFFECT: Final = msgspec.json.Decoder(Effect)
EFFECTS: Final = msgspec.json.Decoder(list[Effect])


def kinds() -> dict[str, type[msgspec.Struct]]:
    """Return the faults by name, in the order of this module."""
    return {_kebab(kind.__name__): kind for kind in get_args(AnyFault)}


def name_of(fault: AnyFault) -> str:
    """Return a fault's name."""
    return _kebab(type(fault).__name__)
