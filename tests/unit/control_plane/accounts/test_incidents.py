"""Tests the account of an incident: its end, its verdict (what failed, and the job's state), and a person's options."""

from __future__ import annotations

from dataclasses import replace

import pytest

from control_plane.accounts.answers import done
from control_plane.accounts.incidents import (
    Account,
    HeldNode,
    IncidentOutcome,
    JobCourse,
    continuing_cost,
    duration,
    milestones,
    outcome_of,
    verdict,
)
from control_plane.core.observed.causes import LaunchesFail
from control_plane.core.observed.facts import Recorded
from control_plane.core.observed.fleets import Hold
from control_plane.core.observed.incidents import RestartsRanks
from control_plane.core.observed.jobs import CapacityWait
from control_plane.core.observed.nodes import Cause
from control_plane.core.observed.reasons import Waits
from control_plane.core.states import JobState
from everstep.protocol.ids import Step
from tests.unit.control_plane.accounts.values import ABSENT, NODE, XID, ended, gave_up

RECOVERED = Account(
    incident_id="inc-1",
    job_name="gpt",
    project="default",
    fleet_name="main",
    cause=Cause.INSTANCE_TERMINATED,
    outcome=IncidentOutcome.RECOVERED,
    evidence=(ended(),),
    decision=RestartsRanks(replaced=(NODE,)),
    job_reason="trains from step 10",
    reached_step=Step(12),
    from_step=Step(10),
    repeated_steps=2,
    kept_step=Step(5),
    restore_source="peer",
    instance_ids=("i-1",),
    faulted_instance_ids=("i-1",),
    replacement_instance_ids=("i-2",),
    failed_at=100.0,
    opened_at=100.5,
    replaced_at=101.0,
    restored_at=102.0,
    closed_at=112.3,
)
OPEN = replace(
    RECOVERED, outcome=IncidentOutcome.OPEN, replaced_at=None, restored_at=None, closed_at=None, repeated_steps=None
)
FAILED = replace(
    RECOVERED, outcome=IncidentOutcome.JOB_FAILED, cause=Cause.RANK_EXIT, instance_ids=(), reached_step=Step(33)
)


@pytest.mark.parametrize(
    ("closed_at", "job", "outcome"),
    [
        (None, JobCourse(state=JobState.PREPARING, ended_at=None, queued_at=()), IncidentOutcome.OPEN),
        (100.0, JobCourse(state=JobState.RUNNING, ended_at=None, queued_at=(50.0,)), IncidentOutcome.RECOVERED),
        (100.0, JobCourse(state=JobState.QUEUED, ended_at=None, queued_at=(50.0, 100.5)), IncidentOutcome.JOB_PAUSED),
        (100.0, JobCourse(state=JobState.FAILED, ended_at=100.9, queued_at=()), IncidentOutcome.JOB_FAILED),
        (100.0, JobCourse(state=JobState.STOPPED, ended_at=99.5, queued_at=()), IncidentOutcome.JOB_STOPPED),
        (100.0, JobCourse(state=JobState.COMPLETED, ended_at=100.0, queued_at=()), IncidentOutcome.JOB_COMPLETED),
        (100.0, JobCourse(state=JobState.FAILED, ended_at=102.0, queued_at=()), IncidentOutcome.RECOVERED),
    ],
)
def test_the_course_of_the_job_determines_how_an_incident_ended(
    closed_at: float | None, job: JobCourse, outcome: IncidentOutcome
) -> None:
    assert outcome_of(closed_at, job) is outcome


def test_a_verdict_says_what_failed_and_how_it_ended() -> None:
    assert verdict(RECOVERED, 500.0) == "i-1 was terminated. Everstep recovered the job in 12 s; no step was lost."
    assert verdict(OPEN, 500.0) == "i-1 was terminated. Everstep is recovering the job."
    waiting = replace(OPEN, job_reason=Waits(missing_count=1, lack_reasons=(LaunchesFail(text="AWS has none"),)))
    assert verdict(waiting, 500.0) == "i-1 was terminated. The job waits for 1 node."
    assert verdict(replace(RECOVERED, repeated_steps=None), 500.0).endswith("the job in 12 s.")
    assert verdict(FAILED, 500.0) == "A training process failed on i-1. The job failed; 28 steps are lost."
    shrunk = verdict(replace(RECOVERED, cause=Cause.SHRUNK), 500.0)
    assert shrunk.startswith("Lost nodes were not replaced. Everstep recovered the job in 12 s, on fewer nodes;")
    assert verdict(replace(FAILED, kept_step=None), 500.0).endswith("33 steps are lost.")
    assert verdict(replace(FAILED, kept_step=Step(32)), 500.0).endswith("1 step is lost.")
    assert verdict(replace(FAILED, kept_step=Step(33)), 500.0).endswith("The job failed; no step was lost.")


@pytest.mark.parametrize("cause", Cause)
@pytest.mark.parametrize("nodes", [(), ("i-1",), ("i-1", "i-2"), ("i-1", "i-2", "i-3", "i-4", "i-5")])
def test_every_cause_has_a_sentence(cause: Cause, nodes: tuple[str, ...]) -> None:
    said = verdict(replace(RECOVERED, cause=cause, faulted_instance_ids=nodes, instance_ids=nodes), 500.0)
    first = said.split(". ")[0]
    assert first[0].isupper() or first.startswith("i-")
    assert "  " not in said
    assert " and 2 more" in said or "i-4" not in said


def test_a_job_that_a_person_controls_waits_for_that_person() -> None:
    taken = replace(OPEN, taken_over_by="ann")
    assert "Nobody recovers the job, because ann controls it." in verdict(taken, 500.0)


def test_the_cost_that_continues_names_the_nodes_and_their_price() -> None:
    silent = HeldNode(node_id="i-1", hold=Hold.UNREACHABLE, reason="")
    one = replace(RECOVERED, held=(silent,), price_usd_per_hour=55.04)
    assert continuing_cost(one, 500.0) == "The unused node costs $55.04 per hour."
    two = replace(one, held=(silent, replace(silent, node_id="i-2")))
    assert continuing_cost(two, 500.0) == "The 2 unused nodes cost $110.08 per hour."
    assert continuing_cost(replace(one, price_usd_per_hour=None), 500.0) == ""
    assert continuing_cost(replace(RECOVERED, price_usd_per_hour=55.04), 500.0) == ""
    failed = replace(FAILED, price_usd_per_hour=55.04, idle_count=3)
    assert continuing_cost(failed, 500.0) == "3 idle nodes cost $165.12 per hour."
    unpriced = replace(failed, price_usd_per_hour=None, idle_count=1)
    assert continuing_cost(unpriced, 500.0) == "1 idle node still costs money."
    assert continuing_cost(replace(failed, idle_count=0), 500.0) == ""


def test_the_cost_of_a_wait_has_a_total_until_the_next_attempt() -> None:
    waiting = replace(WAITING, price_usd_per_hour=55.04)
    assert continuing_cost(waiting, 300.0) == "Waiting costs $110.08 per hour, $27.52 until the next attempt."
    one = replace(waiting, node_count=2)
    assert continuing_cost(one, 300.0) == "Waiting costs $55.04 per hour, $13.76 until the next attempt."
    assert continuing_cost(replace(waiting, node_count=1), 300.0) == ""
    assert continuing_cost(waiting, 1200.0) == "Waiting costs $110.08 per hour."
    only_pause = replace(waiting, is_long_wait=True, least_node_count=2)
    assert continuing_cost(only_pause, 300.0) == continuing_cost(waiting, 300.0)


def test_the_cost_of_a_wait_that_a_person_can_end_has_no_end() -> None:
    long = replace(WAITING, price_usd_per_hour=55.04, is_long_wait=True)
    assert continuing_cost(long, 300.0) == "Waiting costs $110.08 per hour."


SHORT = CapacityWait(
    missing_count=1,
    message="We do not have sufficient p5.48xlarge capacity (a). Launching EC2 instance failed",
    failed_count=2,
    is_shortage=True,
    next_attempt_at=1200.0,
)
WAITING = replace(
    OPEN,
    job_reason=Waits(missing_count=1),
    wait=SHORT,
    instance_type="p5.48xlarge",
    availability_zone="us-east-2a",
    node_count=3,
    least_node_count=3,
)


def test_a_shortage_says_what_is_missing_and_when_the_next_attempt_is() -> None:
    assert verdict(WAITING, 500.0) == "i-1 was terminated. The job waits for 1 p5.48xlarge in us-east-2a."
    unknown = replace(WAITING, wait=replace(SHORT, missing_count=2), instance_type="", availability_zone="")
    assert verdict(unknown, 500.0).endswith("The job waits for 2 nodes.")


def test_the_verdict_names_the_meaning_of_an_xid() -> None:
    faulty = replace(RECOVERED, cause=Cause.NODE_FAULT, evidence=(XID,))
    assert verdict(faulty, 500.0).startswith("i-1 reported Xid 79 (the GPU has fallen off the bus). Everstep")
    assert verdict(replace(faulty, evidence=(Recorded(text="x"),)), 500.0).startswith("i-1 reported a fault. ")


def test_an_absence_of_the_control_plane_is_part_of_the_verdict_and_of_the_steps() -> None:
    absent = replace(RECOVERED, evidence=(ended(), ABSENT))
    assert verdict(absent, 500.0) == (
        "i-1 was terminated while the control plane was down for 2 min 52 s. The control plane is up again, and "
        "Everstep recovered the job; no step was lost."
    )
    assert "Everstep's log shows why the control plane was down: journalctl --unit everstep-server." in done(absent)


def test_the_moments_of_an_incident_use_the_words_of_its_card() -> None:
    assert [(each.kind.value, each.at, each.words) for each in milestones(RECOVERED)] == [
        ("Failed", 100.0, "The failure occurred."),
        ("Detected", 100.5, "Everstep detected the failure."),
        ("Replaced", 101.0, "i-2 was ready in place of i-1."),
        ("Restored", 102.0, "Training resumed from step 10."),
        ("Closed", 112.3, "Training had caught up."),
    ]
    assert [each.kind.value for each in milestones(OPEN)] == ["Failed", "Detected"]
    same = milestones(replace(RECOVERED, instance_ids=(), replacement_instance_ids=(), from_step=None))
    assert [each.words for each in same[2:4]] == ["All nodes were ready.", "Training resumed."]
    assert milestones(FAILED)[-1].words == "The job failed."


@pytest.mark.parametrize(
    ("error", "cause", "outcome", "is_named"),
    [
        ("KeyError: 'labels'", Cause.RANK_EXIT, IncidentOutcome.JOB_FAILED, True),
        (None, Cause.RANK_EXIT, IncidentOutcome.JOB_FAILED, False),
        ("KeyError: 'labels'", Cause.HANG, IncidentOutcome.JOB_FAILED, False),
        ("KeyError: 'labels'", Cause.RANK_EXIT, IncidentOutcome.RECOVERED, False),
    ],
)
def test_the_verdict_names_the_exception_with_which_a_script_ended_the_job(
    error: str | None, cause: Cause, outcome: IncidentOutcome, is_named: bool
) -> None:
    said = verdict(replace(FAILED, job_reason=gave_up(error), cause=cause, outcome=outcome), 500.0)
    assert said.startswith("The training script failed: KeyError: 'labels'. ") is is_named
    assert "KeyError" in said or not is_named


def test_lost_steps_are_those_after_the_checkpoint_only_if_the_job_ended() -> None:
    assert RECOVERED.lost_steps == 2
    assert FAILED.lost_steps == 28
    assert replace(FAILED, kept_step=Step(33)).lost_steps == 0
    assert replace(FAILED, reached_step=None).lost_steps is None


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.0, "0.0 s"),
        (0.04, "< 0.1 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (10.5, "11 s"),
        (59.6, "1 min 00 s"),
        (245.4, "4 min 05 s"),
        (3599.6, "1 h 00 min"),
        (7500.0, "2 h 05 min"),
        (183_600.0, "2 d 3 h"),
    ],
)
def test_a_duration_never_shows_sixty_of_a_unit(seconds: float, words: str) -> None:
    assert duration(seconds) == words
