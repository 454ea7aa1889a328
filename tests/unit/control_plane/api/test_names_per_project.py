"""Names of jobs are unique per project, and operations accept a run id in place of a name.

The tests create a job with the same name in two projects. Then they call operations with the tokens of the projects and
with an administrator's token.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from datetime import timedelta
from typing import Any

import pytest

from control_plane.core import hangs
from control_plane.db import drills, events, incidents, jobs
from control_plane.db.drills import NewDrill
from control_plane.db.events import NewEvent
from control_plane.db.leases import Leaser
from control_plane.db.tokens import Role
from everstep.cli import main as cli
from everstep.protocol.plan import ObjectReference
from tests.postgresql import BOTH_ENGINES
from tests.unit.control_plane.api.conftest import BUCKET, START, Service, refused
from tests.unit.control_plane.db.test_nouns import incident

PROJECTS = ("art", "speech")
GPT = {"TrainingJobName": "gpt"}


@pytest.fixture(params=BOTH_ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Member:
    """A submitter of one project who owns a job named `gpt`."""

    def __init__(self, service: Service, project: str, client: Any, source_id: str) -> None:
        self.service = service
        self.project = project
        self.client = client
        self.source_id = source_id
        self.run_id = self.create()

    def create(self, name: str = "gpt") -> str:
        source = {"SourceId": self.source_id}
        made = self.client.create_training_job(
            TrainingJobName=name, Source=source, EntryPoint="train.py", NodeCount=1, FleetName="main"
        )
        return str(made["RunId"])

    def describe(self, text: str = "gpt") -> tuple[str, str]:
        job = self.client.describe_training_job(TrainingJobName=text)
        return job["RunId"], job["Project"]

    def write(self, function: Any, *arguments: Any, **named: Any) -> None:
        """Call a function that writes for the member's job. Such a write needs the job's lease."""
        with self.service.database.write() as session:
            lease = Leaser("test", 3.0, lambda: 0.0).claim(session, "job", self.run_id)
            function(session, lease, *arguments, **named)

    def end(self) -> None:
        self.write(jobs.transition, before="queued", after="completed", now=START, reason="It ended.", ended_at=START)


@pytest.fixture
def members(service: Service, client: Any, fleet: str, source: dict[str, str]) -> Iterator[list[Member]]:
    source_id = source["SourceId"]
    archive = service.objects.get(ObjectReference(bucket=BUCKET, key=f"projects/default/sources/{source_id}.tar.gz"))
    with ExitStack() as stack:
        found = []
        for project in PROJECTS:
            theirs = stack.enter_context(closing(service.client(service.token(Role.SUBMITTER, project))))
            theirs.upload_source(Body=archive)
            found.append(Member(service, project, theirs, source_id))
        yield found


def test_each_project_describes_lists_and_stops_its_own_job(members: list[Member]) -> None:
    for member in members:
        assert member.describe() == member.describe(member.run_id) == (member.run_id, member.project)
        place = member.client.describe_training_job(TrainingJobName="gpt")["CheckpointConfig"]["S3Uri"]
        assert place == f"s3://{BUCKET}/projects/{member.project}/jobs/gpt/run={member.run_id}/checkpoints/"
        listed = member.client.list_training_jobs()["TrainingJobSummaries"]
        assert [job["RunId"] for job in listed] == [member.run_id]
        with refused("ConflictException", match="already a training job named 'gpt'"):
            member.create()
    members[0].client.stop_training_job(**GPT)
    statuses = [member.client.describe_training_job(**GPT)["TrainingJobStatus"] for member in members]
    assert statuses == ["Stopping", "InProgress"]


def test_a_run_id_of_another_project_does_not_exist(members: list[Member]) -> None:
    art, speech = members
    theirs = {"TrainingJobName": speech.run_id}
    for operation in ("describe_training_job", "stop_training_job", "describe_protection", "list_incidents"):
        with refused("ResourceNotFoundException", match=f"no training job named '{speech.run_id}'"):
            getattr(art.client, operation)(**theirs)
    assert art.client.list_events(**theirs)["Events"] == []


def test_an_administrator_needs_a_run_id_for_an_ambiguous_name(client: Any, members: list[Member]) -> None:
    art, speech = members
    both = f"'gpt' in the projects art and speech; use a RunId: {art.run_id} \\(art\\), {speech.run_id} \\(speech\\)"
    for operation in ("describe_training_job", "stop_training_job", "delete_training_job", "list_checkpoints"):
        with refused("ConflictException", match=both):
            getattr(client, operation)(**GPT)
    for member in members:
        job = client.describe_training_job(TrainingJobName=member.run_id)
        assert (job["TrainingJobName"], job["Project"]) == ("gpt", member.project)
    assert client.stop_training_job(TrainingJobName=speech.run_id)["RunId"] == speech.run_id
    assert [member.client.describe_training_job(**GPT)["TrainingJobStatus"] for member in members] == [
        "InProgress",
        "Stopping",
    ]


def test_an_administrator_uses_a_name_that_one_project_has(client: Any, members: list[Member]) -> None:
    run_id = members[1].create("bert")
    assert client.describe_training_job(TrainingJobName="bert")["RunId"] == run_id


def test_the_command_line_prints_the_run_ids_and_accepts_one(
    service: Service, members: list[Member], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERSTEP_ENDPOINT_URL", f"http://{service.address}")
    monkeypatch.setenv("EVERSTEP_TOKEN", service.admin_token)

    def run(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["everstep", *words])
        with pytest.raises(SystemExit) as end:
            cli.main()
        printed = capsys.readouterr()
        return int(end.value.code or 0), printed.out + printed.err

    code, printed = run("jobs", "stop", "gpt")
    assert code != 0
    for member in members:
        assert f"{member.run_id} ({member.project})" in printed.replace("\n", " ")
    code, printed = run("jobs", "describe", members[1].run_id, "--output", "json")
    assert (code, json.loads(printed)["Project"]) == (0, "speech")


@pytest.mark.parametrize("request_", ["take_over", "pause"])
def test_a_request_of_one_project_changes_its_own_job_only(members: list[Member], request_: str) -> None:
    for member in members:
        member.write(jobs.transition, before="queued", after="running", now=START, reason="It trains.")
    undo = {"take_over": "hand_back", "pause": "resume"}[request_]
    field = {"take_over": "TakenOverTime", "pause": "PauseRequestedTime"}[request_]

    def requested() -> list[bool]:
        return [field in member.client.describe_training_job(**GPT) for member in members]

    for member in members:
        getattr(member.client, f"{request_}_training_job")(**GPT)
    assert requested() == [True, True]
    getattr(members[0].client, f"{undo}_training_job")(**GPT)
    assert requested() == [False, True]


def test_a_deleted_name_is_free_in_its_project(members: list[Member]) -> None:
    art, speech = members
    art.end()
    art.client.delete_training_job(**GPT)
    with refused("ResourceNotFoundException"):
        art.describe()
    assert speech.describe() == (speech.run_id, "speech")
    again = art.create()
    assert again != art.run_id
    assert art.describe() == (again, "art")


def test_lists_of_a_project_contain_its_own_job_only(client: Any, members: list[Member]) -> None:
    for member in members:
        opened = incident(phase="replace", project=member.project, opened_at=START, failed_at=START)
        member.write(incidents.open_incident, f"inc-{member.project}", opened)
        with member.service.database.write() as session:
            new = NewDrill(
                run_id=member.run_id,
                job_name="gpt",
                fleet_name="main",
                project=member.project,
                kind="kill-rank",
                node_id="i-1",
                rank=0,
                requested_by="a person",
                requested_at=START,
                state="requested",
            )
            drills.create(session, new)

    def found(caller: Any, text: str) -> tuple[set[str], int, int]:
        listed = caller.list_incidents(TrainingJobName=text)["Incidents"]
        drilled = caller.list_drills(TrainingJobName=text)["Drills"]
        happened = caller.list_events(TrainingJobName=text)["Events"]
        return {each["IncidentId"] for each in listed}, len(drilled), len(happened)

    for member in members:
        own = ({f"inc-{member.project}"}, 1, 1)
        assert found(member.client, "gpt") == found(member.client, member.run_id) == found(client, member.run_id) == own
    assert found(client, "gpt") == ({"inc-art", "inc-speech"}, 2, 2)


def test_an_incident_never_cites_an_event_of_another_project(client: Any, members: list[Member]) -> None:
    for member in members:
        opened = incident(phase="replace", project=member.project, opened_at=START, failed_at=START)
        member.write(incidents.open_incident, f"inc-{member.project}", opened)
    hang = NewEvent(at=START + timedelta(seconds=1), type=hangs.PROVEN, message="m", project="speech", job_name="gpt")
    with members[1].service.database.write() as session:
        events.append(session, hang)
    cited = {name: client.describe_incident(IncidentId=f"inc-{name}").get("StacksEventId") for name in PROJECTS}
    assert cited["art"] is None
    assert cited["speech"] is not None


def test_a_name_never_has_the_form_of_a_run_id(members: list[Member]) -> None:
    with refused("ValidationException", match="TrainingJobName: has the form of a RunId"):
        members[0].create("0123456789abcdef" * 2)
    members[0].create("0123456789abcdef" * 2 + "0")
    members[0].create("0123456789ABCDEF" * 2)
