"""Applies an UpdateTrainingJob request to a job, and validates the result like a new job (`api.admission`). Pure.

applies immediately               Priority, Preemptible, RetryStrategy, StoppingCondition, ElasticConfig, Tags
applies with the next generation  Protection, CheckpointConfig: part of a generation's plan, which never changes
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from pydantic.alias_generators import to_pascal

from control_plane.api.admission import contradictions
from control_plane.api.errors import InvalidRequest
from control_plane.api.schemas.common import (
    MIN_CHECKPOINT_AGE_SECONDS,
    MIN_CHECKPOINT_OVERHEAD,
    MIN_COST_USD,
    Request,
)
from control_plane.api.schemas.revisions import UpdateTrainingJobRequest
from control_plane.api.spec_fields import settings_of
from control_plane.core import elastic, slot_memory
from control_plane.core.states import JobState
from control_plane.db.jobs import SavedJob, SavedJobSpec
from control_plane.db.revisions import Change
from everstep.protocol import constraints

_WITHOUT_PLAN = frozenset({JobState.QUEUED, JobState.ALLOCATING, JobState.PREPARING})
"""States without a plan in use, in which every change applies immediately."""
_PARTS_OF_PLAN: Final = frozenset(
    {
        "copies",
        "max_slowdown",
        "third_slot",
        "checkpoint_every_steps",
        "checkpoint_interval_seconds",
        "checkpoint_max_overhead",
        "checkpoint_max_bytes_per_second",
    }
)
"""Attributes in a generation's plan, whose changes apply with the next generation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RevisionContext:
    """Facts about the job's fleet, nodes and project that limit how the job may change."""

    largest_shard_bytes: int
    """0 before the first report."""
    node_memory_bytes: int | None
    """Memory for slots on the fleet's smallest node, or None."""
    has_price: bool
    """Whether the fleet has a price, which a cost limit requires."""
    limits: elastic.NodeLimits
    """Limits of the fleet and the project."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Revised:
    """A job's settings after an update, and the changes."""

    spec: SavedJobSpec
    priority: int
    tags: Mapping[str, str]
    changes: tuple[Change, ...]
    """Empty if the update changes nothing."""


@dataclass(frozen=True, slots=True)
class _Wish:
    field: str
    attribute: str
    """Attribute of `SavedJobSpec`."""
    value: Any
    needs_generation: bool = False


def revised(request: UpdateTrainingJobRequest, job: SavedJob, around: RevisionContext) -> Revised:
    """Return the job after an update.

    Raises InvalidRequest with one field error per error.
    """
    wishes = [wish for wish in _wishes(request) if getattr(job.spec, wish.attribute) != wish.value]
    spec = replace(job.spec, **{wish.attribute: wish.value for wish in wishes})
    wrong = list(_wrong(job, spec, around))
    if wrong:
        raise InvalidRequest(
            "The job cannot be changed with this request: " + "; ".join(map(": ".join, wrong)), fields=wrong
        )
    has_plan = JobState(job.state) not in _WITHOUT_PLAN
    changes = [
        Change(
            field=wish.field,
            before=_text(getattr(job.spec, wish.attribute)),
            after=_text(wish.value),
            needs_generation=wish.needs_generation and has_plan,
        )
        for wish in wishes
    ]
    priority = job.priority if request.priority is None else request.priority
    tags = dict(job.tags) if request.tags is None else request.tags
    if priority != job.priority:
        changes.append(Change(field="Priority", before=str(job.priority), after=str(priority), needs_generation=False))
    if tags != job.tags:
        changes.append(Change(field="Tags", before=_text(dict(job.tags)), after=_text(tags), needs_generation=False))
    return Revised(spec=spec, priority=priority, tags=tags, changes=tuple(changes))


def _wishes(request: UpdateTrainingJobRequest) -> Iterator[_Wish]:
    if request.preemptible is not None:
        yield _Wish("Preemptible", "preemptible", request.preemptible)
    for group in ("retry_strategy", "stopping_condition", "elastic_config", "protection", "checkpoint_config"):
        config: Request | None = getattr(request, group)
        if config is None:
            continue
        for field, attribute, value in settings_of(config):
            if field in config.model_fields_set:
                path = f"{to_pascal(group)}.{to_pascal(field)}"
                yield _Wish(path, attribute, value, needs_generation=attribute in _PARTS_OF_PLAN)


def _wrong(job: SavedJob, spec: SavedJobSpec, around: RevisionContext) -> Iterator[tuple[str, str]]:
    limits = (
        ("StoppingCondition.MaxCostUsd", spec.max_cost_usd, MIN_COST_USD),
        ("CheckpointConfig.MaxAgeInSeconds", spec.checkpoint_max_age_seconds, MIN_CHECKPOINT_AGE_SECONDS),
        ("CheckpointConfig.MaxOverhead", spec.checkpoint_max_overhead, MIN_CHECKPOINT_OVERHEAD),
    )
    for field, limit, minimum in limits:
        if limit is not None and limit < minimum:
            yield field, f"{constraints.at_least(minimum, limit)}; 0 removes the limit"
    is_parity_kept = spec.parity_group_size == job.spec.parity_group_size
    yield from contradictions(spec if is_parity_kept else replace(spec, parity_group_size=None))
    if not is_parity_kept:
        message = "cannot change after creation; create a new job with InitialCheckpoint to continue this job"
        yield "Protection.ParityGroupSize", message
    if (spec.min_node_count, spec.max_node_count) != (job.spec.min_node_count, job.spec.max_node_count):
        # An unchanged MaxNodeCount stays valid, even if the Auto Scaling group's MaxSize or the quota is smaller now.
        most = spec.max_node_count if spec.max_node_count != job.spec.max_node_count else None
        yield from elastic.contradictions(spec.node_count, spec.min_node_count, most, around.limits)
    if job.spec.third_slot and not spec.third_slot and job.generation:
        yield (
            "CheckpointConfig.ThirdSlot",
            "cannot be removed after the job has run, because it may contain committed steps",
        )
    if spec.max_cost_usd is not None and spec.max_cost_usd != job.spec.max_cost_usd and not around.has_price:
        yield "StoppingCondition.MaxCostUsd", "needs the fleet's price; set PriceUsdPerHour with UpdateFleet"
    needed = slot_memory.needed_bytes(spec, around.largest_shard_bytes)
    is_more = slot_memory.memory_ratio(spec) > slot_memory.memory_ratio(job.spec)
    if is_more and around.node_memory_bytes is not None and needed > around.node_memory_bytes:
        field = "Protection.Copies" if spec.copies > job.spec.copies else "CheckpointConfig.ThirdSlot"
        kind = "slots" if spec.parity_group_size is None else "slots of shards and shares"
        size = f"{slot_memory.slots_per_node(spec)} {kind} of {around.largest_shard_bytes:,} bytes"
        message = (
            f"{size} need {needed:,} bytes of host memory per node; the smallest node has {around.node_memory_bytes:,}"
        )
        yield field, message


def _text(value: Any) -> str | None:
    return None if value is None else value if isinstance(value, str) else json.dumps(value, sort_keys=True)
