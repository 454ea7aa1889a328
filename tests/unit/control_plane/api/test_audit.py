"""The audit log has one entry for each call that may change something, with caller, address and outcome."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import httpx
import pytest

from control_plane.api.audit import AuditedRoute
from control_plane.api.caller_threads import REFUSED_CALLS, CallerThreads
from control_plane.api.forwarding import LastHop
from control_plane.api.surface import ROOMS
from control_plane.db import audit
from control_plane.db.audit import AuditFilter
from control_plane.db.tokens import Role
from control_plane.settings import InvalidSettings, Settings
from control_plane.tracing import Tracer
from tests.postgresql import BOTH_ENGINES
from tests.unit.control_plane.api.conftest import GROUP, all_pages, refused, without_metadata

SECRET = "hunter2-in-an-environment"


def entries(client, **which) -> list[dict]:
    return client.list_audit_entries(**which)["AuditEntries"]


@pytest.mark.security
def test_a_call_that_changes_something_has_an_entry(service, client):
    answer = client.create_fleet(FleetName="main", AutoScalingGroupName=GROUP, MinNodeCount=4)
    client.list_fleets()
    (entry,) = entries(client)
    identity = client.get_caller_identity()
    assert entry == {
        "EntryId": 1,
        "Time": service.clock(),
        "Operation": "CreateFleet",
        "Resource": "main",
        "TokenId": identity["TokenId"],
        "Caller": identity["Description"],
        "Role": "admin",
        "SourceAddress": "127.0.0.1",
        "RequestId": answer["ResponseMetadata"]["RequestId"],
        "Outcome": "Succeeded",
        "StatusCode": 201,
    }


@pytest.mark.security
def test_a_refused_call_has_an_entry_with_its_error(service, client, fleet):
    with closing(service.client(service.token(Role.VIEWER, "speech"))) as viewer:
        with refused("AccessDeniedException"):
            viewer.delete_fleet(FleetName="main")
        with refused("AccessDeniedException"):
            viewer.list_audit_entries()
    with refused("ResourceNotFoundException"):
        client.stop_training_job(TrainingJobName="gpx")
    unknown, forbidden = entries(client, MaxResults=2)
    assert [forbidden[name] for name in ("Operation", "Resource", "Project", "Role", "Outcome", "ErrorCode")] == [
        "DeleteFleet",
        "main",
        "speech",
        "viewer",
        "Refused",
        "AccessDeniedException",
    ]
    assert (unknown["Resource"], unknown["StatusCode"]) == ("gpx", 404)


@pytest.mark.security
def test_an_entry_contains_no_secret(service, client, fleet, source):
    client.create_training_job(
        TrainingJobName="gpt", Source=source, EntryPoint="train.py", NodeCount=1, Environment={"PASSWORD": SECRET}
    )
    made = client.create_token(Role="submitter", Project="speech")
    newest = entries(client, Operation="CreateToken")[0]
    assert (newest["Resource"], newest["Project"]) == (made["Token"]["TokenId"], "speech")
    with service.database.read() as session:
        stored = repr(audit.page(session, AuditFilter(), limit=100))
    assert "CreateTrainingJob" in stored
    assert SECRET not in stored
    assert made["Secret"] not in stored


def test_a_dry_run_and_a_call_without_a_token_have_no_entry(service, client):
    client.create_fleet(FleetName="main", AutoScalingGroupName=GROUP, MinNodeCount=1, DryRun=True)
    answer = httpx.delete(f"http://{service.address}/v1/fleets/main", headers={"authorization": "Bearer no-token"})
    assert answer.status_code == 401
    assert entries(client) == []


def test_a_refused_dry_run_of_an_operation_without_one_has_an_entry(service, client):
    headers = {"authorization": f"Bearer {service.admin_token}"}
    body = {"Role": "viewer", "DryRun": True}
    assert httpx.post(f"http://{service.address}/v1/tokens", json=body, headers=headers).status_code == 400
    assert [(entry["Operation"], entry["StatusCode"]) for entry in entries(client)] == [("CreateToken", 400)]


def test_an_entry_is_stored_before_the_call_and_finished_after_it(service, client, monkeypatch):
    seen = []

    def describe_group(name):
        with service.database.read() as session:
            seen.extend(audit.page(session, AuditFilter(operation="CreateFleet"), limit=1))
        raise RuntimeError("the process ends here")

    monkeypatch.setattr(service.operator, "describe_group", describe_group)
    # httpx does not repeat the call.
    body = {"FleetName": "main", "AutoScalingGroupName": GROUP, "MinNodeCount": 1}
    headers = {"authorization": f"Bearer {service.admin_token}"}
    assert httpx.post(f"http://{service.address}/v1/fleets", json=body, headers=headers).status_code == 500
    assert [(entry.resource, entry.status_code) for entry in seen] == [("main", None)]
    failed = entries(client, MaxResults=1)[0]
    assert (failed["Outcome"], failed["StatusCode"]) == ("Failed", 500)


@pytest.mark.parametrize("engine", BOTH_ENGINES)
@pytest.mark.covers(
    "ListAuditEntries.Operation",
    "ListAuditEntries.TokenId",
    "ListAuditEntries.Project",
    "ListAuditEntries.TimeAfter",
    "ListAuditEntries.TimeBefore",
    "ListAuditEntries.MaxResults",
    "ListAuditEntries.NextToken",
)
def test_the_log_is_listed_newest_first_and_filtered(service, client):
    for project in ("speech", "vision", "speech"):
        client.put_project_quota(Project=project)
        service.clock.advance(60)
    whole = entries(client)
    assert [entry["EntryId"] for entry in whole] == [3, 2, 1]
    assert all_pages(client, "list_audit_entries", MaxResults=2) == whole
    first = client.list_audit_entries(MaxResults=2)
    rest = without_metadata(client.list_audit_entries(MaxResults=2, NextToken=first["NextToken"]))
    assert rest == {"AuditEntries": whole[2:]}
    with closing(service.client(service.token(Role.ADMIN))) as other:
        other.delete_project_quota(Project="vision")
        other_id = other.get_caller_identity()["TokenId"]
    assert [entry["Operation"] for entry in entries(client, TokenId=other_id)] == ["DeleteProjectQuota"]
    assert [entry["EntryId"] for entry in entries(client, Operation="PutProjectQuota")] == [3, 2, 1]
    begin = whole[-1]["Time"]
    middle = whole[1]["Time"]
    assert [entry["EntryId"] for entry in entries(client, TimeAfter=middle)] == [4, 3, 2]
    assert [entry["EntryId"] for entry in entries(client, TimeAfter=begin, TimeBefore=middle)] == [1]
    made = client.create_token(Role="viewer", Project="speech")["Token"]["TokenId"]
    assert [entry["Resource"] for entry in entries(client, Project="speech")] == [made]


@pytest.mark.security
def test_the_address_of_a_client_is_believed_from_trusted_proxies_only(service, client):
    headers = {"authorization": f"Bearer {service.admin_token}", "x-forwarded-for": "203.0.113.9, 198.51.100.7"}
    httpx.put(f"http://{service.address}/v1/quotas/speech", headers=headers, json={})
    assert entries(client)[0]["SourceAddress"] == "198.51.100.7"


@pytest.mark.security
@pytest.mark.parametrize(
    ("peer", "values", "believed"),
    [
        ("10.0.1.1", ["198.51.100.7"], "198.51.100.7"),
        ("10.0.1.1", ["203.0.113.9, 10.0.5.6"], "10.0.5.6"),  # a client within the proxies' network
        ("10.0.1.1", ["203.0.113.9", "10.0.5.6"], "10.0.5.6"),
        ("10.0.1.1", ["203.0.113.9, evil\x1b[31m"], "10.0.1.1"),
        ("10.0.1.1", ["2001:db8::7"], "2001:db8::7"),
        ("10.0.1.1", [], "10.0.1.1"),
        ("10.9.1.1", ["203.0.113.9"], "10.9.1.1"),
    ],
)
async def test_only_the_address_that_a_proxy_appended_is_believed(peer: str, values: list[str], believed: str) -> None:
    seen = []

    async def app(scope, receive, send) -> None:
        seen.append(scope["client"][0])

    headers = [(b"x-forwarded-for", value.encode()) for value in values]
    scope = {"type": "http", "client": (peer, 1), "scheme": "http", "headers": headers}
    await LastHop(app, ["10.0.0.0/16"])(scope, None, None)
    assert seen == [believed]


def test_the_request_that_creates_a_job_is_in_the_trace_of_its_run(service, client, fleet, source):
    spans = []

    class Spy(Tracer):
        def record(self, name, run_id, *_) -> None:
            spans.append((name, run_id))

    service.app.state.services = replace(service.services, tracer=Spy())
    job = client.create_training_job(TrainingJobName="gpt", Source=source, EntryPoint="train.py", NodeCount=1)
    client.stop_training_job(TrainingJobName="gpt")
    assert spans == [("CreateTrainingJob", job["RunId"]), ("StopTrainingJob", job["RunId"])]


def test_each_operation_that_is_not_a_read_is_audited():
    routes = [route for room in ROOMS for route in room.router.routes if getattr(route, "operation_id", None)]
    assert all(isinstance(route, AuditedRoute) for route in routes)


def test_a_proxy_that_is_no_network_is_refused(tmp_path):
    with pytest.raises(InvalidSettings, match=r"--trusted-proxies '10\.0\.0\.1/16'"):
        Settings(state_directory=tmp_path, bucket="b", region="eu-west-1", trusted_proxies=("10.0.0.1/16",))


@pytest.mark.security
def test_entries_are_written_in_the_turn_of_their_caller(client, monkeypatch):
    """The threads of the server's loops do not wait for callers whose calls are refused."""
    ran: list[str] = []
    run, finish = CallerThreads.run, CallerThreads.finish

    async def noted(threads, work, *arguments):
        ran.append(work.__name__)
        return await run(threads, work, *arguments)

    async def finished(threads, work):
        ran.append(work.__name__)
        return await finish(threads, work)

    monkeypatch.setattr(CallerThreads, "run", noted)
    monkeypatch.setattr(CallerThreads, "finish", finished)
    with refused("ResourceNotFoundException"):
        client.stop_training_job(TrainingJobName="gpx")
    assert (ran[0], ran[-1]) == ("_begin", "write")


@pytest.mark.security
def test_a_token_with_too_many_refused_calls_writes_no_further_entries(service, client) -> None:
    viewer = service.token(Role.VIEWER)
    url = f"http://{service.address}/v1/training-jobs/gpt/stop"

    def call() -> int:
        return httpx.post(url, headers={"authorization": f"Bearer {viewer}"}, trust_env=False, timeout=30).status_code

    assert call() == 403
    count = len(client.list_audit_entries()["AuditEntries"])
    token_id = client.list_audit_entries()["AuditEntries"][0]["TokenId"]
    for _ in range(REFUSED_CALLS):
        service.services.refused_calls.spend(token_id)
    assert call() == 429
    assert len(client.list_audit_entries()["AuditEntries"]) == count
    client.create_token(Role="viewer")  # calls of other tokens are recorded as before
    assert len(client.list_audit_entries()["AuditEntries"]) == count + 1
