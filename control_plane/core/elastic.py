"""Elastic jobs: when a job continues on fewer nodes, and when it grows again (docs/design.md#elastic-jobs).

    4 nodes ── one lost ── no node within the patience ──▶ 3 nodes ── a node is ready ── agreed stop ──▶ 4 nodes
                           a node in time ──▶ 4 nodes              ── a failure, and a node is ready ──▶ 4 nodes

A job shrinks only in a recovery that lacks a node. A job that trains grows at an agreed stop, by all ready nodes
together.

Invariant: pure. A generation has between `least_node_count` and `most_node_count` nodes.
"""

from __future__ import annotations

from collections.abc import Sequence

from control_plane.core.observed.jobs import Growth, JobRecord, JobSettings
from everstep.protocol.ids import NodeId
from everstep.protocol.plan import Timeouts


def needed_count(spec: JobSettings, record: JobRecord) -> int:
    """Return the number of nodes that the next generation needs before it starts."""
    return record.reduced_count or record.member_count or spec.node_count


def next_count(spec: JobSettings, record: JobRecord, *, available_count: int) -> int:
    """Return the number of members of the next generation.

    Args:
        spec: settings of the job, with its limits of nodes and its patience.
        record: the record of this pass.
        available_count: number of the job's nodes that can take part.

    Returns:
        At least the number from `needed_count`. A larger number if more nodes are available and the job's limit permits
        them.
    """
    return max(needed_count(spec, record), min(available_count, spec.most_node_count))


def reduced_count(
    spec: JobSettings, *, promised_count: int, waited_seconds: float, has_spare: bool, timeouts: Timeouts
) -> int | None:
    """Return the smaller number of nodes with which a job continues, or None while the job still waits for a node.

    The job loop calls this function in every pass over a job that lacks a node for the next generation. All nodes that
    the job has must already have promised this generation.

    Args:
        spec: settings of the job, with its limits of nodes and its patience.
        promised_count: number of members that have promised the generation.
        waited_seconds: time for which the job has lacked a member, without time in which no control plane was active.
        has_spare: whether the fleet has a spare for the job. The fleet assigns this spare within a few passes.
        timeouts: `prepare_deadline_seconds` limits the wait for such a spare.

    Returns:
        `promised_count`, or None.
    """
    patience = spec.patience_seconds + (timeouts.prepare_deadline_seconds if has_spare else 0.0)
    may_continue = promised_count >= max(1, spec.least_node_count)
    return promised_count if may_continue and waited_seconds >= patience else None


def followed(growth: Growth | None, ready: Sequence[NodeId], now: float) -> Growth | None:
    """Return the ready nodes by which a job can grow.

    The result also contains the time since which all of these nodes are ready.

    Args:
        growth: the result of the previous pass.
        ready: nodes that the job has, that can work immediately, and that its generation does not use.
        now: Unix seconds.

    Returns:
        `growth` without a change if the agreed stop was requested or the nodes are the same. None without ready nodes.
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
        spec: settings of the job, with its limits of nodes and its patience.
        record: the record of this pass. An open incident or a suspected hang postpones the growth.
        now: Unix seconds.
        timeouts: `lease_seconds` is the shortest time for which nodes must be ready.

    Returns:
        Whether to request the agreed stop. False once the stop is requested.
    """
    growth = record.growth
    if growth is None or growth.asked_at is not None:
        return False
    if record.incident is not None or record.suspicion is not None or record.committed <= record.base_step:
        return False
    is_whole = record.member_count + len(growth.node_ids) >= spec.most_node_count
    steady_seconds = timeouts.lease_seconds
    return now - growth.since >= (steady_seconds if is_whole else max(spec.patience_seconds, steady_seconds))


def size_words(spec: JobSettings, count: int) -> str:
    """Return a clause about a generation that has fewer nodes than the job requested.

    Empty for any other generation.
    """
    return f"on {count} of {spec.node_count} nodes" if count < spec.node_count else ""


def forecast_words(spec: JobSettings) -> str:
    """Return a sentence about the sizes of an elastic job, for the plan before its start.

    Empty if the job has only one size.
    """
    words: list[str] = []
    if spec.least_node_count < spec.node_count:
        words.append(
            f"may continue on {spec.least_node_count} of {spec.node_count} nodes after {spec.patience_seconds:g} s "
            "without capacity"
        )
    if spec.most_node_count > spec.node_count:
        words.append(f"may grow to {spec.most_node_count} nodes")
    return "; ".join(words)
