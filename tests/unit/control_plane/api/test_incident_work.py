"""People own incidents, and add notes to incidents and jobs.

The service finds similar incidents and writes the post-mortem.
"""

from __future__ import annotations

from datetime import timedelta

import msgspec
import pytest

from control_plane.cloud.errors import CloudUnavailable
from control_plane.core.observed.facts import ControlPlaneAbsent, Recorded
from control_plane.core.observed.incidents import FailureRecord, Repeated
from control_plane.core.observed.reasons import GaveUp
from control_plane.db import events, incidents, jobs, nodes
from control_plane.db.leases import Leaser
from control_plane.db.notes import MAX_NOTES
from control_plane.db.tokens import Role
from everstep.protocol.agent_messages import ExitClass
from everstep.protocol.ids import Generation, Step
from tests.unit.control_plane.api.conftest import START, refused, without_metadata
from tests.unit.control_plane.api.test_logs import line, put
from tests.unit.control_plane.api.test_results import Job


@pytest.fixture
def job(service, client, fleet, source) -> Job:
    made = Job(service, client, source)
    made.launch(1)
    made.open_incident("inc-1")
    return made


def told(client, kind: str) -> list[str]:
    return [event["Message"] for event in client.list_events()["Events"] if event["Type"] == kind]


# Tests of the owner of an incident


@pytest.mark.covers("UpdateIncident.IncidentId", "UpdateIncident.Owner")
def test_an_owner_is_set_changed_and_removed_and_each_change_is_an_event(client, job, service):
    assert "Owner" not in client.describe_incident(IncidentId="inc-1")
    assert client.update_incident(IncidentId="inc-1", Owner=" ann ")["Owner"] == "ann"
    client.update_incident(IncidentId="inc-1", Owner="ann")
    assert client.update_incident(IncidentId="inc-1")["Owner"] == "ann"
    assert client.list_incidents()["Incidents"][0]["Owner"] == "ann"
    assert "Owner" not in client.update_incident(IncidentId="inc-1", Owner="")
    name = f"first administrator, {client.get_caller_identity()['TokenId']}"
    assert told(client, "IncidentOwnerChanged") == [
        f"{name} made ann the owner of the incident inc-1.",
        f"{name} removed the owner ann of the incident inc-1.",
    ]
    with refused("AccessDeniedException"):
        service.client(service.token(Role.VIEWER)).update_incident(IncidentId="inc-1", Owner="eve")
    with refused("ResourceNotFoundException"):
        service.client(service.token(Role.SUBMITTER, "other")).update_incident(IncidentId="inc-1", Owner="eve")


# Tests of notes about incidents and jobs


@pytest.mark.covers("CreateIncidentNote.IncidentId", "CreateIncidentNote.Text", "CreateIncidentNote.ClientRequestToken")
def test_notes_of_an_incident_have_their_author_and_are_stored_once(client, job, service):
    submitter = service.client(service.token(Role.SUBMITTER))
    first = client.create_incident_note(IncidentId="inc-1", Text="the switch", ClientRequestToken="t")
    service.clock.advance(5)
    again = client.create_incident_note(IncidentId="inc-1", Text="the switch", ClientRequestToken="t")
    assert without_metadata(again) == without_metadata(first)
    second = submitter.create_incident_note(IncidentId="inc-1", Text="no, the cable", ClientRequestToken="t")
    notes = client.describe_incident(IncidentId="inc-1")["Notes"]
    assert [(note["NoteId"], note["Text"], note["Author"]) for note in notes] == [
        (first["NoteId"], "the switch", f"first administrator, {client.get_caller_identity()['TokenId']}"),
        (second["NoteId"], "no, the cable", submitter.get_caller_identity()["TokenId"]),
    ]
    assert (notes[1]["CreationTime"] - notes[0]["CreationTime"]).total_seconds() == 5
    assert "Notes" not in client.list_incidents()["Incidents"][0]
    assert client.list_training_job_notes(TrainingJobName="gpt")["Notes"] == []
    messages = told(client, "IncidentNoteCreated")
    assert len(messages) == 2
    assert messages[0].endswith("added a note to the incident inc-1: the switch")
    with refused("ConflictException", "used for a note with another text"):
        client.create_incident_note(IncidentId="inc-1", Text="other", ClientRequestToken="t")
    with refused("AccessDeniedException"):
        service.client(service.token(Role.VIEWER)).create_incident_note(IncidentId="inc-1", Text="x")
    with refused("ResourceNotFoundException"):
        service.client(service.token(Role.SUBMITTER, "other")).create_incident_note(IncidentId="inc-1", Text="x")
    with refused("ValidationException"):
        client.create_incident_note(IncidentId="inc-1", Text="")


@pytest.mark.covers(
    "CreateTrainingJobNote.TrainingJobName",
    "CreateTrainingJobNote.Text",
    "CreateTrainingJobNote.ClientRequestToken",
    "ListTrainingJobNotes.TrainingJobName",
)
def test_notes_of_a_job_stay_after_its_end_and_go_with_it(client, job, service):
    client.create_training_job_note(TrainingJobName="gpt", Text="a baseline", ClientRequestToken="t")
    client.create_training_job_note(TrainingJobName=job.run, Text="a baseline", ClientRequestToken="t")
    client.create_incident_note(IncidentId="inc-1", Text="of the incident")
    job.end(job.run)
    client.create_training_job_note(TrainingJobName="gpt", Text=f"{'long ' * 100}end")
    notes = client.list_training_job_notes(TrainingJobName="gpt")["Notes"]
    assert [note["Text"][:10] for note in notes] == ["a baseline", "long long "]
    short, long = told(client, "TrainingJobNoteCreated")
    assert short.endswith(" added a note to gpt: a baseline")
    assert long.endswith("long …")
    assert client.describe_incident(IncidentId="inc-1")["Notes"][0]["Text"] == "of the incident"
    for operation, given in (("create_training_job_note", {"Text": "x"}), ("list_training_job_notes", {})):
        with refused("ResourceNotFoundException"):
            stranger = service.client(service.token(Role.SUBMITTER, "other"))
            getattr(stranger, operation)(TrainingJobName="gpt", **given)
    with refused("AccessDeniedException"):
        service.client(service.token(Role.VIEWER)).create_training_job_note(TrainingJobName="gpt", Text="x")
    with service.database.write() as session:
        jobs.remove(session, job.run)
    with refused("ResourceNotFoundException"):
        client.list_training_job_notes(TrainingJobName="gpt")


def test_an_incident_and_a_job_have_at_most_a_hundred_notes_each(client, job):
    for number in range(MAX_NOTES):
        client.create_incident_note(IncidentId="inc-1", Text=f"note {number}", ClientRequestToken=f"t{number}")
    with refused("ConflictException", "he incident 'inc-1' has 100 notes already"):
        client.create_incident_note(IncidentId="inc-1", Text="one more")
    client.create_incident_note(IncidentId="inc-1", Text="note 0", ClientRequestToken="t0")
    client.create_training_job_note(TrainingJobName="gpt", Text="another subject")
    assert len(client.describe_incident(IncidentId="inc-1")["Notes"]) == MAX_NOTES


# Tests of similar incidents


def incident(job: Job, name: str, number: int, *, cause: str = "instance_terminated", instance: str = "i-5") -> None:
    job.open_incident(name, number)
    job.write(incidents.change, name, cause=cause, faulted_instance_ids=(instance,), instance_ids=(), lost_steps=number)


@pytest.mark.covers("ListSimilarIncidents.IncidentId", "ListSimilarIncidents.MaxResults")
def test_similar_incidents_share_cause_and_project_and_the_instance_comes_first(client, job, service):
    incident(job, "other-cause", 9, cause="hang", instance="i-1")
    incident(job, "elsewhere", 8)
    incident(job, "same-type", 3, instance="i-6")
    incident(job, "same-instance", 2, instance="i-2")
    job.write(incidents.change, "same-instance", closed_at=START + timedelta(seconds=60))
    with service.database.write() as session:
        lease = Leaser("test", 3.0, lambda: 0.0).claim(session, "fleet", "main")
        for node, kind in (("i-1", "p5.48xlarge"), ("i-5", "g6.xlarge"), ("i-6", "p5.48xlarge")):
            nodes.change(
                session, lease, node, initial_state="spare", now=service.clock(), state="spare", instance_type=kind
            )
    found = client.list_similar_incidents(IncidentId="inc-1")["Incidents"]
    assert [(each["IncidentId"], each["Likeness"], each["Outcome"], each["LostSteps"]) for each in found] == [
        ("same-instance", ["Instance", "InstanceType", "Fleet"], "Recovered", 2),
        ("same-type", ["InstanceType", "Fleet"], "Open", 3),
        ("elsewhere", ["Fleet"], "Open", 8),
    ]
    assert len(client.list_similar_incidents(IncidentId="inc-1", MaxResults=1)["Incidents"]) == 1
    with refused("ResourceNotFoundException"):
        stranger = service.client(service.token(Role.VIEWER, "other"))
        stranger.list_similar_incidents(IncidentId="inc-1")


# Tests of what an incident reports: its verdict (what failed, the job's state), actions and post-mortem


def test_an_incident_says_its_outcome_its_verdict_and_what_to_do(client, job, service):
    described = client.describe_incident(IncidentId="inc-1")
    assert (described["Project"], described["Outcome"]) == ("default", "Open")
    assert described["Verdict"].startswith("i-1 and i-2 were terminated. Everstep is recovering the job")
    assert described["Actions"] == [], "Everstep recovers the job, so nobody has to act"
    (listed,) = client.list_incidents()["Incidents"]
    assert "Verdict" not in listed
    assert listed["Headline"] == described["Headline"] == "An instance was terminated"
    with service.database.write() as session:
        lease = Leaser("test", 3.0, lambda: 0.0).claim(session, "fleet", "main")
        nodes.change(session, lease, "i-1", initial_state="held", now=service.clock(), state="held", hold="inspection")
        nodes.change(session, lease, "i-9", initial_state="spare", now=service.clock(), state="spare")
    job.checkpoint(4)
    job.write(incidents.change, "inc-1", closed_at=START + timedelta(seconds=5))
    job.write(jobs.transition, before="queued", after="failed", now=START + timedelta(seconds=5), reason="error")
    job.write(jobs.change, ended_at=START + timedelta(seconds=5), max_boundary=30)
    described = client.describe_incident(IncidentId="inc-1")
    assert described["Outcome"] == "JobFailed"
    assert described["Verdict"].endswith("The job failed; 26 steps are lost.")
    assert described["Headline"] == "An instance was terminated"
    assert described["ContinuingCost"].startswith("1 idle node ")
    assert [(each["Urgency"], each["Command"]) for each in described["Actions"]] == [
        ("Now", "everstep jobs logs gpt --tail 50"),
        ("Later", "everstep nodes describe i-1"),
    ]


def test_an_open_incident_says_what_aws_does_not_launch_and_when_the_next_attempt_is(client, job, service):
    job.write(incidents.change, "inc-1", evidence=(Recorded(text="x"), ControlPlaneAbsent(seconds=9, until=0.0)))
    assert "Wait" not in client.describe_incident(IncidentId="inc-1")
    next_at = START + timedelta(minutes=5)
    wait = {"missing_count": 1, "message": "no p5", "failed_count": 3, "next_attempt_at": next_at.timestamp()}
    job.write(jobs.change, memo={"capacity_wait": wait})
    described = client.describe_incident(IncidentId="inc-1")
    assert described["Wait"] == client.describe_training_job(TrainingJobName="gpt")["CapacityWait"]
    assert described["Wait"] == {
        "MissingNodeCount": 1,
        "InstanceType": "p5.48xlarge",
        "AvailabilityZone": "us-east-1a",
        "Message": "no p5",
        "IsOutOfCapacity": False,
        "FailedAttemptCount": 3,
        "NextAttemptTime": next_at,
    }
    assert described["Why"] == "X. Outage: cause unknown."
    assert described["Done"][0].endswith("requested 1 p5.48xlarge 3 times: AWS launches none.")
    job.write(jobs.change, memo={"capacity_wait": {**wait, "is_shortage": True}})
    short = client.describe_incident(IncidentId="inc-1")
    assert short["Wait"]["IsOutOfCapacity"]
    assert short["Done"][0].endswith("requested 1 p5.48xlarge 3 times: AWS has none.")
    (listed,) = client.list_incidents()["Incidents"]
    assert listed["ControlPlaneAbsentSeconds"] == described["ControlPlaneAbsentSeconds"] == 9
    assert not {"Why", "Done", "Wait"} & listed.keys()
    job.write(incidents.change, "inc-1", closed_at=START + timedelta(seconds=5))
    assert "Wait" not in client.describe_incident(IncidentId="inc-1")


def test_the_list_of_incidents_names_the_exception_with_which_the_script_ended_the_job(client, job):
    ended_at = START + timedelta(seconds=5)
    failure = FailureRecord(
        generation=Generation(1),
        step=Step(7),
        exit_class=ExitClass.ERROR,
        code=1,
        at=0.0,
        max_boundary=Step(7),
        error="KeyError: 'labels'",
    )
    reason = GaveUp(because=Repeated(count=3, failure=failure))
    job.write(incidents.change, "inc-1", cause="rank_exit", closed_at=ended_at)
    job.write(jobs.transition, before="queued", after="failed", now=ended_at, reason="x")
    job.write(jobs.change, ended_at=ended_at, memo={"reason": msgspec.to_builtins(reason)})
    (listed,) = client.list_incidents()["Incidents"]
    assert listed["Headline"] == "The training script raised KeyError"
    assert client.describe_incident(IncidentId="inc-1")["Headline"] == listed["Headline"]


def test_everstep_is_said_to_have_terminated_only_the_nodes_that_it_gave_up(client, job, service):
    with service.database.write() as session:
        lease = Leaser("test", 3.0, lambda: 0.0).claim(session, "fleet", "main")
        by_everstep, by_person = {"replaced_at": START}, {"replaced_at": START, "release": "terminate"}
        for name, changes in (("i-0", by_person), ("i-1", by_everstep), ("i-2", {})):
            nodes.change(session, lease, name, initial_state="gone", now=START, state="gone", **changes)
    job.write(incidents.change, "inc-1", instance_ids=("i-0", "i-1", "i-2"))
    assert "terminated i-1" in client.describe_incident(IncidentId="inc-1")["Done"][0]


@pytest.mark.covers("ExportIncident.IncidentId", "ExportIncident.Format")
def test_a_post_mortem_has_the_log_the_stacks_the_notes_and_the_events(client, job, service):
    client.create_incident_note(IncidentId="inc-1", Text="AWS confirmed it.")
    client.update_incident(IncidentId="inc-1", Owner="ann")
    put(job, 0, line("step 12", 100), line("after the failure", 60_000))
    with service.database.write() as session:
        for seconds, words in ((2, "all ranks stand still"), (900, "much later")):
            event = events.NewEvent(
                at=START + timedelta(seconds=seconds),
                type="RanksHang",
                message=words,
                project="default",
                job_name="gpt",
                detail={"stacks": [{"ranks": [0, 1], "text": f"train.py: {words}"}]},
            )
            events.append(session, event)
    job.write(incidents.change, "inc-1", closed_at=START + timedelta(seconds=5))
    answer = client.export_incident(IncidentId="inc-1", Format="markdown")
    assert answer["FileName"] == "post-mortem-gpt-2026-03-01-1200.md"
    for words in (
        "# Post-mortem: job gpt, 2026-03-01 12:00 UTC",
        "- Owner: ann",
        "12:00:00 rank 0  step 12",
        "all ranks stand still",
        "Ranks 0-1:\n\n```text\ntrain.py: all ranks stand still\n```",
        "> AWS confirmed it.",
        "| **interruption** | 5.00 |",
    ):
        assert words in answer["Content"]
    assert "after the failure" not in answer["Content"]
    assert "much later" not in answer["Content"]
    with refused("ResourceNotFoundException"):
        service.client(service.token(Role.VIEWER, "other")).export_incident(IncidentId="inc-1")


def test_a_post_mortem_without_the_log_says_why(client, job, service, monkeypatch):
    assert "The job's log has no lines before the failure." in client.export_incident(IncidentId="inc-1")["Content"]

    def fail(*_: object) -> None:
        raise CloudUnavailable("the store is away")

    monkeypatch.setattr(service.objects, "list", fail)
    content = client.export_incident(IncidentId="inc-1")["Content"]
    assert "S3 did not return the log: the store is away" in content
    assert "## Impact" in content
