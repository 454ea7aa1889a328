from __future__ import annotations

from dataclasses import replace

import pytest

from control_plane.accounts.facts import sentence
from control_plane.core import accounting, incidents
from control_plane.core.incidents import Fault
from control_plane.core.observed.facts import ControlPlaneAbsent, Recorded
from control_plane.core.observed.incidents import IncidentRecord, RestartsRanks
from control_plane.core.observed.jobs import JobRecord
from control_plane.core.observed.nodes import Cause
from control_plane.core.observed.spans import Bucket
from control_plane.core.states import IncidentEvent, IncidentState, JobState
from control_plane.errors import InvalidTransition
from everstep.protocol.ids import Generation, NodeId, RunId, Step

RUN = RunId("0" * 32)


def record(state: JobState = JobState.RUNNING, **changes: object) -> JobRecord:
    """Return the record of a running job that has finished a step in its newest generation."""
    made = {"boundary": Step(1), "max_boundary": Step(1), **changes}
    return JobRecord(state=state, reason="", created_at=100.0, state_since=100.0, **made)  # type: ignore[arg-type]


def follow(job: JobRecord, *after: IncidentRecord) -> JobRecord:
    return accounting.follow(job, after, resumed=Bucket.TRAIN)


def in_seconds(job: JobRecord) -> dict[str, float]:
    return {name: spent / 1_000_000 for name, spent in job.microseconds.items() if spent}


def opened(at: float = 200.0, failed: float = 195.0) -> IncidentRecord:
    fault = Fault(cause=Cause.RANK_EXIT, evidence=Recorded(text="rank 1 ended"), at=failed)
    return incidents.opened(RUN, Generation(1), (fault,), decision=RestartsRanks(), reached=Step(30), now=at)


def test_every_second_is_in_one_bucket() -> None:
    job = record(JobState.QUEUED, boundary=Step(-1), max_boundary=Step(-1))
    for now, state, boundary in (
        (110, JobState.ALLOCATING, -1),
        (125, JobState.PREPARING, -1),
        (130, JobState.RUNNING, 0),
        (142, JobState.RUNNING, 1),
        (200, JobState.STOPPING, 9),
        (207, JobState.STOPPED, 9),
    ):
        job = replace(
            accounting.charge(job, now, gap_seconds=100),
            state=state,
            boundary=Step(boundary),
            max_boundary=Step(boundary),
        )
    assert in_seconds(job) == {"queue": 10, "provision": 15, "start": 17, "train": 58, "stopping": 7}
    assert accounting.charge(job, 300, gap_seconds=100) is job


def test_a_gap_in_a_launch_is_unaccounted_and_one_in_training_is_training() -> None:
    assert in_seconds(accounting.charge(record(JobState.LOADING), 200, gap_seconds=10)) == {"unaccounted": 100}
    assert in_seconds(accounting.charge(record(JobState.RUNNING), 200, gap_seconds=10)) == {"train": 100}


def test_a_gap_is_told_by_an_incident_that_failed_within_it_and_by_no_other() -> None:
    assert accounting.charge(record(), 109, gap_seconds=10).unwatched is None
    gap = accounting.charge(record(), 200, gap_seconds=10).unwatched
    assert gap == (100, 200)
    told = incidents.with_absence(opened(202.0, 150.0), gap)
    assert sentence(told.evidence[-1]) == "no control plane was running for 50 s, until 00:03:20 UTC"
    assert incidents.with_absence(told, gap) == told
    earlier = incidents.with_absence(replace(told, failed_at=90.0), gap)
    assert earlier.evidence == (*told.evidence[:-1], ControlPlaneAbsent(seconds=100, until=200.0))
    for other in (opened(202.0, 200.0), opened(99.0, 90.0)):
        assert incidents.with_absence(other, gap) == other
    assert incidents.with_absence(told, None) == told


def test_a_clock_that_goes_back_charges_nothing() -> None:
    job = accounting.charge(record(), 200, gap_seconds=10)
    assert accounting.charge(job, 150, gap_seconds=10) == job


def test_the_ledger_counts_single_microseconds() -> None:
    job = accounting.charge(record(member_count=1), 200, gap_seconds=1000)
    assert accounting.charge(job, 200, gap_seconds=1000) == job
    later = accounting.charge(job, 200.000001, gap_seconds=1000)
    assert later.microseconds["train"] == job.microseconds["train"] + 1


def test_a_gap_is_longer_than_its_limit() -> None:
    launching = record(JobState.PREPARING, boundary=Step(-1), max_boundary=Step(-1))
    assert in_seconds(accounting.charge(launching, 200, gap_seconds=100)) == {"start": 100}
    assert in_seconds(accounting.charge(launching, 200, gap_seconds=99)) == {"unaccounted": 100}


def test_only_training_counts_missing_nodes() -> None:
    job = accounting.charge(record(JobState.QUEUED, member_count=3, missing_count=1), 200, gap_seconds=1000)
    assert [(span.present, span.missing) for span in job.spans] == [(1, 0)]
    trained = accounting.charge(replace(job, state=JobState.RUNNING), 300, gap_seconds=1000)
    assert [(span.present, span.missing) for span in trained.spans] == [(1, 0), (3, 1)]


def test_detection_begins_at_the_failure() -> None:
    job = accounting.charge(record(), 200, gap_seconds=1000)
    assert in_seconds(follow(job, opened(200.0, 195.0))) == {"train": 95, "detect": 5}
    assert in_seconds(follow(job, opened(200.0, -300.0))) == {"detect": 100}
    reworking = replace(opened(110.0, 105.0), state=IncidentState.REWORKING, replaced_at=110.0, restored_at=110.0)
    again = follow(accounting.charge(record(), 110, gap_seconds=1000), reworking)
    again = accounting.charge(replace(again, incident=reworking), 210, gap_seconds=1000)
    second = replace(opened(210.0, 206.0), id="another")
    spent = in_seconds(follow(again, replace(reworking, state=IncidentState.CLOSED, closed_at=206.0), second))
    assert spent == {"train": 5, "rework": 96, "detect": 9}
    launching = accounting.charge(record(JobState.LOADING, boundary=Step(0), max_boundary=Step(0)), 105, gap_seconds=10)
    assert in_seconds(follow(launching, opened(105.0, 103.0))) == {"start": 3, "detect": 2}


def test_detection_of_a_hang_replaces_the_stall() -> None:
    job = accounting.charge(record(), 160, gap_seconds=100)
    job = accounting.charge(job, 200, gap_seconds=100, is_stalled=True)
    assert in_seconds(job) == {"train": 60, "stall": 40}
    assert in_seconds(follow(job, opened(200.0, 150.0))) == {"train": 50, "detect": 50}
    assert in_seconds(follow(job, opened(200.0, 170.0))) == {"train": 60, "stall": 10, "detect": 30}


def test_a_second_failure_makes_the_phases_of_the_first_attempt_void() -> None:
    restoring = replace(opened(105.0, 100.0), state=IncidentState.RESTORING, replaced_at=110.0)
    job = follow(accounting.charge(record(incident=restoring), 120, gap_seconds=1000), restoring)
    assert in_seconds(job) == {"detect": 5, "replace": 5, "restore": 10}
    again = replace(restoring, state=IncidentState.REPLACING, replaced_at=None)
    assert in_seconds(follow(job, again)) == {"detect": 5, "replace": 15}


def test_a_failure_without_a_control_plane_is_unaccounted_until_one_returns() -> None:
    job = accounting.charge(record(), 110, gap_seconds=20)
    job = accounting.charge(job, 196, gap_seconds=20)
    assert in_seconds(job) == {"train": 96}, "nothing says yet that training stopped"
    job = follow(job, opened(196.0, 150.0))
    assert in_seconds(job) == {"train": 50, "unaccounted": 46}
    job = accounting.charge(replace(job, incident=opened(197.0, 150.0)), 198, gap_seconds=20)
    late = replace(opened(197.0, 120.0), replaced_at=198.0)
    assert in_seconds(follow(job, late)) == {"train": 20, "unaccounted": 76, "detect": 1, "replace": 1}


def test_a_recovery_without_a_control_plane_counts_as_far_as_ranks_show_it() -> None:
    replacing = replace(opened(100.0, 100.0), state=IncidentState.REPLACING)
    job = accounting.charge(record(JobState.PREPARING, incident=replacing), 225, gap_seconds=20)
    assert in_seconds(job) == {"unaccounted": 125}
    assert in_seconds(follow(job, replacing)) == {"unaccounted": 125}
    restoring = replace(opened(100.0, 100.0), state=IncidentState.RESTORING, replaced_at=100.0)
    job = accounting.charge(record(JobState.STARTING, incident=restoring), 225, gap_seconds=20)
    assert in_seconds(job) == {"restore": 125}
    closed = replace(restoring, state=IncidentState.CLOSED, restored_at=106.0, closed_at=107.0)
    assert in_seconds(follow(job, closed)) == {"restore": 6, "rework": 1, "train": 118}


def test_spans_say_when_each_bucket_began() -> None:
    job = accounting.charge(record(), 150, gap_seconds=1000)
    job = accounting.charge(job, 200, gap_seconds=1000)
    job = follow(job, replace(opened(200.0, 195.0), replaced_at=198.0))
    assert [(span.start, span.bucket) for span in job.spans] == [
        (100_000_000, Bucket.TRAIN),
        (195_000_000, Bucket.DETECT),
    ]


def test_spans_before_the_end_of_the_last_incident_are_settled() -> None:
    job = accounting.charge(record(), 200, gap_seconds=1000)
    closed = replace(opened(200.0, 195.0), state=IncidentState.CLOSED, replaced_at=200.0, restored_at=200.0)
    job = accounting.charge(job, 230, gap_seconds=1000)
    job = follow(job, replace(closed, closed_at=210.0))
    kept, resolve_absence = accounting.settle(replace(job, last_incident_ended_at=210.0))
    assert [(span.bucket, end) for span, end in resolve_absence] == [
        (Bucket.TRAIN, 195_000_000),
        (Bucket.DETECT, 200_000_000),
        (Bucket.REWORK, 210_000_000),
    ]
    assert [(span.bucket, span.start) for span in kept.spans] == [(Bucket.TRAIN, 210_000_000)]
    assert kept.microseconds == job.microseconds
    assert accounting.settle(kept) == (kept, ())
    assert in_seconds(follow(kept, opened(230.0, 150.0)))["detect"] == 25, "resolve_absence time does not change"


def test_a_job_keeps_a_limited_number_of_unsettled_spans() -> None:
    job = record()
    for now in range(101, 101 + 3 * accounting.MOST_SPANS):
        job = accounting.charge(job, now, gap_seconds=1000, is_stalled=now % 2 == 0)
    kept, resolve_absence = accounting.settle(job)
    assert len(kept.spans) == accounting.MOST_SPANS
    assert len(resolve_absence) == 2 * accounting.MOST_SPANS
    assert accounting.charge(kept, 400, gap_seconds=1000).microseconds == {
        name: spent + (400_000_000 - 292_000_000) * (name == "train") for name, spent in job.microseconds.items()
    }


def test_time_before_the_first_new_step_is_no_training() -> None:
    first = record(boundary=Step(0), base_step=Step(0), max_boundary=Step(0))
    assert accounting.bucket(first) is accounting.bucket(first, is_stalled=True) is Bucket.START
    later = replace(first, boundary=Step(7), base_step=Step(7), max_boundary=Step(7))
    assert accounting.bucket(later) is Bucket.RESTORE
    assert accounting.bucket(replace(later, boundary=Step(8))) is Bucket.TRAIN
    job = accounting.charge(first, 200, gap_seconds=1000)
    assert in_seconds(accounting.recharge_first_step(job, 198.5)) == {"start": 98.5, "train": 1.5}
    assert in_seconds(accounting.recharge_first_step(job, 50.0)) == {"train": 100}
    assert accounting.recharge_first_step(job, 205.0) == job


def test_what_nobody_looked_after_stays_unaccounted_when_the_ranks_tell_when_they_began() -> None:
    job = accounting.charge(record(JobState.STARTING, boundary=Step(0), max_boundary=Step(0)), 105, gap_seconds=20)
    job = replace(accounting.charge(job, 225, gap_seconds=20), state=JobState.RUNNING, state_since=225.0)
    job = accounting.charge(job, 226, gap_seconds=20)
    assert in_seconds(accounting.recharge_first_step(job, 110.0)) == {"start": 5, "unaccounted": 120, "train": 1}


def test_the_end_of_a_phase_that_was_heard_of_late_is_charged_to_what_had_begun_by_then() -> None:
    restoring = replace(opened(100.0, 100.0), state=IncidentState.RESTORING, replaced_at=100.0)
    job = accounting.charge(record(incident=restoring), 110, gap_seconds=20)
    assert in_seconds(job) == {"restore": 10}
    reworking = replace(restoring, state=IncidentState.REWORKING, restored_at=107.0)
    assert in_seconds(follow(job, reworking)) == {"restore": 7, "rework": 3}
    closed = replace(reworking, state=IncidentState.CLOSED, closed_at=109.0)
    assert in_seconds(follow(job, closed)) == {"restore": 7, "rework": 2, "train": 1}
    assert follow(job, restoring) == job


def test_a_job_without_nodes_is_paused_once_it_had_some() -> None:
    assert accounting.bucket(record(JobState.QUEUED, started_at=150.0)) is Bucket.PAUSED
    assert accounting.bucket(record(JobState.ALLOCATING, started_at=150.0)) is Bucket.PAUSED


def test_training_on_fewer_nodes_counts_by_its_throughput() -> None:
    small = record(boundary=Step(5), member_count=3, missing_count=1)
    job = accounting.charge(small, 108.0, gap_seconds=9e9)
    assert in_seconds(job) == {"train": 6.0, "shortage": 2.0}
    assert accounting.ettr_ratio(job.microseconds) == 0.75
    assert accounting.mean_seconds_to_failure(job.microseconds, 2) == 4.0
    stopping = accounting.charge(replace(job, state=JobState.STOPPING), 109.0, gap_seconds=9e9)
    assert in_seconds(stopping) == {"train": 6.0, "shortage": 2.0, "stopping": 1.0}


def test_a_failure_takes_the_time_before_its_detection_from_both_parts_of_the_training_time() -> None:
    job = accounting.charge(record(boundary=Step(5), member_count=3, missing_count=1), 200.0, gap_seconds=9e9)
    found = follow(job, opened())
    assert in_seconds(found) == {"train": 71.25, "shortage": 23.75, "detect": 5.0}


def test_nodes_are_paid_for_while_they_work_for_the_job() -> None:
    job = accounting.charge(record(JobState.QUEUED), 160, gap_seconds=10, node_count=4)
    assert job.node_microseconds == 0
    job = accounting.charge(replace(job, state=JobState.RUNNING), 1960, gap_seconds=10, node_count=3)
    assert accounting.cost_usd(job.node_microseconds, 98.32) == pytest.approx(2 * 98.32)
    assert accounting.cost_usd(job.node_microseconds, None) is None


def test_nodes_are_idle_from_the_failure_to_the_end_of_the_rework() -> None:
    job = accounting.charge(record(node_count=4), 200, gap_seconds=10, node_count=3)
    incident = replace(opened(200.0, 195.0), node_microseconds_before=job.node_microseconds - 4 * 5_000_000)
    job = accounting.charge(replace(job, incident=incident), 210, gap_seconds=100, node_count=3)
    assert accounting.idle_node_microseconds(incident, job) == (4 * 5 + 3 * 10) * 1_000_000
    later = replace(incident, node_microseconds_before=job.node_microseconds + 5)
    assert accounting.idle_node_microseconds(later, job) == 0
    closed = replace(incident, closed_at=207.0)
    assert accounting.idle_node_microseconds(closed, job) == (4 * 5 + 3 * 7) * 1_000_000


@pytest.mark.parametrize(
    ("step", "before", "after", "expected"),
    [
        (7, (5, 100.0), (9, 104.0), 102.0),  # step 7 lies between two reported steps, so its time is interpolated
        (9, (5, 100.0), (9, 104.0), 104.0),
        (7, (5, None), (9, 104.0), 104.0),  # without a time for step 5, the time of step 9 counts
        (5, (5, 100.0), (9, 104.0), 104.0),
        (7, (5, 100.0), (9, None), 110.0),  # without a time for step 9, the time at which the report arrived counts
        (7, (5, 100.0), (9, 200.0), 110.0),  # the rank's clock is ahead, so the time at which the report arrived counts
        (7, (5, 50.0), (9, 60.0), 90.0),  # the rank's clock is behind, so the earliest possible time counts
        # the later step has an earlier time, because the two reports come from different clocks
        (7, (5, 104.0), (9, 100.0), 100.0),
    ],
)
def test_a_step_is_dated_by_the_ranks_own_stamps(
    step: int, before: tuple[int, float | None], after: tuple[int, float | None], expected: float
) -> None:
    low, high = (Step(before[0]), before[1]), (Step(after[0]), after[1])
    assert incidents.moment_of(Step(step), low, high, earliest=90.0, now=110.0) == expected


def test_an_open_incident_costs_on_between_two_passes() -> None:
    job = accounting.charge(record(node_count=4), 200, gap_seconds=10, node_count=3)
    incident = replace(opened(200.0, 195.0), node_microseconds_before=job.node_microseconds - 4 * 5_000_000)
    assert (
        accounting.idle_so_far(incident, job, 200.0)
        == accounting.idle_node_microseconds(incident, job)
        == 4 * 5 * 1_000_000
    )
    assert accounting.idle_so_far(incident, job, 210.5) == (4 * 5 + 3 * 10) * 1_000_000 + 3 * 500_000
    charged = accounting.charge(job, 210.5, gap_seconds=100, node_count=3)
    assert accounting.idle_so_far(incident, job, 210.5) == accounting.idle_node_microseconds(incident, charged), (
        "what the next pass will store"
    )
    assert accounting.idle_so_far(incident, job, 150.0) == 4 * 5 * 1_000_000, "a clock that stands behind"
    assert accounting.idle_so_far(incident, replace(job, node_count=0), 300.0) == 4 * 5 * 1_000_000, (
        "nobody works for it"
    )


def test_incident_phases_are_buckets_too() -> None:
    job = record(JobState.PREPARING, incident=opened())
    assert accounting.bucket(job) is Bucket.REPLACE
    assert accounting.bucket(record()) is Bucket.TRAIN
    assert accounting.bucket(record(), is_stalled=True) is Bucket.STALL


def test_ettr_with_and_without_the_time_that_the_job_had_no_nodes() -> None:
    spent = {"queue": 100, "provision": 20, "paused": 80, "start": 10, "train": 60, "rework": 30}
    assert accounting.ettr_ratio(spent) == pytest.approx(0.6)
    assert accounting.ettr_ratio(spent, is_queue_counted=True) == pytest.approx(0.2)
    assert accounting.ettr_ratio({}) is None
    assert accounting.ettr_ratio({"queue": 5}) is None
    assert accounting.ettr_ratio({"train": 1}) == accounting.ettr_ratio({"train": 3, "queue": 1}) == 1.0
    assert accounting.ettr_ratio({"train": 3, "queue": 1}, is_queue_counted=True) == 0.75
    assert accounting.ettr_ratio({"detect": 4}) == 0.0


def test_what_is_left_takes_the_mean_pace_of_what_is_finished_whatever_failures_cost() -> None:
    spent = {"queue": 500_000_000, "train": 40_000_000, "detect": 7_000_000, "rework": 90_000_000}
    assert accounting.remaining_seconds(spent, finished=20, target=50) == 60.0
    assert accounting.remaining_seconds(spent, finished=60, target=50) == 0.0
    assert accounting.remaining_seconds({"train": 1}, finished=1, target=2) == 1e-6
    assert accounting.remaining_seconds({"train": 1}, finished=1, target=1) == 0.0
    assert accounting.remaining_seconds({}, finished=1, target=2) is None


@pytest.mark.parametrize(
    ("train", "finished", "target"), [(0, 20, 50), (40, 0, 50), (40, -1, 50), (40, 20, -1), (40, 20, 0)]
)
def test_nothing_is_estimated_before_there_is_a_pace_and_a_target(train: int, finished: int, target: int) -> None:
    assert accounting.remaining_seconds({"train": train}, finished, target) is None


def test_mean_time_to_failure_counts_the_time_in_which_one_could_begin() -> None:
    spent = {"train": 50_000_000, "stall": 10_000_000, "rework": 7_000_000, "queue": 9_000_000}
    assert accounting.mean_seconds_to_failure(spent, 3) == pytest.approx(20)
    assert accounting.mean_seconds_to_failure(spent, 0) is None
    assert accounting.mean_seconds_to_failure({"train": 1}, 1) == 1e-6


def test_sources_are_told_by_rank_in_short() -> None:
    assert incidents.runs_of(["local", "local", "peer", "local"]) == (("local", 2), ("peer", 1), ("local", 1))


def test_phases_are_the_intervals_between_five_moments() -> None:
    incident = opened()
    incident = incidents.moved(incident, IncidentEvent.NODES_THERE, 210.0)
    incident = replace(incident, from_step=Step(28))
    incident = incidents.moved(incident, IncidentEvent.TRAINING_AGAIN, 213.0)
    assert incidents.phase_seconds(incident, 214.0) == {
        "detect_seconds": 5,
        "replace_seconds": 10,
        "restore_seconds": 3,
        "rework_seconds": 1,
    }
    incident = incidents.moved(incident, IncidentEvent.CAUGHT_UP, 220.0)
    assert incident.state is IncidentState.CLOSED
    assert incidents.phase_seconds(incident, 999.0) == {
        "detect_seconds": 5,
        "replace_seconds": 10,
        "restore_seconds": 3,
        "rework_seconds": 7,
    }
    assert incidents.lost_steps(incident) == 2


def test_phases_add_up_when_a_job_ends_in_the_middle() -> None:
    incident = incidents.moved(opened(), IncidentEvent.JOB_ENDED, 207.0)
    assert sum(incidents.phase_seconds(incident, 300.0).values()) == 12
    assert incident.is_given_up
    assert not incidents.ended_by_failure(incident, 208.0).is_given_up, "the next incident measures the rest"


def test_a_second_failure_measures_its_phases_anew() -> None:
    incident = incidents.moved(
        incidents.moved(opened(), IncidentEvent.NODES_THERE, 210.0), IncidentEvent.FAILED_AGAIN, 215.0
    )
    assert (incident.state, incident.replaced_at) == (IncidentState.REPLACING, None)
    assert sum(incidents.phase_seconds(incident, 220.0).values()) == 25


def test_the_gravest_cause_names_the_incident_and_every_fact_is_told_once() -> None:
    lost = Fault(
        cause=Cause.INSTANCE_TERMINATED, evidence=Recorded(text="EC2 says so"), at=190.0, node_id=NodeId("i-1")
    )
    incident = incidents.with_faults(opened(), (lost, lost))
    assert incident.cause is Cause.INSTANCE_TERMINATED
    assert incident.evidence == (Recorded(text="rank 1 ended"), Recorded(text="EC2 says so"))
    assert incident.instance_ids == ("i-1",)
    assert incident.failed_at == 190.0
    assert incident.lost_node_count == 1
    milder = incidents.with_faults(
        incident, (Fault(cause=Cause.RANK_EXIT, evidence=Recorded(text="rank 2 ended"), at=300.0),)
    )
    assert milder.cause is Cause.INSTANCE_TERMINATED


def test_an_incident_names_where_it_happened_whether_or_not_a_node_is_lost() -> None:
    ended = Fault(cause=Cause.RANK_EXIT, evidence=Recorded(text="rank 2 ended"), at=190.0, seen_on=(NodeId("i-2"),))
    lost = Fault(
        cause=Cause.INSTANCE_TERMINATED, evidence=Recorded(text="EC2 says so"), at=191.0, node_id=NodeId("i-1")
    )
    cut = Fault(
        cause=Cause.AGENT_LOST,
        evidence=Recorded(text="both cannot vote"),
        at=192.0,
        seen_on=(NodeId("i-2"), NodeId("i-3")),
    )
    incident = incidents.with_faults(opened(), (ended, lost, cut))
    assert (incident.faulted_instance_ids, incident.instance_ids) == (("i-2", "i-1", "i-3"), ("i-1",))


def test_a_node_that_a_person_left_is_none_that_was_lost() -> None:
    asked = Fault(
        cause=Cause.REQUESTED, evidence=Recorded(text="a user requested to drain i-1"), at=190.0, node_id=NodeId("i-1")
    )
    taken = Fault(cause=Cause.NOTICE, evidence=Recorded(text="AWS announced for i-2"), at=190.0, node_id=NodeId("i-2"))
    incident = incidents.with_faults(opened(), (asked, taken, taken))
    assert (incident.instance_ids, incident.lost_node_count) == (("i-1", "i-2"), 1)


@pytest.mark.parametrize(
    ("unwatched", "seconds"),
    [
        pytest.param(None, None, id="always watched"),
        pytest.param((150.0, 196.0), 1, id="one second after the failure"),
        pytest.param((150.0, 195.5), None, id="less than one second"),
        pytest.param((198.0, 500.0), 2, id="until the detection"),
        pytest.param((201.0, 500.0), None, id="after the detection"),
    ],
)
def test_an_incident_notes_the_absence_of_a_control_plane_before_its_detection(
    unwatched: tuple[float, float] | None, seconds: int | None
) -> None:
    noted = incidents.with_absence(opened(200.0, 195.0), unwatched)
    assert incidents.absent_seconds(noted.evidence) == seconds
    later = incidents.with_absence(replace(noted, failed_at=194.0), (190.0, 200.0))
    assert incidents.absent_seconds(later.evidence) == 6, "one note"
    assert len(later.evidence) == 2


@pytest.mark.parametrize(("restored", "lost"), [(None, None), (28, 2), (30, 0), (31, 0)])
def test_lost_steps_are_those_before_the_failure_that_are_repeated(restored: int | None, lost: int | None) -> None:
    incident = replace(opened(), from_step=None if restored is None else Step(restored))
    assert incidents.lost_steps(incident) == lost


def test_a_closed_incident_stays_closed() -> None:
    closed = incidents.moved(opened(), IncidentEvent.JOB_ENDED, 207.0)
    with pytest.raises(InvalidTransition, match="Recorded"):
        incidents.moved(closed, IncidentEvent.FAILED_AGAIN, 208.0)


def test_a_failure_cannot_begin_before_the_end_of_the_previous_incident() -> None:
    fault = Fault(cause=Cause.RANK_EXIT, evidence=Recorded(text="rank 1 ended"), at=195.0)

    def opened_after(earliest: float) -> IncidentRecord:
        return incidents.opened(
            RUN, Generation(1), (fault,), decision=RestartsRanks(), reached=Step(30), now=200.0, earliest=earliest
        )

    assert (opened_after(190.0).failed_at, opened_after(197.0).failed_at) == (195.0, 197.0)
    stepped_back = opened_after(205.0)
    assert (stepped_back.failed_at, stepped_back.opened_at) == (205.0, 205.0), "the clock has stepped back"
    late = replace(fault, at=150.0, evidence=Recorded(text="rank 2 ended"))
    assert incidents.with_faults(opened_after(190.0), (late,)).failed_at == 190.0
    assert incidents.with_failure_at(opened_after(190.0), 192.0).failed_at == 192.0
    assert incidents.with_failure_at(opened_after(190.0), 199.0).failed_at == 195.0


def test_a_recovery_ends_no_later_than_the_next_failure() -> None:
    restored = replace(opened(), state=IncidentState.REWORKING, replaced_at=202.0, restored_at=210.0)
    ended = incidents.ended_by_failure(restored, 205.0)
    assert (ended.state, ended.restored_at, ended.closed_at) == (IncidentState.CLOSED, 205.0, 205.0)
    ended = incidents.ended_by_failure(replace(restored, state=IncidentState.CLOSED, closed_at=212.0), 211.0)
    assert (ended.restored_at, ended.closed_at) == (210.0, 211.0)
    before = replace(restored, state=IncidentState.CLOSED, closed_at=212.0)
    assert incidents.ended_by_failure(before, 220.0) == before


def test_a_failure_during_the_launch_after_a_pause_takes_time_from_that_launch_only() -> None:
    job = accounting.charge(record(JobState.QUEUED), 102, gap_seconds=1000)
    launching = replace(job, state=JobState.STARTING, boundary=Step(0))
    job = accounting.charge(launching, 120, gap_seconds=1000)
    found = follow(job, opened(120.0, 110.0))
    assert in_seconds(found) == {"queue": 2, "restore": 8, "detect": 10}
    assert in_seconds(follow(found, opened(120.0, 103.0))) == {"queue": 2, "restore": 1, "detect": 17}
