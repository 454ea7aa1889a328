"""Elastic jobs: when a job starts or continues on fewer nodes, and when it grows (docs/design/elastic-jobs.md).

    4 nodes ── one lost ── no node within the patience ──▶ 3 nodes ── a node is ready ── agreed stop ──▶ 4 nodes
                           a node in time ──▶ 4 nodes              ── a failure, and a node is ready ──▶ 4 nodes
            ── another job needs 2 of them ── agreed stop ──▶ 2 nodes

Invariant: pure. A generation has between `least_node_count` and `most_node_count` nodes. After a user has changed these
limits, the job keeps its current nodes until an agreed stop.
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
    """Maximum number of nodes of the fleet that all jobs of `project` together may hold, or None."""


def contradictions(
    node_count: int, least: int | None, most: int | None, limits: NodeLimits
) -> Iterator[tuple[str, str]]:
    """Yield the errors of an ElasticConfig: the name of the field, and the message."""
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
    """Return the number of nodes that the next generation needs, within the current limits."""
    return min(max(count_before(spec, record), spec.least_node_count), spec.most_node_count)


def count_before(spec: JobSettings, record: JobRecord) -> int:
    """Return the number of nodes on which the control plane last decided to run the job, whatever the limits are."""
    return record.reduced_count or record.member_count or spec.node_count


def smaller_from(spec: JobSettings, record: JobRecord) -> float | None:
    """Return the Unix time from which a job that waits for its first nodes may start on fewer, or None."""
    since = record.vacant_since
    if record.state not in (JobState.QUEUED, JobState.ALLOCATING) or since is None:
        return None
    if spec.least_node_count >= spec.node_count:
        return None
    # The patience starts again after a period without a control plane, in which no instance could be launched.
    return max(since, since if record.unwatched is None else record.unwatched[1]) + spec.patience_seconds


def is_settled(record: JobRecord) -> bool:
    """Return whether the job trains, under Everstep's control, so that a stop now would lose almost no work."""
    return (
        record.state is JobState.RUNNING
        and not record.taken_over_by
        and record.incident is None
        and record.committed > record.base_step
    )


def next_count(spec: JobSettings, record: JobRecord, *, available_count: int, reporting_count: int) -> int:
    """Return the number of members of the next generation. `available_count` excludes nodes that the job gave up."""
    # Members beyond a lowered MaxNodeCount take part, because they may hold the only copies of a shard. The job returns
    # them at an agreed stop.
    return max(
        needed_count(spec, record),
        min(reporting_count, spec.most_node_count),
        min(available_count, count_before(spec, record)),
    )


def reduced_count(
    spec: JobSettings, *, promised_count: int, waited_seconds: float, has_spare: bool, timeouts: Timeouts
) -> int | None:
    """Return the smaller number of nodes with which a job continues, or None while the job still waits for a node.

    `waited_seconds` excludes time without a control plane.
    """
    # The fleet loop assigns a spare within seconds.
    patience = spec.patience_seconds + (timeouts.prepare_deadline_seconds if has_spare else 0.0)
    may_continue = promised_count >= max(1, spec.least_node_count)
    return promised_count if may_continue and waited_seconds >= patience else None


def followed(growth: Growth | None, ready: Sequence[NodeId], now: float) -> Growth | None:
    """Return the ready nodes by which a job can grow. `growth`, the previous result, stays once the ranks must stop."""
    if growth is not None and (growth.asked_at is not None or growth.node_ids == tuple(sorted(ready))):
        return growth
    return Growth(node_ids=tuple(sorted(ready)), since=now) if ready else None


def is_due(spec: JobSettings, record: JobRecord, now: float, timeouts: Timeouts) -> bool:
    """Return whether a running job should now request the stop after which it continues on more nodes."""
    growth = record.growth
    if growth is None or growth.asked_at is not None:
        return False
    if record.incident is not None or record.suspicion is not None or record.committed <= record.base_step:
        return False
    # One stop for several nodes costs less than several stops, so the job waits for further nodes. The lease keeps an
    # unstable node from causing a stop.
    is_whole = record.member_count + len(growth.node_ids) >= spec.most_node_count
    steady_seconds = timeouts.lease_seconds
    return now - growth.since >= (steady_seconds if is_whole else max(spec.patience_seconds, steady_seconds))


def kept_count(spec: JobSettings, record: JobRecord, wanted: int | None) -> int:
    """Return the number of nodes that a running job keeps, at most `wanted` (None: as many as now)."""
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
    """Return the `count` members that a job returns to its fleet: first members whose shards all remain elsewhere.

    `departing` members come first. They come last if another job needs the nodes (`is_for_other`) and cannot use these.
    """
    chosen: list[NodeId] = []
    members = [node.node_id for node in reversed(plan.nodes)]
    candidates = sorted(members, key=lambda node_id: (node_id in departing) is is_for_other)
    for node_id in candidates:
        if len(chosen) < count and is_held_elsewhere(plan, reports, (*chosen, node_id)):
            chosen.append(node_id)
    others = [node_id for node_id in candidates if node_id not in chosen]
    return (*chosen, *others[: count - len(chosen)])
