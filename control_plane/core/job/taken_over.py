"""Handles a job that a person has taken over, or for which all automatic actions are paused: Everstep only observes."""

from __future__ import annotations

from control_plane.core import checkpoints, faults
from control_plane.core.actions import Decision, JobAction
from control_plane.core.evidence import NodeDisposition
from control_plane.core.job.outcome import stay
from control_plane.core.job.progress import with_progress
from control_plane.core.job.view import JobView, halt, with_record
from control_plane.core.observed.reasons import Observes
from control_plane.core.states import RUNNING_JOBS, JobState
from everstep.protocol.agent_messages import MemberPhase


def observe_only(view: JobView) -> Decision:
    """Record progress and write manifests. The job's reason contains the faults that Everstep does not handle."""
    actions: tuple[JobAction, ...] = ()
    if view.record.state in RUNNING_JOBS:
        view = with_progress(view)
        actions = checkpoints.due(
            view.plan,
            view.reports,
            view.seen.lineage,
            view.seen.checkpoints,
            view.seen.dropped_checkpoints,
            committed=view.record.committed,
        )
    # In these states, no generation runs, so ranks of every generation below `issued_generation` must end. In any other
    # state, the ranks of the newest generation with a plan must stay.
    waits = view.record.state in (JobState.QUEUED, JobState.ALLOCATING, JobState.PREPARING)
    present = view.record.issued_generation if waits else view.record.generation
    # Ranks of an old generation are killed even now, because they must never run beside newer ranks.
    ended = [
        halt(view, node_id, node.member.generation, "its generation has ended")
        for node_id, node in view.nodes.items()
        if node.is_connected
        and node.member is not None
        and node.member.run == view.spec.run
        and node.member.generation < present
        and node.member.phase is MemberPhase.RUNNING
    ]
    standings = {node_id: verdict.disposition for node_id, verdict in view.verdicts.items()}
    impaired = tuple(node_id for node_id, disposition in standings.items() if disposition is NodeDisposition.IMPAIRED)
    lost = tuple(node_id for node_id, disposition in standings.items() if disposition is NodeDisposition.GONE)
    exits = tuple(fault.evidence for fault in faults.of_ranks(view.reports))
    reason = Observes(
        pause=view.policy.pause, taken_over_by=view.record.taken_over_by, impaired=impaired, lost=lost, exits=exits
    )
    return stay(with_record(view, left_alone=bool(impaired or lost or exits)), reason, (*actions, *ended))
