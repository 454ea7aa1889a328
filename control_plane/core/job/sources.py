"""Determines for a `JobView` which steps a job can restore from its members' memory and from S3."""

from __future__ import annotations

from dataclasses import replace

from control_plane.core import launch, recovery, repeats
from control_plane.core.job.view import JobView
from control_plane.core.observed.jobs import JobRecord
from control_plane.core.observed.steps import RepeatedWork
from everstep.protocol.ids import FIRST_STEP, NodeId, Step


def restorable_step(view: JobView, record: JobRecord, roll: launch.Roll) -> Step:
    """Return the newest step that every rank can restore from memory of promised members, or from S3."""
    return recovery.choose(launch.survey(view.spec, view.seen, record, roll, view.now)).base_step


def restorable_step_without(view: JobView, node_id: NodeId | None) -> Step:
    """Return the newest step that every rank can restore without `node_id`."""
    others = replace(
        view, seen=replace(view.seen, assigned=tuple(each for each in view.seen.assigned if each != node_id))
    )
    return restorable_step(others, view.record, launch.call_roll(view.spec, others.seen, view.record, view.policy))


def step_left_in_s3(view: JobView, roll: launch.Roll) -> tuple[Step, Step]:
    """Return the newest step that S3 alone can restore, and how many committed steps such a restore would lose."""
    left = restorable_step(view, view.record, replace(roll, promised={}))
    return left, max(Step(step_to_keep(view, roll) - left), FIRST_STEP)


def step_to_keep(view: JobView, roll: launch.Roll) -> Step:
    """Return the step that must stay restorable: at most the newest that promised members and S3 can restore."""
    floor = launch.floor_of(view.spec, view.seen, view.record, view.now)
    return floor if roll.late or roll.unreachable else min(floor, restorable_step(view, view.record, roll))


def repeat_choice(view: JobView, base: Step) -> RepeatedWork | None:
    """Return the choice that a person must make before the job may restore `base`, or None (`core.repeats`)."""
    return repeats.choice(view.spec, view.seen, view.record, base, policy=view.policy, now=view.now)
