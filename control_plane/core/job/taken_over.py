"""Handles a job that Everstep must not change: Everstep only observes it, and kills ranks of old generations.

A person has taken the job over, or an administrator has paused all automatic actions.
"""

from __future__ import annotations

from control_plane.core import checkpoints, faults
from control_plane.core.actions import Decision, JobAction
from control_plane.core.evidence import NodeStanding
from control_plane.core.job.outcome import stay
from control_plane.core.job.progress import with_progress
from control_plane.core.job.view import JobView, halt, with_record
from control_plane.core.observed.facts import Fact
from control_plane.core.observed.reasons import Told
from control_plane.core.states import RUNNING_JOBS, JobState
from everstep.protocol.agent_messages import MemberPhase

_STANDING_WORDS = {NodeStanding.IMPAIRED: "impaired", NodeStanding.GONE: "lost"}


def observe_only(view: JobView, cause: str) -> Decision:
    """Record progress and write manifests. Send no message except orders to kill ranks of old generations.

    `cause` says why Everstep only observes the job: a person controls the job, or automatic actions are paused. The
    job's reason contains `cause`, and the faults to which Everstep would otherwise respond. A user's request to stop
    waits until the job is handed back or the pause ends. Ranks of an old generation are killed even then, because they
    must never run beside newer ranks.
    """
    actions: tuple[JobAction, ...] = ()
    if view.record.state in RUNNING_JOBS:
        view = with_progress(view)
        actions = checkpoints.due(
            view.plan, view.reports, view.seen.lineage, view.seen.checkpoints, view.seen.dropped_checkpoints
        )
    # In these states, no generation runs, so ranks of every generation below `issued_generation` must end. In any other
    # state, the ranks of the newest generation with a plan must stay.
    waits = view.record.state in (JobState.QUEUED, JobState.ALLOCATING, JobState.PREPARING)
    present = view.record.issued_generation if waits else view.record.generation
    ended = [
        halt(view, node_id, node.member.generation, "its generation has ended")
        for node_id, node in view.nodes.items()
        if node.is_connected
        and node.member is not None
        and node.member.run == view.spec.run
        and node.member.generation < present
        and node.member.phase is MemberPhase.RUNNING
    ]
    observed: list[str | Fact] = []
    for verdict in view.verdicts.values():
        if verdict.standing in _STANDING_WORDS:
            observed += ["; ", f"{verdict.node_id} is {_STANDING_WORDS[verdict.standing]}"]
    for fault in faults.of_ranks(view.reports):
        observed += ["; ", fault.evidence]
    view = with_record(view, left_alone=bool(observed))
    doing = f"{cause}: Everstep decides nothing"
    reason = Told(parts=(f"{doing}; it observes: ", *observed[1:])) if observed else doing
    return stay(view, reason, (*actions, *ended))
