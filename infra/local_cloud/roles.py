"""Targets by role: who is meant is settled when a fault strikes, by who trains what then.

    job 0 node 2           the third node of the first job that trains
    job 1 rank 5           the node where the sixth rank of the second one runs
    last job shard 0       the holders of a shard of the job that was meant last

Numbers begin at 0 and are counted around. Jobs come in the order of their names, nodes in that of GROUP_RANK, shards by
the rank whose they are. Only jobs and nodes whose instances run count, and only shards whose holders all do. A job that
was meant last and trains no more gives way to job 0.

Knows nothing of clusters and of time: `Aim` is told who trains and what runs.
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
"""The status of a job that has been launched and has not ended; whether nodes of it run is another question."""
_ROLE: Final = re.compile(r"(?:job (?P<job>\d{1,9})|last job) (?P<part>node|rank|shard) (?P<number>\d{1,9})", re.ASCII)
_INSTANCE: Final = re.compile(r"(?:i-[0-9a-z]+|\d+)?", re.ASCII)
_FORMS: Final = (
    'write an instance id, a number ("2": the third instance that runs), or a role: "job 0 node 2", '
    '"job 0 rank 5", "last job shard 1"'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """Whom a target means."""

    job: int | None
    """The how many-th of those that train; None: the one that was meant last."""
    part: Part
    number: int
    """The how many-th node, rank or shard of the job."""

    def __str__(self) -> str:
        return f"{'last job' if self.job is None else f'job {self.job}'} {self.part} {self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Who holds one rank's shard."""

    rank: int
    holders: tuple[str, ...]
    """Instance ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    """A job that trains, as far as roles ask."""

    name: str
    nodes: tuple[str, ...]
    """Instance ids by GROUP_RANK; some may have ended."""
    ranks_per_node: int
    committed_step: int
    shards: tuple[Shard, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """Who a role is now."""

    job: str
    instances: tuple[str, ...]
    """One; of a shard all its holders."""
    rank: int | None
    """The rank that was named, or the one whose shard it is; None for a node."""


def parse(target: str) -> Role | None:
    """Read a target.

    Args:
        target: of a fault.

    Returns:
        The role that it names; None for an instance id, a number or nothing.

    Raises:
        FaultRefused: it is none of these; says what can be written.
    """
    if _INSTANCE.fullmatch(target):
        return None
    found = _ROLE.fullmatch(target)
    if found is None:
        raise FaultRefused(f"{target!r} is no target: {_FORMS}")
    return Role(
        job=None if found["job"] is None else int(found["job"]),
        part=cast("Part", found["part"]),
        number=int(found["number"]),
    )


def check(fault: AnyFault) -> None:
    """Read a fault's target, and see whether the fault can be done to it.

    Args:
        fault: as a script or a command line has it.

    Raises:
        FaultRefused: it is no target, or a rank was said twice; says what to write instead.
    """
    role = parse(_target(fault))
    if role is not None and _takes_rank(fault, role) and getattr(fault, "rank", None) is not None:
        raise FaultRefused(f"{str(role)!r} says which rank already: leave `rank` out")


def training_job(described: Mapping[str, Any], protection: Mapping[str, Any]) -> TrainingJob:
    """Read who works for a job from two answers of the API.

    Args:
        described: of DescribeTrainingJob.
        protection: of DescribeProtection.

    Returns:
        What roles ask of it.
    """
    shards = sorted(protection["Shards"], key=lambda shard: int(shard["Rank"]))
    return TrainingJob(
        name=described["TrainingJobName"],
        nodes=tuple(described["NodeIds"]),
        ranks_per_node=described["RanksPerNode"],
        committed_step=described["CommittedStep"],
        shards=tuple(
            Shard(rank=shard["Rank"], holders=tuple(holder["NodeId"] for holder in shard["Holders"]))
            for shard in shards
        ),
    )


def with_nodes(jobs: Collection[TrainingJob], running: Collection[str]) -> list[TrainingJob]:
    """Return the jobs that a role can mean: those of which a node runs, by name.

    Args:
        jobs: that train.
        running: instance ids.

    Returns:
        Some of the jobs.
    """
    return sorted((job for job in jobs if any(node in running for node in job.nodes)), key=lambda job: job.name)


def resolve(role: Role, jobs: Collection[TrainingJob], running: Collection[str], last_job: str = "") -> Hit:
    """Return who a role is.

    Args:
        role: who is meant.
        jobs: that train.
        running: instance ids.
        last_job: the name of the one that was meant last.

    Returns:
        The job, and instances of it that run.

    Raises:
        FaultRefused: nobody is that now; says why.
    """
    named = with_nodes(jobs, running)
    if not named:
        raise FaultRefused(f"{role}: no job that trains has a node that runs")
    job = next((job for job in named if role.job is None and job.name == last_job), named[(role.job or 0) % len(named)])
    match role.part:
        case "node":
            nodes = [node for node in job.nodes if node in running]
            return Hit(job=job.name, instances=(nodes[role.number % len(nodes)],), rank=None)
        case "rank":
            rank = role.number % (len(job.nodes) * job.ranks_per_node)
            node = job.nodes[rank // job.ranks_per_node]
            if node not in running:
                raise FaultRefused(f"{role}: {node}, where rank {rank} of {job.name} was, does not run")
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
    """Settles whom faults are meant for, and remembers which job was meant last.

    Args:
        jobs: returns those that train; raises `NotUp` while nobody can say, and then what it returned before counts.
        running: returns the ids of the instances that run.
    """

    def __init__(self, jobs: Callable[[], Collection[TrainingJob]], running: Callable[[], Collection[str]]) -> None:
        self._jobs = jobs
        self._running = running
        self._seen: Collection[TrainingJob] = ()
        self._last_job = ""

    def __call__(self, fault: AnyFault) -> list[AnyFault]:
        """Return a fault as it is to be injected now.

        Args:
            fault: its target may be a role.

        Returns:
            Itself; or where its target is a role one for each instance that is meant, with its id.

        Raises:
            FaultRefused: nobody has this role now, or it is no target.
        """
        check(fault)
        role = parse(_target(fault))
        if role is None:
            return [fault]
        try:
            self._seen = self._jobs()
        except NotUp:
            if not self._seen:
                raise FaultRefused(f"{role}: no control plane says who trains") from None
        hit = resolve(role, self._seen, self._running(), self._last_job)
        self._last_job = hit.job
        named = {"rank": hit.rank} if _takes_rank(fault, role) else {}
        return [msgspec.structs.replace(fault, target=instance, **named) for instance in hit.instances]


def _target(fault: AnyFault) -> str:
    return str(getattr(fault, "target", ""))


def _takes_rank(fault: AnyFault, role: Role) -> bool:
    """Say whether a role also tells which rank a fault is for: the one that runs there, or the one whose copies the holders have."""
    return (
        isinstance(fault, KillRank | Hang)
        if role.part == "rank"
        else isinstance(fault, CorruptReplica) and role.part == "shard"
    )
