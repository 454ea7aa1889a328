"""The progress that members report, and its effect on an open incident."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from operator import attrgetter

from msgspec import structs

from control_plane.core import (
    accounting,
    breakers,
    checkpoints,
    hangs,
    incidents,
    launch,
    protection,
    repeated_steps,
)
from control_plane.core.actions import EventDraft
from control_plane.core.evidence import first_passed_at, is_silent, passed_at
from control_plane.core.incidents import incident_id
from control_plane.core.job.view import JobView, highest, passed_by_all, reached, with_record
from control_plane.core.observed.facts import FailedAlike
from control_plane.core.observed.jobs import MAX_NAMED_OUTPUTS, Trial, UnstoredOutputs
from control_plane.core.observed.nodes import Cause, Implication, Remedy
from control_plane.core.observed.reasons import OutputsLost, ReplacedOptions
from control_plane.core.states import IncidentEvent, IncidentState
from everstep.protocol.agent_messages import ExitClass, MemberReport, OutputCause, OutputFailure
from everstep.protocol.ids import Generation, Rank, Step
from everstep.protocol.options import KeptOption

MAX_OMITTED = 10_000_000
"""Largest number of outputs that an agent can count without names. A larger claim is false."""
SHOWN_OUTPUTS = 5


def with_progress(view: JobView) -> JobView:
    """Return a copy of `view` in which the job's record has the reported progress, and its open incident is updated."""
    record, plan = view.record, view.plan
    coordinator = view.reports.get(plan.coordinator)
    status = coordinator.round if coordinator is not None else None
    boundary = reached(view)
    # All ranks have finished a committed step. A later one, such as after a restored backup, counts once all members
    # have promised to join the next generation.
    committed = min(boundary, launch.committed_of(view.spec, view.seen, record, view.now))
    proposed, committed_at = record.proposed, record.committed_at
    if status is not None and status.committed >= committed:
        proposed, committed_at = status.proposed, status.committed_at_seconds or committed_at
    is_dated = boundary == record.boundary and record.boundary_at is not None
    boundary_at = record.boundary_at if is_dated else passed_at(view.reports, boundary)
    incident = record.incident
    if incident is not None and incident.state is IncidentState.RESTORING and _trains_again(view):
        first = Step(plan.base_step + 1)
        after = first, first_passed_at(view.reports, plan.base_step)
        at = incidents.moment_of(
            first, (plan.base_step, None), after, earliest=incident.replaced_at or incident.opened_at, now=view.now
        )
        incident = incidents.moved(incident, IncidentEvent.TRAINING_AGAIN, at)
    if incident is not None and incident.state is IncidentState.REWORKING and boundary >= incident.reached_step:
        before, after = (record.boundary, record.boundary_at), (boundary, boundary_at)
        at = incidents.moment_of(
            incident.reached_step, before, after, earliest=incident.restored_at or incident.opened_at, now=view.now
        )
        incident = incidents.moved(incident, IncidentEvent.CAUGHT_UP, at)
    stepped_at = record.stepped_at
    if stepped_at is None and boundary > plan.base_step:
        base_passed_at = first_passed_at(view.reports, plan.base_step)
        stepped_at = view.now if base_passed_at is None else max(min(base_passed_at, view.now), record.created_at)
        if record.incident is None and not accounting.is_stepping(record):
            view = replace(view, record=accounting.recharge_first_step(record, stepped_at))
        if kept := kept_options(view.reports.values()):
            event = EventDraft(type="OptionsKept", message=ReplacedOptions(options=kept))
            view = replace(view, events=(*view.events, event))
    is_safe = status is not None and status.committed > plan.base_step
    passed = passed_by_all(view)
    passed_trials = breakers.passed(record.trials, plan.generation, passed)
    view = _with_trial_results(view, passed_trials)
    view = with_record(
        view,
        trials=tuple(trial for trial in record.trials if trial not in passed_trials),
        failures=breakers.still_ahead(record.failures, plan.generation, passed),
        boundary=boundary,
        boundary_at=boundary_at,
        stepped_at=stepped_at,
        max_boundary=highest(view, boundary),
        target=max((report.target for report in view.reports.values() if report.target > 0), default=record.target),
        committed=committed,
        proposed=proposed,
        committed_at=committed_at,
        incident=incident,
        refused=() if is_safe else record.refused,
        failed_reads=() if is_safe else record.failed_reads,
        pace=hangs.learned(record.pace, plan.world_size, view.reports),
        checkpoints=record.checkpoints if status is None else status.checkpoints,
        uploading=checkpoints.uploading(plan.generation, view.reports),
        upload_seconds=checkpoints.upload_seconds(view.reports) or record.upload_seconds,
    )
    states, differences = repeated_steps.followed(record.states, plan, view.reports)
    view = with_record(replace(view, events=(*view.events, *differences)), states=states)
    silent = frozenset(each.node_id for each in view.nodes.values() if is_silent(each, view.policy.timeouts))
    watched = protection.with_watch(
        view.now,
        view.record,
        view.reports,
        silent=silent,
        is_looking=status is not None and not status.finished and plan.coordinator not in silent,
        timeouts=view.policy.timeouts,
    )
    view = replace(view, record=watched, events=(*view.events, *protection.events(view.seen.record, watched)))
    return with_unstored_outputs(view)


def kept_options(reports: Iterable[MemberReport]) -> tuple[KeptOption, ...]:
    """Return the options that the restored step replaced, as the lowest reporting rank names them."""
    ranks = sorted((each for report in reports for each in report.ranks), key=attrgetter("rank"))
    return next((each.kept_options for each in ranks if each.kept_options), ())


def with_unstored_outputs(view: JobView) -> JobView:
    """Record the output files that the agents could not store in S3, also of ended generations, with an event."""
    members = [
        node.member
        for _, node in sorted(view.nodes.items())
        if node.member is not None and node.member.run == view.spec.run
    ]
    unstored, event = unstored_outputs(view.record.unstored, view.record.generation, members)
    if event is None:
        return view
    return with_record(replace(view, events=(*view.events, event)), unstored=unstored)


def unstored_outputs(
    before: UnstoredOutputs | None, generation: Generation, members: Iterable[MemberReport]
) -> tuple[UnstoredOutputs | None, EventDraft | None]:
    """Add what agents report to a job's unstored outputs. The event names the new ones; None if nothing changed."""
    known = {_identity(each): each for each in (() if before is None else before.outputs)}
    fresh: dict[tuple[Generation | None, Rank, str], OutputFailure] = {}
    for report in members:
        for output in report.unstored:
            omitted = min(output.omitted_count, MAX_OMITTED)
            each = structs.replace(output, generation=output.generation or report.generation, omitted_count=omitted)
            if each.cause is not OutputCause.NOT_KEPT or _identity(each) not in known:
                fresh[_identity(each)] = each
    if not fresh:
        return before, None
    outputs = tuple((known | fresh).values())
    count = max(len(outputs) + sum(each.omitted_count for each in outputs), 0 if before is None else before.count)
    generation = generation if before is None else before.generation
    unstored = UnstoredOutputs(generation=generation, outputs=outputs[:MAX_NAMED_OUTPUTS], count=count)
    if unstored == before:
        return before, None
    added = [each for key, each in fresh.items() if key not in known]
    shown = tuple(added[:SHOWN_OUTPUTS])
    left = len(added) + sum(each.omitted_count for each in added) - len(shown)
    return unstored, EventDraft(type="OutputsNotStored", message=OutputsLost(outputs=shown, other_count=left))


def _identity(output: OutputFailure) -> tuple[Generation | None, Rank, str]:
    """Return the key of an output. A script writes the same unkept files in each generation."""
    generation = None if output.cause is OutputCause.NOT_KEPT else output.generation
    return generation, output.rank, output.path


def _with_trial_results(view: JobView, passed_trials: tuple[Trial, ...]) -> JobView:
    """Add repeated failures of ranks to the fault history of their node, if another node then passed their step."""
    lines = tuple(
        Implication(
            node_id=trial.node_id,
            incident_id=incident_id(view.spec.run, trial.failure.generation),
            at=view.now,
            what=Cause.HANG.value if trial.failure.is_hang else Cause.RANK_EXIT.value,
            evidence=FailedAlike(node_id=trial.node_id, step=trial.failure.step),
            remedy=Remedy.RELEASE,
        )
        for trial in passed_trials
        # Hardware does not cause a lack of memory.
        if trial.node_id is not None and trial.failure.exit_class is not ExitClass.OUT_OF_MEMORY
    )
    return replace(view, implications=(*view.implications, *lines))


def _trains_again(view: JobView) -> bool:
    base = view.plan.base_step
    return passed_by_all(view) >= base and any(
        rank.boundary > base for report in view.reports.values() for rank in report.ranks
    )
