"""What a person has to do: one duty for each situation, from stored facts and the time."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from control_plane.accounts.duties import Subject, action, explanation, sentence
from control_plane.core.duties import (
    NOTHING,
    ActionKind,
    Checkpoints,
    DutyKind,
    FleetFacts,
    HeldNode,
    JobFacts,
    PersonAction,
    Protection,
    Recovery,
    Urgency,
    of_fleet,
    of_incident,
    of_job,
)
from control_plane.core.observed.causes import NOTHING as CAUSELESS
from control_plane.core.observed.fleets import Hold
from control_plane.core.observed.incidents import FailureRecord, Repeated
from control_plane.core.observed.jobs import CapacityWait, JobRecord, Suspicion
from control_plane.core.observed.reasons import GaveUp
from control_plane.core.observed.rehearsals import RehearsalOutcome, Rehearsals
from control_plane.core.observed.steps import RepeatedWork
from control_plane.core.states import (
    FleetStatus,
    IncidentPhase,
    JobState,
    ProtectionState,
    SecondaryStatus,
    TrainingJobStatus,
)
from control_plane.core.verification import blocked
from everstep.protocol.agent_messages import Obstacle
from everstep.protocol.ids import Generation, Rank, Step
from everstep.protocol.rehearsals import RehearsalVerdict

NOW = 1_800_000_000.0
REPEAT = RepeatedWork(
    base_step=Step(200), newest_step=Step(900), after=Generation(1), seconds=3_600.0, since=NOW, is_stored=True
)
FLEET = FleetFacts(name="estuary", auto_scaling_group_name="estuary-asg", status=FleetStatus.ACTIVE)
HELD = HeldNode(node_id="i-1", hold=Hold.UNREACHABLE, reason=CAUSELESS)
TRAINING = JobFacts(
    fleet=FLEET,
    record=JobRecord(
        state=JobState.RUNNING,
        created_at=NOW - 1800,
        state_since=NOW - 900,
        started_at=NOW - 1800,
        boundary=Step(612),
        max_boundary=Step(612),
    ),
    status=TrainingJobStatus.IN_PROGRESS,
    secondary=SecondaryStatus.TRAINING,
    moved_at=NOW - 1,
    steps_per_second=2.0,
    node_count=3,
    least_node_count=3,
    launched_count=3,
    protection=Protection(state=ProtectionState.PROTECTED),
    checkpoints=Checkpoints(newest_step=Step(600), newest_at=NOW - 10, every_steps=60),
)


def change(facts: JobFacts, **changes: Any) -> JobFacts:
    """Return the facts of a job with some of them, or some of its record, changed."""
    own = {name: changes.pop(name) for name in [each.name for each in fields(JobFacts)] if name in changes}
    return replace(facts, record=replace(facts.record, **changes), **own)


RECOVERING = change(
    TRAINING,
    state=JobState.PREPARING,
    secondary=SecondaryStatus.RESTARTING,
    recovery=Recovery(phase=IncidentPhase.REPLACE, elapsed_seconds=20.0),
    protection=None,
)
DIFFERENCE = RehearsalOutcome(
    verdict=RehearsalVerdict.DIFFERS,
    step=Step(20),
    steps=5,
    seconds=9.0,
    at=NOW - 60,
    rank=Rank(1),
    message="the loss of step 21 differs",
    advice="Register the target network.",
)
WAIT = CapacityWait(missing_count=1, message="no capacity", failed_count=5, next_attempt_at=NOW + 600)


def duty(facts: JobFacts = TRAINING, now: float = NOW, **changes: Any) -> tuple[DutyKind, Urgency]:
    """Return the kind and the urgency of the duty for a job with some facts changed."""
    found = of_job(change(facts, **changes), now)
    return found.kind, found.urgency


def protected(**changes: Any) -> Protection:
    return replace(Protection(state=ProtectionState.PROTECTED), **changes)


def test_a_job_that_trains_with_all_copies_needs_nobody() -> None:
    assert of_job(TRAINING, NOW) == NOTHING
    assert duty(RECOVERING) == (DutyKind.NOTHING, Urgency.NONE)
    assert sentence(NOTHING) == "Nothing to do."


def test_a_failed_job_needs_a_person_for_a_day() -> None:
    failed = change(TRAINING, status=TrainingJobStatus.FAILED, state=JobState.FAILED, ended_at=NOW)
    assert duty(failed, NOW + 86_399) == (DutyKind.JOB_FAILED, Urgency.NOW)
    assert duty(failed, NOW + 86_400) == (DutyKind.JOB_FAILED, Urgency.OPTIONAL)
    assert duty(failed, status=TrainingJobStatus.COMPLETED, state=JobState.COMPLETED) == (
        DutyKind.NOTHING,
        Urgency.NONE,
    )
    assert [each.step for each in of_job(failed, NOW).actions] == [600], "the job continues from its checkpoint"


def test_a_job_that_has_ended_has_no_other_duty() -> None:
    ended = change(TRAINING, ended_at=NOW, status=TrainingJobStatus.STOPPED, held=(HELD,), taken_over_at=NOW)
    assert duty(ended) == (DutyKind.NOTHING, Urgency.NONE)


def test_a_takeover_is_urgent_once_a_failure_waits_for_the_person() -> None:
    assert duty(taken_over_at=NOW) == (DutyKind.TAKEN_OVER, Urgency.OPTIONAL)
    for undone in (
        {"left_alone": True},
        {"status": TrainingJobStatus.STOPPING},
        {"secondary": SecondaryStatus.PAUSING},
        {"state": JobState.PREPARING},
    ):
        assert duty(taken_over_at=NOW, **undone) == (DutyKind.TAKEN_OVER, Urgency.NOW), undone


def test_a_pause_of_automation_waits_for_a_person_and_is_urgent_for_a_job_that_needs_more() -> None:
    paused = replace(FLEET, paused_at=NOW - 60)
    assert of_fleet(paused).kind is DutyKind.AUTOMATION_PAUSED
    assert (of_fleet(paused).urgency, of_fleet(paused).since) == (Urgency.LATER, NOW - 60)
    assert duty(fleet=paused) == (DutyKind.AUTOMATION_PAUSED, Urgency.OPTIONAL)
    for undone in ({"left_alone": True}, {"status": TrainingJobStatus.STOPPING}, {"state": JobState.QUEUED}):
        found = of_job(change(TRAINING, fleet=paused, **undone), NOW)
        assert (found.kind, found.urgency) == (DutyKind.AUTOMATION_PAUSED, Urgency.NOW), undone
        done = action(found.actions[0], Subject(fleet=paused, job="atlas"))
        assert done.command == "everstep automation resume"
    assert duty(fleet=paused, secondary=SecondaryStatus.PAUSED) == (DutyKind.PAUSED, Urgency.OPTIONAL)
    assert duty(fleet=paused, ended_at=NOW) == (DutyKind.NOTHING, Urgency.NONE)


def test_a_restored_database_waits_for_a_person() -> None:
    restored = replace(FLEET, restored_at=NOW)
    found = of_fleet(restored)
    assert (found.kind, found.urgency, found.since) == (DutyKind.DELETIONS_PAUSED, Urgency.LATER, NOW)
    assert sentence(found) == ("Not urgent: accept what the restore of the database changed.")
    assert action(found.actions[0], Subject(fleet=restored)).command == "everstep db restored"
    assert "deletes nothing from S3" in explanation(found, Subject(fleet=restored))
    assert duty(fleet=restored) == (DutyKind.NOTHING, Urgency.NONE), "no job waits for it"
    both = of_fleet(replace(restored, paused_at=NOW))
    assert [each.kind for each in both.actions] == [ActionKind.RESUME_AUTOMATION, ActionKind.ACCEPT_RESTORE]


def test_a_person_decides_about_a_long_wait_for_capacity() -> None:
    long = of_job(change(RECOVERING, capacity_wait=WAIT), NOW)
    assert (long.kind, long.urgency) == (DutyKind.CAPACITY_WAIT, Urgency.LATER)
    assert [(each.kind, each.node_count, each.is_recommended) for each in long.actions] == [
        (ActionKind.SHRINK, 2, True),
        (ActionKind.PAUSE, None, False),
    ]
    short = replace(WAIT, next_attempt_at=NOW + 299)
    assert duty(RECOVERING, capacity_wait=short) == (DutyKind.CAPACITY_WAIT, Urgency.OPTIONAL)
    queued = change(TRAINING, state=JobState.ALLOCATING, secondary=SecondaryStatus.STARTING, capacity_wait=WAIT)
    assert duty(queued) == (DutyKind.CAPACITY_WAIT, Urgency.OPTIONAL), "a job that never trained loses nothing"
    assert of_job(change(RECOVERING, capacity_wait=WAIT, least_node_count=2), NOW).actions[0].kind is ActionKind.PAUSE
    for missing, first in ((2, ActionKind.SHRINK), (3, ActionKind.PAUSE)):
        wait = replace(WAIT, missing_count=missing)
        assert of_job(change(RECOVERING, capacity_wait=wait), NOW).actions[0].kind is first


@pytest.mark.parametrize(
    ("earlier", "late_after"), [((), 300.0), ((20.0, 60.0, 40.0), 120.0), ((2.0,), 30.0), ((40.0, 90.0), 120.0)]
)
def test_a_phase_of_a_recovery_is_late_far_beyond_its_usual_length(
    earlier: tuple[float, ...], late_after: float
) -> None:
    def after(seconds: float) -> tuple[DutyKind, Urgency]:
        recovery = Recovery(phase=IncidentPhase.RESTORE, elapsed_seconds=seconds, earlier_seconds=earlier)
        return duty(RECOVERING, recovery=recovery)

    assert after(late_after) == (DutyKind.NOTHING, Urgency.NONE)
    assert after(late_after + 1) == (DutyKind.RECOVERY_LATE, Urgency.NOW)


def test_a_job_is_stalled_after_a_minute_or_ten_usual_steps_without_a_step() -> None:
    assert duty(now=NOW + 59) == (DutyKind.NOTHING, Urgency.NONE)
    assert duty(now=NOW + 60) == (DutyKind.STALLED, Urgency.NOW)
    assert duty(now=NOW + 99, steps_per_second=0.1) == (DutyKind.NOTHING, Urgency.NONE)
    assert duty(now=NOW + 100, steps_per_second=0.1) == (DutyKind.STALLED, Urgency.NOW)
    assert duty(now=NOW + 3600, steps_per_second=None) == (DutyKind.STALLED, Urgency.NOW)


def test_no_step_is_expected_in_a_recovery() -> None:
    assert duty(RECOVERING, moved_at=None) == duty(RECOVERING) == (DutyKind.NOTHING, Urgency.NONE)


def test_steps_are_expected_since_the_job_runs_or_a_rehearsal_has_ended() -> None:
    assert duty(moved_at=None, state_since=NOW - 60) == (DutyKind.NOTHING, Urgency.NONE)
    assert of_job(change(TRAINING, moved_at=None, state_since=NOW - 61), NOW).since == NOW - 61
    ended = Rehearsals(ended_at=NOW - 61)
    assert of_job(change(TRAINING, moved_at=NOW - 100, rehearsal=ended), NOW).since == NOW - 61


def test_nothing_is_known_about_steps_while_no_agent_is_connected() -> None:
    assert duty(now=NOW + 600, is_heard=False) == (DutyKind.NOTHING, Urgency.NONE)


def test_the_first_step_of_a_launch_may_take_ten_minutes() -> None:
    started = change(
        TRAINING,
        secondary=SecondaryStatus.STARTING,
        boundary=Step(0),
        base_step=Step(0),
        moved_at=None,
        state_since=NOW,
    )
    assert duty(started, NOW + 600) == (DutyKind.NOTHING, Urgency.NONE)
    assert duty(started, NOW + 601) == (DutyKind.FIRST_STEP_LATE, Urgency.NOW)


def test_a_running_job_without_a_step_in_memory_is_urgent_after_its_first_steps() -> None:
    lost = protected(state=ProtectionState.UNPROTECTED)
    assert duty(protection=lost) == (DutyKind.PROTECTION_LOST, Urgency.NOW)
    assert duty(protection=lost, boundary=Step(3)) == (DutyKind.NOTHING, Urgency.NONE)
    assert duty(protection=lost, boundary=Step(612), base_step=Step(609)) == (DutyKind.NOTHING, Urgency.NONE)


def test_a_degraded_job_never_has_nothing_to_do() -> None:
    degraded = protected(state=ProtectionState.DEGRADED, changed_at=NOW)
    assert duty(protection=degraded, now=NOW, moved_at=NOW) == (DutyKind.DEGRADED, Urgency.OPTIONAL)
    assert duty(protection=degraded, now=NOW + 600, moved_at=NOW + 600) == (DutyKind.DEGRADED, Urgency.OPTIONAL)
    later = NOW + 601
    assert duty(protection=degraded, now=later, moved_at=later) == (DutyKind.DEGRADED, Urgency.LATER)
    assert duty(protection=protected(is_whole=False)) == (DutyKind.UNCONFIRMED, Urgency.OPTIONAL)
    assert duty(protection=protected(survives_node_loss=False)) == (DutyKind.WITHOUT_COPIES, Urgency.OPTIONAL)
    assert of_job(change(TRAINING, protection=protected(state=ProtectionState.DEGRADED)), NOW).since == NOW - 900
    found = [duty(launched_count=count) for count in (1, 2)]
    assert found == [(DutyKind.FEWER_NODES, Urgency.OPTIONAL)] * 2
    assert [duty(launched_count=count)[0] for count in (0, 3)] == [DutyKind.NOTHING] * 2


def test_a_job_of_many_steps_without_a_checkpoint_has_a_duty() -> None:
    never = Checkpoints(is_scheduled=False)
    unsaved = change(TRAINING, max_boundary=Step(48_210), boundary=Step(48_210), checkpoints=never)
    found = of_job(unsaved, NOW)
    assert (found.kind, found.urgency) == (DutyKind.NO_CHECKPOINT, Urgency.LATER)
    assert [each.kind for each in found.actions] == [ActionKind.SET_CHECKPOINTS]
    assert found.since == unsaved.record.started_at
    old = replace(never, newest_step=Step(48_209), newest_at=NOW - 3_600)
    assert of_job(change(unsaved, checkpoints=old), NOW).since == NOW - 3_600
    assert duty(unsaved, checkpoints=replace(old, newest_step=Step(48_210))) == (DutyKind.NOTHING, Urgency.NONE)


@pytest.mark.parametrize(
    ("kept", "steps", "seconds", "is_missing"),
    [
        (Checkpoints(), 9_999, 3_599, False),
        (Checkpoints(), 10_000, 10, True),
        (Checkpoints(), 1, 3_600, True),
        (Checkpoints(), 0, 7_200, False),
        (Checkpoints(every_steps=6_000), 11_999, 7_200, False),
        (Checkpoints(every_steps=6_000), 12_000, 7_200, True),
        (Checkpoints(interval_seconds=7_200.0), 20_000, 14_399, False),
        (Checkpoints(interval_seconds=7_200.0), 20_000, 14_400, True),
    ],
)
def test_a_checkpoint_is_missing_after_an_hour_or_twice_its_interval(
    kept: Checkpoints, steps: int, seconds: float, is_missing: bool
) -> None:
    facts = change(TRAINING, checkpoints=kept, max_boundary=Step(steps), started_at=NOW - seconds)
    assert (of_job(facts, NOW).kind is DutyKind.NO_CHECKPOINT) == is_missing
    later = change(facts, checkpoints=replace(kept, newest_at=NOW - seconds, newest_step=Step(0)), started_at=0.0)
    assert (of_job(later, NOW).kind is DutyKind.NO_CHECKPOINT) == is_missing


def test_a_frozen_fleet_and_suspended_launches_are_duties_of_the_fleet_and_of_its_jobs() -> None:
    frozen = replace(FLEET, status=FleetStatus.FROZEN, drift=("AZRebalance is on",))
    assert (of_fleet(frozen).kind, of_fleet(frozen).urgency) == (DutyKind.FLEET_FROZEN, Urgency.NOW)
    assert [each.setting for each in of_fleet(frozen).actions] == ["AZRebalance is on"]
    assert duty(fleet=frozen) == (DutyKind.FLEET_FROZEN, Urgency.NOW)
    assert of_job(change(RECOVERING, fleet=frozen), NOW).is_recovering
    suspended = replace(FLEET, is_launch_suspended=True)
    assert of_fleet(suspended).kind is DutyKind.LAUNCHES_SUSPENDED
    assert duty(fleet=suspended) == (DutyKind.LAUNCHES_SUSPENDED, Urgency.NOW)
    assert of_fleet(replace(suspended, status=FleetStatus.DELETING)) == NOTHING


def test_held_nodes_wait_for_a_person_without_hurry() -> None:
    assert duty(held=(HELD,)) == (DutyKind.HELD_NODES, Urgency.LATER)
    assert of_fleet(replace(FLEET, held=(HELD,))).urgency is Urgency.LATER
    urgent = of_job(change(TRAINING, held=(HELD,), protection=protected(state=ProtectionState.UNPROTECTED)), NOW)
    assert [each.kind for each in urgent.actions] == [ActionKind.SHOW_PROTECTION, ActionKind.DECIDE_NODE]


def test_consent_and_an_unreachable_store_are_urgent() -> None:
    waiting = change(RECOVERING, store_wait=blocked(None, Obstacle.NO_ANSWER, "", NOW - 60))
    assert duty(waiting) == (DutyKind.STORE_UNREACHABLE, Urgency.NOW)
    assert duty(waiting, repeat=REPEAT) == (DutyKind.CONSENT_TO_REPEAT, Urgency.NOW)


def test_a_paused_job_waits_for_its_person_only() -> None:
    assert duty(state=JobState.QUEUED, secondary=SecondaryStatus.PAUSED) == (DutyKind.PAUSED, Urgency.OPTIONAL)
    assert duty(status=TrainingJobStatus.STOPPING) == (DutyKind.NOTHING, Urgency.NONE)


@pytest.mark.parametrize("kind", [kind for kind in DutyKind if kind is not DutyKind.NOTHING])
@pytest.mark.parametrize("urgency", [Urgency.NOW, Urgency.LATER, Urgency.OPTIONAL])
def test_every_duty_has_one_sentence_and_an_explanation(kind: DutyKind, urgency: Urgency) -> None:
    subject = Subject(fleet=FLEET, job="atlas", wait=WAIT, rehearsal=DIFFERENCE)
    example = of_job(change(RECOVERING, capacity_wait=WAIT), NOW) if kind is DutyKind.CAPACITY_WAIT else NOTHING
    found = replace(example, kind=kind, urgency=urgency, actions=example.actions or of_fleet(_HELD_FLEET).actions)
    found = replace(found, limit_seconds=120.0, since=NOW)
    text = sentence(found)
    assert text.endswith("."), text
    assert text != "Nothing to do."
    assert ". " not in text
    assert kind is DutyKind.HELD_NODES or explanation(found, subject)


_HELD_FLEET = replace(FLEET, held=(HELD,))


@pytest.mark.parametrize("kind", ActionKind)
def test_every_action_has_words_and_a_command_with_all_names(kind: ActionKind) -> None:
    node = HELD if kind is ActionKind.DECIDE_NODE else None
    base = of_fleet(_HELD_FLEET).actions[0]
    base = replace(base, repeat=REPEAT if kind is ActionKind.REPEAT_WORK else None)
    words = action(replace(base, kind=kind, node=node, node_count=2, setting="x"), Subject(fleet=FLEET, job="atlas"))
    assert words.words.endswith(".")
    assert words.command
    assert "{" not in words.words + words.command


@pytest.mark.parametrize(
    ("verdict", "kind", "urgency"),
    [
        (RehearsalVerdict.PROVEN, DutyKind.NOTHING, Urgency.NONE),
        (RehearsalVerdict.UNPROVEN, DutyKind.RESUME_UNPROVEN, Urgency.OPTIONAL),
        (RehearsalVerdict.DIFFERS, DutyKind.RESUME_DIFFERS, Urgency.LATER),
        (RehearsalVerdict.UNSTABLE, DutyKind.RESUME_DIFFERS, Urgency.LATER),
        (RehearsalVerdict.REFUSED, DutyKind.NOTHING, Urgency.NONE),
    ],
)
def test_a_job_whose_resume_is_not_proven_needs_a_person_later(
    verdict: RehearsalVerdict, kind: DutyKind, urgency: Urgency
) -> None:
    facts = change(TRAINING, rehearsal=Rehearsals(result=replace(DIFFERENCE, verdict=verdict)))
    assert duty(facts) == (kind, urgency)


def test_the_duty_of_a_difference_has_the_advice() -> None:
    found = of_job(change(TRAINING, rehearsal=Rehearsals(result=DIFFERENCE)), NOW)
    subject = Subject(fleet=FLEET, job="atlas", rehearsal=DIFFERENCE)
    assert sentence(found) == "Not urgent: correct the script, because a restart would not repeat its steps."
    words = "A restart from step 20 does not repeat its steps: rank 1: the loss of step 21 differs."
    assert explanation(found, subject) == words
    told = action(found.actions[0], subject)
    assert told.words == "Register the target network. Submit the job again with the corrected script."
    assert told.command == "everstep jobs describe atlas"


def test_a_rehearsal_is_not_a_stall() -> None:
    still = change(TRAINING, moved_at=NOW - 500)
    assert duty(still) == (DutyKind.STALLED, Urgency.NOW)
    under_way = change(still, rehearsal=Rehearsals(is_under_way=True))
    assert duty(under_way) == (DutyKind.NOTHING, Urgency.NONE)
    hung = Suspicion(since=NOW - 500, began_at=NOW - 10, number=1, asked_at=NOW - 10)
    assert duty(under_way, suspicion=hung) == (DutyKind.STALLED, Urgency.NOW)
    assert duty(still, rehearsal=Rehearsals(ended_at=NOW - 60)) == (DutyKind.NOTHING, Urgency.NONE)
    assert duty(still, rehearsal=Rehearsals(ended_at=NOW - 61)) == (DutyKind.STALLED, Urgency.NOW)


def test_the_words_about_a_failed_job_name_its_rank_and_the_script() -> None:
    again = PersonAction(kind=ActionKind.SUBMIT_AGAIN, urgency=Urgency.NOW, step=Step(5))
    unknown = action(again, Subject(fleet=FLEET, job="atlas"))
    assert unknown.words == "Correct the cause, and submit the job again from step 5."
    assert unknown.command == "everstep jobs logs atlas --tail 50"
    failure = FailureRecord(
        generation=Generation(1),
        step=Step(7),
        exit_class=None,
        code=1,
        at=NOW,
        max_boundary=Step(7),
        rank=Rank(12),
        error="E",
    )
    reason = GaveUp(because=Repeated(count=3, failure=failure))
    known = action(replace(again, step=None), Subject(fleet=FLEET, job="atlas", reason=reason))
    assert known.words == "Correct the script or its data, and submit the job again from the beginning."
    assert known.command == "everstep jobs logs atlas --rank 12 --tail 50"


def test_held_nodes_of_an_incident_are_a_duty_that_can_wait() -> None:
    found = of_incident(NOTHING, (HELD,))
    assert (found.kind, found.urgency, sentence(found)) == (
        DutyKind.HELD_NODES,
        Urgency.LATER,
        "Not urgent: decide about node i-1.",
    )
    assert of_incident(NOTHING, ()) == NOTHING
    failed = change(TRAINING, status=TrainingJobStatus.FAILED, state=JobState.FAILED, ended_at=NOW, held=(HELD,))
    of_both = of_incident(of_job(failed, NOW), (HELD,))
    assert of_both == of_job(failed, NOW), "the job's page and the incident's page name the same actions"
    assert [each.kind for each in of_both.actions] == [ActionKind.SUBMIT_AGAIN, ActionKind.DECIDE_NODE]
    assert len(of_job(failed, NOW + 86_400).actions) == 1


def test_the_words_of_a_long_wait_offer_the_choice() -> None:
    words = sentence
    long = of_job(change(RECOVERING, capacity_wait=WAIT), NOW)
    assert words(long) == "Decide: wait for the next attempt at 08:10:00 UTC, or (recommended) continue on 2 nodes."
    pause = replace(long, actions=long.actions[1:])
    assert words(pause) == "Decide: wait for the next attempt at 08:10:00 UTC (recommended), or pause the job."
    short = replace(long, urgency=Urgency.OPTIONAL)
    assert words(short) == "You need not act: Everstep tries again at 08:10:00 UTC."
