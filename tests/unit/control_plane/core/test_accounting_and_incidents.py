from __future__ import annotations

from dataclasses import replace

import pytest

from control_plane.core import accounting, incidents
from control_plane.core.incidents import Fault
from control_plane.core.observed import Cause, IncidentRecord, JobRecord
from control_plane.core.states import IncidentEvent, IncidentState, JobState
from control_plane.errors import InvalidTransition
from everstep.protocol.ids import Generation, NodeId, RunId, Step

RUN = RunId("0" * 32)


def record(state: JobState = JobState.RUNNING, **changes: object) -> JobRecord:
    return JobRecord(state=state, reason="", created_at=100.0, state_since=100.0, **changes)  # type: ignore[arg-type]


def opened(at: float = 200.0, failed: float = 195.0) -> IncidentRecord:
    fault = Fault(cause=Cause.RANK_EXIT, evidence="rank 1 ended", at=failed)
    return incidents.opened(RUN, Generation(1), (fault,), decision="restart", reason="", reached=Step(30), now=at)


def test_every_second_is_in_one_bucket() -> None:
    job = record(JobState.QUEUED)
    for now, state in (
        (110, JobState.ALLOCATING),
        (125, JobState.PREPARING),
        (130, JobState.RUNNING),
        (200, JobState.STOPPING),
        (207, JobState.STOPPED),
    ):
        job = replace(accounting.charge(job, now, gap_seconds=100), state=state)
    assert job.seconds == {"queue": 10, "provision": 15, "start": 5, "train": 70, "stopping": 7}
    assert accounting.charge(job, 300, gap_seconds=100) is job


def test_a_gap_in_a_launch_is_unaccounted_and_one_in_training_is_training() -> None:
    assert accounting.charge(record(JobState.LOADING), 200, gap_seconds=10).seconds == {"unaccounted": 100}
    assert accounting.charge(record(JobState.RUNNING), 200, gap_seconds=10).seconds == {"train": 100}


def test_a_clock_that_goes_back_charges_nothing() -> None:
    job = accounting.charge(record(), 200, gap_seconds=10)
    assert accounting.charge(job, 150, gap_seconds=10) is job


def test_the_time_before_detection_moves_out_of_training() -> None:
    job = accounting.charge(record(), 200, gap_seconds=10)
    moved = accounting.recharge_detection(job, 5.0)
    assert moved.seconds == {"train": 95, "detect": 5}
    assert accounting.recharge_detection(job, 500.0).seconds == {"train": 0, "detect": 100}


def test_incident_phases_are_buckets_too() -> None:
    job = record(JobState.PREPARING, incident=opened())
    assert accounting.bucket(job) is accounting.Bucket.REPLACE
    assert accounting.bucket(record()) is accounting.Bucket.TRAIN
    assert accounting.bucket(record(), is_stalled=True) is accounting.Bucket.STALL


def test_ettr_excludes_the_queue() -> None:
    assert accounting.ettr_ratio({"queue": 100.0, "train": 60.0}, 200.0, 100.0) == pytest.approx(0.6)
    assert accounting.ettr_ratio({}, 200.0, None) is None


def test_phases_are_the_intervals_between_five_moments() -> None:
    incident = opened()
    incident = incidents.moved(incident, IncidentEvent.NODES_THERE, 210.0)
    incident = replace(incident, from_step=Step(28))
    incident = incidents.moved(incident, IncidentEvent.TRAINING_AGAIN, 213.0)
    assert incidents.phase_seconds(incident, 214.0) == {"detect_seconds": 5, "replace_seconds": 10, "restore_seconds": 3, "rework_seconds": 1}
    incident = incidents.moved(incident, IncidentEvent.CAUGHT_UP, 220.0)
    assert incident.state is IncidentState.CLOSED
    assert incidents.phase_seconds(incident, 999.0) == {"detect_seconds": 5, "replace_seconds": 10, "restore_seconds": 3, "rework_seconds": 7}
    assert incidents.lost_steps(incident) == 2


def test_phases_add_up_when_a_job_ends_in_the_middle() -> None:
    incident = incidents.moved(opened(), IncidentEvent.JOB_ENDED, 207.0)
    assert sum(incidents.phase_seconds(incident, 300.0).values()) == 12


def test_a_second_failure_measures_its_phases_anew() -> None:
    incident = incidents.moved(incidents.moved(opened(), IncidentEvent.NODES_THERE, 210.0), IncidentEvent.FAILED_AGAIN, 215.0)
    assert (incident.state, incident.replaced_at) == (IncidentState.REPLACING, None)
    assert sum(incidents.phase_seconds(incident, 220.0).values()) == 25


def test_the_gravest_cause_names_the_incident_and_every_fact_is_told_once() -> None:
    lost = Fault(cause=Cause.INSTANCE_TERMINATED, evidence="EC2 says so", at=190.0, node_id=NodeId("i-1"))
    incident = incidents.with_faults(opened(), (lost, lost))
    assert incident.cause is Cause.INSTANCE_TERMINATED
    assert incident.evidence == ("rank 1 ended", "EC2 says so")
    assert incident.instance_ids == ("i-1",)
    assert incident.failed_at == 190.0
    milder = incidents.with_faults(incident, (Fault(cause=Cause.RANK_EXIT, evidence="rank 2 ended", at=300.0),))
    assert milder.cause is Cause.INSTANCE_TERMINATED


def test_a_closed_incident_stays_closed() -> None:
    closed = incidents.moved(opened(), IncidentEvent.JOB_ENDED, 207.0)
    with pytest.raises(InvalidTransition, match="rank 1 ended"):
        incidents.moved(closed, IncidentEvent.FAILED_AGAIN, 208.0)
