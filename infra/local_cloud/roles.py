"""Resolves roles to instances. A role is the target of a fault that names a node, rank or shard of a running job.

    job 0 node 2           the third node of the first running job
    job 1 rank 5           the node of the sixth rank of the second running job
    last job shard 0       the holders of rank 0's shard, in the job that the previous role selected

Numbers start at 0 and wrap around: a number n selects the item n modulo the number of items. Jobs are sorted by name,
nodes by GROUP_RANK, and shards by their owner rank. Only these items can be selected: a job with a running instance, a
running node, and a shard whose holders all run. `last job` selects job 0 if the job of the previous role has ended.

A role is resolved when its fault is injected. `Aim` receives the jobs and the running instances from its caller.
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
"""API status of a launched job that has not ended. Some instances of such a job may have ended."""
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
    """Index of the job among the running jobs. None selects the job that the previous role selected."""
    part: Part
    number: int
    """Index of the selected node, rank or shard among those of the job, from 0."""

    def __str__(self) -> str:
        return f"{'last job' if self.job is None else f'job {self.job}'} {self.part} {self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleShard:
    """The nodes that hold copies of one rank's shard."""

    rank: int
    holders: tuple[str, ...]
    """Instance ids of the nodes that hold the shard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleJob:
    """The nodes and shards of a running job, from which a role such as `job 0 node 2` selects the target of a fault."""

    name: str
    nodes: tuple[str, ...]
    """Instance ids by GROUP_RANK. Some instances may have ended."""
    ranks_per_node: int
    committed_step: int
    shards: tuple[RoleShard, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """The instances that a role such as `job 0 node 2` or `job 1 rank 5` selects, with the name of their job."""

    job: str
    instances: tuple[str, ...]
    """The instance of the selected node or rank, or all holders of the selected shard."""
    rank: int | None
    """The selected rank, or the owner of the selected shard. None if the role names a node."""


def parse(target: str) -> FaultRole | None:
    """Parse the target of a fault into a role.

    The result is None if the target is an instance id, the number of an instance, or empty: no role is then needed.
    Raises FaultRefused with a list of the valid forms if the target has none of them.
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
    """Check a fault's target and its compatibility with the fault's other fields.

    Args:
        fault: a fault from a script or a command line.

    Raises:
        FaultRefused: the target is invalid, or both the target and the field `rank` select a rank.
    """
    role = parse(_target(fault))
    if role is not None and _takes_rank(fault, role) and getattr(fault, "rank", None) is not None:
        raise FaultRefused(f"{str(role)!r} already selects a rank: remove `rank`")


def training_job(described: Mapping[str, Any], protection: Mapping[str, Any]) -> RoleJob:
    """Return the facts from which `resolve` finds a job's nodes, from two answers of the API.

    `described` is the answer of DescribeTrainingJob. `protection` is the answer of DescribeProtection.
    """
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
    """Return the jobs that have a running node, sorted by name. Only these jobs can be selected.

    `running` contains the ids of the running instances.
    """
    return sorted((job for job in jobs if any(node in running for node in job.nodes)), key=lambda job: job.name)


def resolve(role: FaultRole, jobs: Collection[RoleJob], running: Collection[str], last_job: str = "") -> Hit:
    """Resolve a role to running instances.

    Args:
        role: the result of `parse`: it names a node, rank or shard of a job.
        jobs: the running jobs; jobs without a running node are ignored.
        running: ids of the running instances.
        last_job: name of the job that the previous role selected; empty if there is none.

    Returns:
        The job with the selected instances.

    Raises:
        FaultRefused: no running instance has this role now. The message contains the reason.
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
    """Resolves the targets of faults to instances, and remembers the job of each role for a later `last job` target.

    Args:
        jobs: returns the running jobs. It raises `NotUp` while the control plane is down, and `Aim` then uses the
            previous result.
        running: returns the ids of the running instances.
    """

    def __init__(self, jobs: Callable[[], Collection[RoleJob]], running: Callable[[], Collection[str]]) -> None:
        self._jobs = jobs
        self._running = running
        self._seen: Collection[RoleJob] = ()
        self._last_job = ""

    def __call__(self, fault: AnyFault) -> list[AnyFault]:
        """Return the faults to inject for a fault whose target may be a role.

        Args:
            fault: a fault whose target is a role, an instance id, a number or empty.

        Returns:
            One fault per selected instance, with the instance's id as target. A fault without a role is returned
            unchanged.

        Raises:
            FaultRefused: no running instance has this role now, or the target is invalid.
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
    """Return whether a fault's target, such as `job 0 rank 5`, also determines the fault's field `rank`.

    For the target `job 0 rank 5`, the field gets the selected rank. For the target `job 0 shard 0`, the field gets the
    rank that owns the shard.
    """
    return (
        isinstance(fault, KillRank | Hang)
        if role.part == "rank"
        else isinstance(fault, CorruptReplica) and role.part == "shard"
    )
