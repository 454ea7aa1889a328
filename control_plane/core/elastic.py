"""Elastic jobs: when a job starts or continues on fewer nodes, and when it grows (docs/design/elastic-jobs.md).

    4 nodes ── one lost ── no node within the patience ──▶ 3 nodes ── a node is ready ── agreed stop ──▶ 4 nodes
                           a node in time ──▶ 4 nodes              ── a failure, and a node is ready ──▶ 4 nodes
            ── another job needs 2 of them ── agreed stop ──▶ 2 nodes

A job that lacks nodes waits for them for at most `patience_seconds`, and then starts or continues on fewer nodes. A job
that trains changes its number of nodes only at an agreed stop, a step after which all ranks stop together. At this
stop, it returns nodes to its fleet, or grows by all ready nodes together.

Invariant: pure. A generation has between `least_node_count` and `most_node_count` nodes. After a user has changed these
limits, the job keeps its present nodes until an agreed stop.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from control_plane.core.moves import is_held_elsewhere
from control_plane.core.observed.jobs import Growth, JobRecord
from control_plane.core.observed.specs import JobSettings
from control_plane.core.states import JobState
from everstep.protocol.agent_messages import MemberReport
from everstep.protocol.ids import NodeId
from everstep.protocol.plan import GenerationPlan, Timeouts


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLimits:
    """The limits that a job's fleet and project set for its number of nodes."""

    group: str
    fleet: str
    max_size: int
    project: str = ""
    quota: int | None = None
    """Maximum number of nodes of the fleet that all jobs of `project` together may hold. None means no limit."""


def contradictions(
    node_count: int, least: int | None, most: int | None, limits: NodeLimits
) -> Iterator[tuple[str, str]]:
    """Yield the errors of an ElasticConfig: the name of the field, and the message.

    Args:
        node_count: NodeCount of the job.
        least: MinNodeCount, or None if the job has none.
        most: MaxNodeCount, or None if the job has none.
        limits: the numbers of nodes that the job's fleet and project permit.
    """
    if least is not None and least > node_count:
        yield (
            "ElasticConfig.MinNodeCount",
            f"{least} nodes; it must be at most NodeCount, which is {node_count}",
        )
    field = "ElasticConfig.MaxNodeCount"
    if most is None:
        return
    if most < node_count:
        yield field, f"{most} nodes; it must be at least NodeCount, which is {node_count}"
    if most > limits.max_size:
        yield field, f"{most} nodes; the group {limits.group} of the fleet {limits.fleet} has MaxSize {limits.max_size}"
    if limits.quota is not None and most > limits.quota:
        yield field, f"{most} nodes; jobs of the project {limits.project} may hold {limits.quota} nodes of a fleet"


def needed_count(spec: JobSettings, record: JobRecord) -> int:
    """Return the number of nodes that the next generation needs before it starts.

    The result obeys limits that a user has changed since the newest generation.
    """
    return min(max(count_before(spec, record), spec.least_node_count), spec.most_node_count)


def count_before(spec: JobSettings, record: JobRecord) -> int:
    """Return the number of nodes on which the control plane last decided to run the job.

    The function ignores limits that a user has changed since that decision.
    """
    return record.reduced_count or record.member_count or spec.node_count


def smaller_from(spec: JobSettings, record: JobRecord) -> float | None:
    """Return the time from which a job that waits for its first nodes may start on fewer than NodeCount nodes.

    The job waits for `patience_seconds` for all of its nodes. This time starts again after a period without a control
    plane, because no instance could be launched in that period.

    Args:
        spec: settings of the job: its limits of nodes, and `patience_seconds`, its wait for missing nodes.
        record: the record of a job in any state.

    Returns:
        Unix seconds. None if the job needs all NodeCount nodes, does not wait, or is paused by a person.
    """
    since = record.vacant_since
    if record.state not in (JobState.QUEUED, JobState.ALLOCATING) or since is None:
        return None
    if spec.least_node_count >= spec.node_count:
        return None
    return max(since, since if record.unwatched is None else record.unwatched[1]) + spec.patience_seconds


def is_settled(record: JobRecord) -> bool:
    """Return whether a job trains, and would lose almost no work if all its ranks stopped at the same step now.

    The job has no open incident, and its newest generation has committed a new step. If a person has taken the job over
    (TakeOverTrainingJob), the result is False, because Everstep must not stop the job's ranks.
    """
    return (
        record.state is JobState.RUNNING
        and not record.taken_over_by
        and record.incident is None
        and record.committed > record.base_step
    )


def next_count(spec: JobSettings, record: JobRecord, *, available_count: int, reporting_count: int) -> int:
    """Return the number of members with which the job prepares its next generation.

    If a user lowered MaxNodeCount, the members beyond it also take part, because they may hold the only copies of a
    shard. The job returns these members later, when all ranks have stopped at an agreed step.

    Args:
        spec: settings of the job: its limits of nodes, and `patience_seconds`, its wait for missing nodes.
        record: the job's record, with the numbers of nodes that earlier decisions stored.
        available_count: number of the job's nodes, without nodes that the job has excluded.
        reporting_count: number of the available nodes whose agents are not silent.

    Returns:
        The largest of three numbers: the nodes that the job needs (`needed_count`); the nodes whose agents are not
        silent, up to MaxNodeCount; and the available nodes, up to the job's number of nodes so far (`count_before`).
    """
    return max(
        needed_count(spec, record),
        min(reporting_count, spec.most_node_count),
        min(available_count, count_before(spec, record)),
    )


def reduced_count(
    spec: JobSettings, *, promised_count: int, waited_seconds: float, has_spare: bool, timeouts: Timeouts
) -> int | None:
    """Return the smaller number of nodes with which a job continues, or None while the job still waits for a node.

    The job loop calls this function whenever it decides about a job that lacks a node for the next generation. All
    nodes that the job has must already have promised to join this generation.

    Args:
        spec: settings of the job: its limits of nodes, and `patience_seconds`, its wait for missing nodes.
        promised_count: number of members that have promised to join the next generation.
        waited_seconds: time for which the job has lacked a member, without time in which no control plane was active.
        has_spare: whether the fleet has a spare for the job, which the fleet loop will assign within seconds.
        timeouts: `prepare_deadline_seconds` limits the wait for such a spare.

    Returns:
        `promised_count`, or None.
    """
    patience = spec.patience_seconds + (timeouts.prepare_deadline_seconds if has_spare else 0.0)
    may_continue = promised_count >= max(1, spec.least_node_count)
    return promised_count if may_continue and waited_seconds >= patience else None


def followed(growth: Growth | None, ready: Sequence[NodeId], now: float) -> Growth | None:
    """Return the ready nodes by which a job can grow, and the time since which all of them are ready.

    The job loop calls this function for each running job, whenever it decides about the job.

    Args:
        growth: the result of the previous call, or None.
        ready: nodes that the job has, that can work immediately, and that its generation does not use.
        now: Unix seconds.

    Returns:
        `growth` itself if the ranks are already asked to stop, or if the same nodes are ready. Otherwise a new object
        whose time is `now`, or None if no node is ready.
    """
    if growth is not None and (growth.asked_at is not None or growth.node_ids == tuple(sorted(ready))):
        return growth
    return Growth(node_ids=tuple(sorted(ready)), since=now) if ready else None


def is_due(spec: JobSettings, record: JobRecord, now: float, timeouts: Timeouts) -> bool:
    """Return whether a running job should now stop in order to continue on more nodes.

    One stop for several nodes costs less than several stops. The job therefore waits for further missing nodes, for at
    most `patience_seconds`. All nodes must have been ready for `lease_seconds`, so that an unstable node causes no
    stop.

    Args:
        spec: settings of the job: its limits of nodes, and `patience_seconds`, its wait for missing nodes.
        record: the job's record. An open incident or a suspected hang postpones the growth.
        now: Unix seconds.
        timeouts: `lease_seconds` is the shortest time for which nodes must be ready.

    Returns:
        Whether to request now that all ranks stop at one step. False once the stop is requested.
    """
    growth = record.growth
    if growth is None or growth.asked_at is not None:
        return False
    if record.incident is not None or record.suspicion is not None or record.committed <= record.base_step:
        return False
    is_whole = record.member_count + len(growth.node_ids) >= spec.most_node_count
    steady_seconds = timeouts.lease_seconds
    return now - growth.since >= (steady_seconds if is_whole else max(spec.patience_seconds, steady_seconds))


def kept_count(spec: JobSettings, record: JobRecord, wanted: int | None) -> int:
    """Return the number of nodes with which a running job should continue.

    Args:
        spec: settings of the job. A user may have lowered its MaxNodeCount.
        record: the job's record, with the current number of nodes.
        wanted: the number of nodes that the fleet's queue leaves to the job. None if the job may keep its nodes.

    Returns:
        At most the current number of nodes. At least the job's minimum, unless the current number is already smaller.
        If the job must not stop now, the result is the current number.
    """
    if not is_settled(record) or record.suspicion is not None:
        return record.member_count
    most = spec.most_node_count if wanted is None else min(wanted, spec.most_node_count)
    return min(record.member_count, max(most, spec.least_node_count))


def returned_nodes(
    plan: GenerationPlan,
    reports: Mapping[NodeId, MemberReport],
    count: int,
    *,
    departing: Collection[NodeId] = (),
    is_for_other: bool = False,
) -> tuple[NodeId, ...]:
    """Return the members that a job returns to its fleet, in the order of their selection.

    If the remaining members hold or can rebuild every shard, the job need not wait for a checkpoint. The function
    therefore first selects members whose shards all remain in this way, and other members only if these are too few.
    Within both sets, members in `departing` are first (or last, see `is_for_other`). Then a higher GROUP_RANK is first.

    Args:
        plan: the plan of the running generation.
        reports: the members' newest reports, with the holders of each shard.
        count: number of nodes to return, less than the number of members.
        departing: members that the job should give up anyway. Their return now saves another stop of the ranks.
        is_for_other: whether another job waits for the nodes. Departing members are then last in both sets, because
            that job cannot use them: the fleet holds, reboots or replaces them.

    Returns:
        `count` members.
    """
    chosen: list[NodeId] = []
    members = [node.node_id for node in reversed(plan.nodes)]
    candidates = sorted(members, key=lambda node_id: (node_id in departing) is is_for_other)
    for node_id in candidates:
        if len(chosen) < count and is_held_elsewhere(plan, reports, (*chosen, node_id)):
            chosen.append(node_id)
    others = [node_id for node_id in candidates if node_id not in chosen]
    return (*chosen, *others[: count - len(chosen)])
