"""Decides whether a job may repeat training without a person's consent.

    the base lies at most MaxRepeatedMinutes of training before the newest commit      the job continues
    OnTotalLoss is Restart                                                             the job continues
    a person accepted this base or an older one, for this recovery                     the job continues
    otherwise                                                                          the job holds its nodes and waits

Invariant: pure. A consent is valid for one recovery only: until the ranks of the next generation start.
"""

from __future__ import annotations

from control_plane.core import launch
from control_plane.core.evidence import is_silent
from control_plane.core.observed.jobs import JobObserved, JobRecord
from control_plane.core.observed.nodes import InstanceCondition
from control_plane.core.observed.spans import Bucket
from control_plane.core.observed.specs import JobSpec, OnTotalLoss, Policy
from control_plane.core.observed.steps import HolderState, LostHolder, RepeatedWork
from everstep.protocol.ids import FIRST_STEP, NodeId, Step

TRAINED = (Bucket.TRAIN, Bucket.SHORTAGE, Bucket.STALL)
"""Time in which the ranks worked on steps for the first time, slow steps included."""


def choice(
    spec: JobSpec, seen: JobObserved, record: JobRecord, base: Step, *, policy: Policy, now: float
) -> RepeatedWork | None:
    """Return the choice that a person must make before the job may restore step `base`, or None."""
    newest, after = launch.floor_of(spec, seen, record, now), launch.parent_of(seen)
    is_accepted = record.accepted_after == after and base >= record.accepted_step > -1
    if base >= newest or is_accepted or spec.on_total_loss is OnTotalLoss.RESTART:
        return None
    seconds = repeated_seconds(seen, record, newest, base)
    # Without training time in the ledger, the time since the job's start is an upper bound.
    bound = now - (record.started_at or record.created_at) if seconds is None else seconds
    if bound <= spec.max_repeated_minutes * 60:
        return None
    before = seen.record.repeat
    is_same = before is not None and (before.base_step, before.after) == (base, after)
    return RepeatedWork(
        base_step=base,
        newest_step=newest,
        after=after,
        seconds=seconds,
        since=before.since if before is not None and is_same else now,
        holders=_holders(seen, record, policy),
        wrong_steps=tuple(sorted({each.step for each in seen.checkpoints if each.is_wrong and each.step > base})),
        is_stored=any(each.step == base for each in seen.checkpoints),
        listing=seen.listing,
    )


def repeated_seconds(seen: JobObserved, record: JobRecord, newest: Step, base: Step) -> float | None:
    """Return the fraction of the training time that leads from `base` to `newest`. None without training time."""
    first = min((link.base_step for link in seen.lineage if link.generation > 0), default=FIRST_STEP)
    trained = sum(record.microseconds.get(each, 0) for each in TRAINED) / 1_000_000
    step_count = max(record.max_boundary, newest) - first
    return trained * (newest - base) / step_count if trained > 0 and step_count > 0 else None


def _holders(seen: JobObserved, record: JobRecord, policy: Policy) -> tuple[LostHolder, ...]:
    planned = () if seen.plan is None else tuple(node.node_id for node in seen.plan.nodes)
    gone = {exclusion.node_id for exclusion in record.exclusions}

    def state(node_id: NodeId) -> HolderState:
        node = seen.nodes.get(node_id)
        if node is not None and node.instance is InstanceCondition.ENDED:
            return HolderState.ENDED
        if node_id in gone or node_id not in seen.assigned:
            return HolderState.LEFT
        return HolderState.SILENT if node is None or is_silent(node, policy.timeouts) else HolderState.EMPTY

    return tuple(LostHolder(node_id=node_id, state=state(node_id)) for node_id in planned)
