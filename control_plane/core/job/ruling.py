"""The response to repeated failures: retry, replace the node, restore an older step, or give the job up."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from control_plane.core import breakers, launch
from control_plane.core.actions import EventDraft
from control_plane.core.breakers import BreakerCourse
from control_plane.core.job.sources import restorable_step, restorable_step_without, step_to_keep
from control_plane.core.job.view import JobView, with_record
from control_plane.core.observed.incidents import FailureRecord, Repeated, Tries
from control_plane.core.observed.jobs import Exclusion, Trial
from control_plane.core.observed.nodes import InstanceCondition, Remedy
from control_plane.core.observed.steps import RefusedSource
from everstep.protocol.ids import FIRST_STEP


def with_ruling(view: JobView) -> tuple[JobView, Repeated | None]:
    """Apply the decision of `core.breakers`. The second value is the reason for which the job fails, or None."""
    view = _without_explained_losses(view)
    record, spec = view.record, view.spec
    roll = launch.call_roll(spec, view.seen, record, view.policy)
    if roll.late or roll.unreachable or not record.failures or record.failures[-1].generation != record.generation:
        return view, None
    last = record.failures[-1]
    refused = _refused_state(view, last)
    older = restorable_step(view, replace(record, refused=(*record.refused, *refused)), roll)
    without, floor = restorable_step_without(view, last.node_id), step_to_keep(view, roll)
    has_spare = view.seen.spare_count > 0 and (without >= floor or without > FIRST_STEP)
    ruling = breakers.rule(
        record.failures, record.trials, spec, has_spare=has_spare, older_base=older, is_sole_holder=without < floor
    )
    match ruling.course:
        case BreakerCourse.AGAIN:
            return view, None
        case BreakerCourse.GIVE_UP:
            return view, ruling.why
        case BreakerCourse.OTHER_NODE:
            assert last.node_id is not None  # `rule` chooses OTHER_NODE only after a failure of a known node
            trial = Trial(kind="node", failure=last, node_id=last.node_id)
        case BreakerCourse.OLDER_STATE:
            trial = Trial(kind="state", failure=last)
            view = with_record(view, refused=tuple(dict.fromkeys([*record.refused, *refused])))
    assert ruling.why is not None  # only AGAIN has no reason
    short = msgspec.structs.replace(ruling.why, failure=replace(last, last_lines=""))
    tries = Tries(change=breakers.change_of(trial), because=short)
    if trial.node_id is not None:
        exclusion = Exclusion(node_id=trial.node_id, evidence=tries, may_terminate=False, remedy=Remedy.RELEASE)
        view = with_record(view, exclusions=(*record.exclusions, exclusion))
    view = with_record(view, trials=(*record.trials, trial))
    if (incident := view.record.incident) is not None:
        view = with_record(view, incident=replace(incident, decision=tries))
    return replace(view, events=(*view.events, EventDraft(type="OneThingChanged", message=tries))), None


def _without_explained_losses(view: JobView) -> JobView:
    ended = {node_id for node_id, node in view.nodes.items() if node.instance is InstanceCondition.ENDED}
    failures = tuple(each for each in view.record.failures if not (each.is_node_loss and each.node_id in ended))
    return with_record(view, failures=failures)


def _refused_state(view: JobView, failure: FailureRecord) -> tuple[RefusedSource, ...]:
    plan = view.seen.plan
    if plan is None or plan.base_step != failure.base_step:
        return ()
    return tuple(
        RefusedSource(rank=rank, origin_generation=origin, step=plan.base_step, is_object=is_object)
        for rank, sources in plan.base_shards
        for origin in sorted({source.origin_generation for source in sources})
        for is_object in (False, True)
    )
