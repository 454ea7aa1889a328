"""Resolves roles to instances. A role is the target of a fault that names a node, rank or shard of a running job.

    job 0 node 2           the third node of the first running job
    job 1 rank 5           the node of the sixth rank of the second running job
    last job shard 0       the holders of rank 0's shard, in the job that the previous role selected

Numbers start at 0 and wrap around. Jobs are sorted by name, nodes by GROUP_RANK, and shards by owner rank. Only a job
with a running instance, a running node, and a shard whose holders all run can be selected. `last job` selects job 0 if
the job of the previous role has ended.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, cast

import msgspec

from infra.local_cloud.errors import FaultRefused, NotUp
from infra.local_cloud.fault_kinds import AnyFault, CorruptReplica, Hang, KillRank

Part = Literal["node", "rank", "shard"]
TRAINS: Final = "InProgress"
"""API status of a launched job that has not ended. Some of its instances may have."""
_ROLE: Final = re.compile(r"(?:job (?P<job>\d{1,9})|last job) (?P<part>node|rank|shard) (?P<number>\d{1,9})", re.ASCII)
_INSTANCE: Final = re.compile(r"(?:i-[0-9a-z]+|\d+)?", re.ASCII)
_FORMS: Final = (
    'write an instance id, a number ("2": the third instance that runs), or a role: "job 0 node 2", '
    '"job 0 rank 5", "last job shard 1"'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRole:
    """A fault target that names a node, rank or shard of a running job."""

    job: int | None
    """Index among the running jobs. None: the job of the previous role."""
    part: Part
    number: int
    """Index of the node, rank or shard within the job."""

    def __str__(self) -> str:
        return f"{'last job' if self.job is None else f'job {self.job}'} {self.part} {self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleShard:
    """The nodes that hold copies of one rank's shard."""

    rank: int
    holders: tuple[str, ...]
    """Instance ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleJob:
    """Nodes and shards of a running job."""

    name: str
    nodes: tuple[str, ...]
    """Instance ids by GROUP_RANK. Some may have ended."""
    ranks_per_node: int
    committed_step: int
    shards: tuple[RoleShard, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """The instances that a role selects, with the name of their job."""

    job: str
    instances: tuple[str, ...]
    """The instance of the node or rank, or all holders of the shard."""
    rank: int | None
    """The selected rank or the owner of the shard. None for a node."""


def parse(target: str) -> FaultRole | None:
    """Parse a fault's target. None if it is an instance id, a number or empty.

    Raises FaultRefused, with the valid forms, for any other target.
    """
    if _INSTANCE.fullmatch(target):
        return None
    found = _ROLE.fullmatch(target)
    if found is None:
        raise FaultRefused(f"{target!r} is not a target: {_FORMS}")
    return FaultRole(
        job=None if found["job"] is None else int(found["job"]),
        part=cast("Part", found["part"]),
        number=int(found["number"]),
    )


def check(fault: AnyFault) -> None:
    """Raise FaultRefused if a fault's target is invalid, or both the target and the field `rank` select a rank."""
    role = parse(_target(fault))
    if role is not None and _takes_rank(fault, role) and getattr(fault, "rank", None) is not None:
        raise FaultRefused(f"{str(role)!r} already selects a rank: remove `rank`")


def training_job(described: Mapping[str, Any], protection: Mapping[str, Any]) -> RoleJob:
    """Return a job's nodes and shards from the answers of DescribeTrainingJob and DescribeProtection."""
    shards = sorted(protection["Shards"], key=lambda shard: int(shard["Rank"]))
    return RoleJob(
        name=described["TrainingJobName"],
        nodes=tuple(described["NodeIds"]),
        ranks_per_node=described["RanksPerNode"],
        committed_step=described["CommittedStep"],
        shards=tuple(
            RoleShard(rank=shard["Rank"], holders=tuple(holder["NodeId"] for holder in shard["Holders"]))
            for shard in shards
        ),
    )


def with_nodes(jobs: Collection[RoleJob], running: Collection[str]) -> list[RoleJob]:
    """Return the jobs with a running node, sorted by name. `running` are ids of instances."""
    return sorted((job for job in jobs if any(node in running for node in job.nodes)), key=lambda job: job.name)


def resolve(role: FaultRole, jobs: Collection[RoleJob], running: Collection[str], last_job: str = "") -> Hit:
    """Resolve a role to running instances. `last_job` is the job that the previous role selected; empty if none.

    Raises FaultRefused, with the reason, if no running instance has this role now.
    """
    named = with_nodes(jobs, running)
    if not named:
        raise FaultRefused(f"{role}: no training job has a running node")
    job = next((job for job in named if role.job is None and job.name == last_job), named[(role.job or 0) % len(named)])
    match role.part:
        case "node":
            nodes = [node for node in job.nodes if node in running]
            return Hit(job=job.name, instances=(nodes[role.number % len(nodes)],), rank=None)
        case "rank":
            rank = role.number % (len(job.nodes) * job.ranks_per_node)
            node = job.nodes[rank // job.ranks_per_node]
            if node not in running:
                raise FaultRefused(f"{role}: {node}, the node of rank {rank} of {job.name}, is not running")
            return Hit(job=job.name, instances=(node,), rank=rank)
        case "shard":
            if job.committed_step <= 0:
                raise FaultRefused(f"{role}: {job.name} has committed no step yet")
            shards = [
                shard for shard in job.shards if shard.holders and all(holder in running for holder in shard.holders)
            ]
            if not shards:
                raise FaultRefused(f"{role}: {job.name} has no shard whose holders all run")
            shard = shards[role.number % len(shards)]
            return Hit(job=job.name, instances=shard.holders, rank=shard.rank)


class Aim:
    """Resolves targets of faults to instances, and remembers the job of each role for a later `last job`.

    `jobs` raises `NotUp` while the control plane is down; then the previous result is used.
    """

    def __init__(self, jobs: Callable[[], Collection[RoleJob]], running: Callable[[], Collection[str]]) -> None:
        self._jobs = jobs
        self._running = running
        self._seen: Collection[RoleJob] = ()
        self._last_job = ""

    def __call__(self, fault: AnyFault) -> list[AnyFault]:
        """Return one fault per selected instance, with its id as target. A fault without a role stays unchanged.

        Raises FaultRefused if no running instance has this role now, or the target is invalid.
        """
        check(fault)
        role = parse(_target(fault))
        if role is None:
            return [fault]
        try:
            self._seen = self._jobs()
        except NotUp:
            if not self._seen:
                raise FaultRefused(
                    f"{role}: the control plane does not answer, so the training jobs are unknown"
                ) from None
        hit = resolve(role, self._seen, self._running(), self._last_job)
        self._last_job = hit.job
        named = {"rank": hit.rank} if _takes_rank(fault, role) else {}
        return [msgspec.structs.replace(fault, target=instance, **named) for instance in hit.instances]


def _target(fault: AnyFault) -> str:
    return str(getattr(fault, "target", ""))


def _takes_rank(fault: AnyFault, role: FaultRole) -> bool:
    """Return whether the target, a rank or a shard, determines the fault's field `rank`."""
    return (
        isinstance(fault, KillRank | Hang)
        if role.part == "rank"
        else isinstance(fault, CorruptReplica) and role.part == "shard"
    )
