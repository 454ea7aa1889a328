"""Decides what the control plane does for one job.

    QUEUED ─▶ ALLOCATING ─▶ PREPARING ─▶ LOADING ─▶ STARTING ─▶ RUNNING ─▶ COMPLETED
       ▲                       ▲  a fault in PREPARING to RUNNING: │  STOPPING ─▶ STOPPED
       │                       └── a new generation, one incident ─┘  a fault that would recur ─▶ FAILED
       └── PAUSING: its nodes go to a job of higher priority, or the job waits for a person ──┘

Invariant: pure and level-triggered. The same input gives the same decision, and a job in its desired state needs no
action. Each action follows from stored state: one pass stores a generation's number or plan, and the next sends it.
"""

from __future__ import annotations

from dataclasses import replace

from control_plane.core import accounting
from control_plane.core.actions import Decision
from control_plane.core.job.launching import load_and_start
from control_plane.core.job.outcome import book_incidents, settle
from control_plane.core.job.preparing import prepare
from control_plane.core.job.taken_over import observe_only
from control_plane.core.job.view import gap_seconds, view_of
from control_plane.core.job.waiting import wait_for_nodes
from control_plane.core.job.watching import watch
from control_plane.core.observed.jobs import JobObserved
from control_plane.core.observed.specs import JobSpec, Policy
from control_plane.core.states import ENDED_JOBS, JobState


def decide(now: float, spec: JobSpec, observed: JobObserved, policy: Policy) -> Decision:
    """Return the actions for a job, and the record to store, in one pass.

    Raises InvalidTransition if the stored state permits no transition for the observed event.
    """
    if observed.record.state in ENDED_JOBS:
        return Decision(record=observed.record)
    charged = accounting.charge(
        observed.record,
        now,
        gap_seconds=gap_seconds(policy),
        node_count=len(observed.assigned),
        is_stalled=observed.record.suspicion is not None,
    )
    view = view_of(now, spec, observed, policy, charged)
    match view.record.state:
        case _ if policy.pause or view.record.taken_over_by:
            decision = observe_only(view)
        case JobState.QUEUED | JobState.ALLOCATING:
            decision = wait_for_nodes(view)
        case JobState.PREPARING:
            decision = prepare(view)
        case JobState.LOADING | JobState.STARTING:
            decision = load_and_start(view)
        case _:
            decision = watch(view)
    decision = replace(decision, record=book_incidents(charged, decision))
    incidents = tuple(
        replace(incident, idle_node_microseconds=accounting.idle_node_microseconds(incident, decision.record))
        for incident in decision.incidents
    )
    return replace(settle(observed.record, decision, now), incidents=incidents)
