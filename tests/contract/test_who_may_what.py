"""Each operation requires a minimum role, and no response reveals another project's objects.

The tests call every operation with every role. They compare the service with the table of docs/security.md, on which
administrators rely.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from control_plane.api.surface import make_surface, operations
from control_plane.db import tokens
from control_plane.db.tokens import NewToken, Role, TokenKind
from everstep.protocol.plan import ObjectReference
from tests.unit.control_plane.api.conftest import BUCKET, GROUP, Service
from tests.unit.control_plane.api.test_results import Job

pytestmark = pytest.mark.security

DOCUMENT = make_surface().openapi()
TABLE = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
LEAST = {
    name: role
    for role, names in re.findall(r"^\| (none|viewer|submitter|admin) \| (.+) \|$", TABLE, re.MULTILINE)
    for name in names.split(", ")
}
OPERATIONS = [(path, method, operation["operationId"]) for path, method, operation in operations(DOCUMENT)]
CALLERS = {
    "nobody": -1,
    "a stranger": -1,
    "an agent": 0,
    "viewer": 1,
    "submitter": 2,
    "viewer of all": 1,
    "submitter of all": 2,
    "admin": 3,
}
RANKS = {"none": 0, "viewer": 1, "submitter": 2, "admin": 3}
ABSENT = {
    "TrainingJobName": "gpx",
    "FleetName": "none",
    "NodeId": "i-none",
    "IncidentId": "inc-9",
    "TokenId": "tok-none",
    "SourceId": "1" * 64,
    "Project": "none",
    "Step": "4",
    "Rank": "0",
    "SnapshotId": "1-1-" + "0" * 32,
}
"""Names of objects that do not exist. A permitted call with these names changes nothing."""
QUERY = {"GetOutput": "?Key=x", "ReadSnapshot": "?Begin=0&End=1"}
BODIES: dict[str, dict[str, Any]] = {
    "ExecuteCommand": {"Command": ["true"]},
    "UpdateTrainingJob": {"Priority": 0},
    "AcknowledgeIncident": {"Note": "seen"},
    "CreateIncidentNote": {"Text": "the switch"},
    "CreateTrainingJobNote": {"Text": "a baseline"},
}
BY_NAME = {"ListEvents", "ListIncidents", "ListDrills", "StreamEvents"}
"""Operations that list objects of several jobs and accept a job's name as a filter."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Service(tmp_path_factory.mktemp("service")) as running:
        running.operator.create_group(GROUP, max_size=8)
        with closing(running.client()) as client:
            client.create_fleet(
                FleetName="main", AutoScalingGroupName=GROUP, MinNodeCount=2, AllowDrills=True, AllowCommands=True
            )
            code = tmp_path_factory.mktemp("code")
            (code / "train.py").write_text("print('hello')\n")
            with closing(running.client(running.token(Role.SUBMITTER, "speech"))) as owner:
                source = owner.upload_source(Directory=code)
                job = Job(running, owner, source)
            job.launch(1)
            job.run_ranks()
            job.checkpoint(4)
            job.open_incident("inc-0")
        running.source = source["SourceId"]  # type: ignore[attr-defined]
        running.run_id = job.run  # type: ignore[attr-defined]
        yield running


@pytest.fixture(scope="module")
def headers(service: Service) -> dict[str, dict[str, str]]:
    with service.database.write() as session:
        join, _ = tokens.mint(
            session, NewToken(kind=TokenKind.JOIN, role=Role.AGENT, fleet_name="main"), service.clock()
        )
    secrets = {
        "a stranger": "est_nobody",
        "an agent": join,
        "viewer": service.token(Role.VIEWER, "vision"),
        "submitter": service.token(Role.SUBMITTER, "vision"),
        "viewer of all": service.token(Role.VIEWER),
        "submitter of all": service.token(Role.SUBMITTER),
        "admin": service.admin_token,
    }
    return {"nobody": {}, **{who: {"authorization": f"Bearer {secret}"} for who, secret in secrets.items()}}


@pytest.fixture(scope="module")
def http(service: Service) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{service.address}", trust_env=False, timeout=20) as made:
        yield made


def call(
    http: httpx.Client, headers: dict[str, str], method: str, path: str, body: dict[str, Any] | None
) -> tuple[int, str]:
    """Return status and body of a response. The body of an endless response is empty."""
    content = None if body is None else json.dumps(body)
    sent = {**headers, **({} if body is None else {"content-type": "application/json"})}
    with http.stream(method, path, headers=sent, content=content) as answer:
        is_endless = answer.status_code == 200 and (
            "event-stream" in answer.headers["content-type"] or path.endswith("/logs/follow")
        )
        return answer.status_code, "" if is_endless else answer.read().decode()


def without(said: str, *names: str) -> str:
    """Return a response's text without its request id and without the given names.

    The test compares such texts: two responses that differ only in names become equal.
    """
    for name in names:
        said = said.replace(name, "?")
    return re.sub(r'"RequestId":"[^"]*"', "", said)


def body_of(method: str, name: str) -> dict[str, Any] | None:
    return None if method in ("GET", "DELETE") or name == "PutSource" else BODIES.get(name, {})


def test_the_table_has_every_operation() -> None:
    assert LEAST.keys() == {name for _, _, name in OPERATIONS}


@pytest.mark.parametrize(("path", "method", "name"), OPERATIONS, ids=[name for _, _, name in OPERATIONS])
def test_an_operation_is_for_those_whom_the_table_names(http, headers, path, method, name) -> None:
    for who, rank in CALLERS.items():
        status, said = call(
            http, headers[who], method, path.format(**ABSENT) + QUERY.get(name, ""), body_of(method, name)
        )
        needed = RANKS[LEAST[name]]
        expected = None if rank >= needed or needed == 0 else 401 if rank < 0 else 403
        assert status == expected if expected else status not in (401, 403) and status < 500, (
            f"{name} by {who}: {status} {said}"
        )


def foreign() -> list[Any]:
    """Return each operation that names an object of a project and that a viewer or a submitter may call."""
    about = [
        each
        for each in OPERATIONS
        if any(f"{{{part}}}" in each[0] for part in ("TrainingJobName", "IncidentId", "SourceId"))
    ]
    return [pytest.param(*each, id=each[2]) for each in about if LEAST[each[2]] != "admin" and each[2] != "PutSource"]


@pytest.mark.parametrize("who", ["viewer", "submitter"])
@pytest.mark.parametrize(("path", "method", "name"), foreign())
def test_what_is_another_projects_is_answered_like_what_never_was(
    service, http, headers, who, path, method, name
) -> None:
    present = {**ABSENT, "TrainingJobName": "gpt", "IncidentId": "inc-0", "SourceId": service.source}
    answers = []
    for names in (present, {**present, "TrainingJobName": service.run_id}, ABSENT):
        status, said = call(
            http, headers[who], method, path.format(**names) + QUERY.get(name, ""), body_of(method, name)
        )
        answers.append((status, without(said, names["TrainingJobName"], names["IncidentId"], names["SourceId"])))
    assert answers[0] == answers[1] == answers[2]
    assert who == "viewer" or answers[0][0] != 403


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_a_list_about_another_projects_job_is_that_of_a_job_that_never_was(service, http, headers, name) -> None:
    path = next(path for path, _, found in OPERATIONS if found == name)
    found = [
        (job, *call(http, headers["submitter"], "GET", f"{path}?TrainingJobName={job}", None))
        for job in ("gpt", service.run_id, "gpx")
    ]
    assert len({(status, without(said, job)) for job, status, said in found}) == 1, found


def test_a_job_from_another_projects_source_is_a_job_from_a_source_that_never_was(service, http, headers) -> None:
    rest = {"EntryPoint": "train.py", "NodeCount": 1, "FleetName": "main", "TrainingJobName": "new"}
    answers = []
    for source in (service.source, "1" * 64):
        status, said = call(
            http, headers["submitter"], "POST", "/v1/training-jobs", {"Source": {"SourceId": source}, **rest}
        )
        answers.append((status, without(said, source)))
    assert answers[0] == answers[1]
    assert answers[0][0] in (400, 404)


def test_a_name_that_another_project_has_taken_is_free(service) -> None:
    """A caller creates a job under a name that another project already uses. The two jobs stay separate."""
    with (
        closing(service.client(service.token(Role.SUBMITTER, "art"))) as member,
        closing(service.client(service.token(Role.SUBMITTER, "speech"))) as owner,
    ):
        stored = service.objects.get(
            ObjectReference(bucket=BUCKET, key=f"projects/speech/sources/{service.source}.tar.gz")
        )
        member.upload_source(Body=stored)
        before = owner.describe_training_job(TrainingJobName="gpt")
        made = member.create_training_job(
            TrainingJobName="gpt",
            Source={"SourceId": service.source},
            EntryPoint="train.py",
            NodeCount=1,
            FleetName="main",
        )
        member.stop_training_job(TrainingJobName="gpt")
        after = owner.describe_training_job(TrainingJobName="gpt")
        assert member.describe_training_job(TrainingJobName="gpt")["RunId"] == made["RunId"] != before["RunId"]
        assert (after["RunId"], after["TrainingJobStatus"]) == (before["RunId"], before["TrainingJobStatus"])
