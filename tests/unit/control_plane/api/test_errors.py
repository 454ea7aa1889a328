from __future__ import annotations

import re

import httpx
import pytest
from starlette.requests import Request

from control_plane.api import json_body, surface
from control_plane.api.auth import MAX_OPEN_BODY_BYTES
from control_plane.api.caller_threads import STRANGER_SECONDS, UPLOAD_BYTES_PER_SECOND
from control_plane.api.envelope import LITTLE_BYTES, MAX_QUERY_FIELDS, UNKNOWN_BYTES, Envelope
from control_plane.api.errors import MAX_FIELDS
from everstep.protocol.pace import Pace


@pytest.fixture
def http(service):
    with httpx.Client(
        base_url=f"http://{service.address}",
        headers={"authorization": f"Bearer {service.admin_token}"},
        trust_env=False,
        timeout=30,
    ) as made:
        yield made


def assert_refused(response: httpx.Response, status: int, code: str) -> dict:
    body = response.json()
    assert response.status_code == status
    assert set(body) == {"Code", "Message", "RequestId", "Hint", "Fields"}
    assert body["Code"] == response.headers["x-amzn-errortype"] == code
    assert body["RequestId"] == response.headers["x-amzn-requestid"]
    return body


def test_every_refusal_has_one_form(http, service):
    assert_refused(http.get("/v1/nothing"), 404, "ResourceNotFoundException")
    # Paths below /v1 belong to the API, so the dashboard must not answer them.
    assert_refused(http.get("/v1/"), 404, "ResourceNotFoundException")
    assert_refused(http.delete("/v1/training-jobs"), 405, "ValidationException")
    assert_refused(http.get("/v1/training-jobs/none"), 404, "ResourceNotFoundException")
    assert_refused(http.post("/v1/training-jobs", content=b"{"), 400, "ValidationException")
    assert_refused(http.post("/v1/training-jobs", json=[]), 400, "ValidationException")
    assert_refused(http.get("/v1/training-jobs", headers={"authorization": "Bearer no"}), 401, "AccessDeniedException")
    assert_refused(http.get("/v1/training-jobs", headers={"authorization": "Basic abc"}), 401, "AccessDeniedException")
    assert_refused(
        httpx.get(f"http://{service.address}/v1/fleets", trust_env=False, timeout=30), 401, "AccessDeniedException"
    )


def test_bodies_are_bounded_announced_or_not(http):
    assert_refused(http.post("/v1/fleets", content=b"x" * (2**20 + 1)), 413, "ValidationException")
    assert_refused(http.post("/v1/fleets", content=iter([b"x" * 2**19] * 3)), 413, "ValidationException")
    assert_refused(http.post("/v1/sources/x/completion", content=b"x" * (2**20 + 1)), 413, "ValidationException")
    assert_refused(http.post("/v1/sources/x/completion", content=iter([b"x" * 2**19] * 3)), 413, "ValidationException")


def test_a_fault_of_ours_is_answered_and_logged_under_its_id(http, service, caplog, monkeypatch):
    def broken() -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(service.operator, "describe_group", lambda _name: broken())
    body = assert_refused(
        http.post("/v1/fleets", json={"FleetName": "main", "AutoScalingGroupName": "g"}), 500, "InternalServerException"
    )
    assert "secret detail" not in body["Message"]
    (record,) = [record for record in caplog.records if body["RequestId"] in record.getMessage()]
    assert "secret detail" in str(record.exc_info)


async def test_a_client_that_leaves_within_its_body_is_no_fault_of_ours():
    failures, messages = [], [{"type": "http.request", "body": b"x", "more_body": True}, {"type": "http.disconnect"}]

    async def app(scope, receive, send):
        await Request(scope, receive).body()

    async def receive():
        return messages.pop(0)

    async def send(message):
        pytest.fail(f"the server sent {message}")

    scope = {"type": "http", "method": "PUT", "path": "/v1/sources/a", "headers": [], "scheme": "http"}
    await Envelope(app, max_body_bytes=10, on_failure=failures.append)(scope, receive, send)
    assert not messages
    assert not failures


@pytest.mark.parametrize(
    ("headers", "chunks", "unread"),
    [
        ({b"content-length": b"500000"}, [], 500_000),
        ({b"content-length": b"500000"}, [b"x" * 300_000], 200_000),
        ({b"content-length": b"%d" % 10**18}, [], UPLOAD_BYTES_PER_SECOND),
        ({b"content-length": b"%d" % LITTLE_BYTES}, [], 0),
        ({b"transfer-encoding": b"chunked"}, [], UNKNOWN_BYTES),
        ({}, [], 0),
    ],
)
async def test_a_client_waits_for_what_the_server_has_to_discard(monkeypatch, headers, chunks, unread):
    paid, messages = [], [{"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks]

    async def pay(self, seconds):
        paid.append(seconds)

    async def app(scope, receive, send):
        for _ in chunks:
            await receive()
        await send({"type": "http.response.start", "status": 429, "headers": []})

    async def receive():
        return messages.pop(0)

    async def send(message): ...

    monkeypatch.setattr(Pace, "pay", pay)
    scope = {"type": "http", "method": "PUT", "path": "/v1/sources/a", "headers": list(headers.items())}
    await Envelope(app, max_body_bytes=10)({**scope, "scheme": "http"}, receive, send)
    assert paid == ([unread / UPLOAD_BYTES_PER_SECOND] if unread else [])


def test_health_needs_no_token(service):
    answer = httpx.get(f"http://{service.address}/v1/health", trust_env=False, timeout=30)
    assert (answer.status_code, answer.json()["Status"]) == (200, "ok")


@pytest.mark.security
@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/session", b"[" * MAX_OPEN_BODY_BYTES, 400),
        ("/v1/session", b" " * (MAX_OPEN_BODY_BYTES + 1), 413),
        ("/v1/session", iter([b"{}"]), 413),
        ("/v1/agents/nonce", b" " * (MAX_OPEN_BODY_BYTES + 1), 413),
        (f"/v1/health?{'&' * MAX_QUERY_FIELDS}", None, 400),
        (f"/v1/health?{'&'.join(f'a{number}' for number in range(MAX_QUERY_FIELDS))}", None, 400),
    ],
    ids=["deep", "long", "of unknown length", "long for an agent", "too many fields", "many fields"],
)
def test_strangers_get_short_answers_to_short_requests_alone(service, path, body, status):
    answer = httpx.request(
        "POST" if body else "GET",
        f"http://{service.address}{path}",
        content=body,
        headers={"content-type": "application/json"},
        trust_env=False,
        timeout=30,
    )
    assert answer.status_code == status
    assert len(answer.json()["Fields"]) <= MAX_FIELDS
    assert len(answer.content) < 20_000


@pytest.mark.security
def test_a_body_has_few_values_and_an_answer_names_few_of_its_faults(http):
    many = {"TrainingJobName": "gpt", "Tags": {str(number): "x" for number in range(json_body.MAX_VALUES + 1)}}
    answer = http.post("/v1/training-jobs", json=many)
    assert (answer.status_code, answer.json()["Fields"]) == (
        400,
        [{"Field": "Tags", "Message": f"must have at most {json_body.MAX_VALUES} entries"}],
    )
    unknown = {f"Name{number}": 1 for number in range(json_body.MAX_VALUES - 1)}
    for found in (http.post("/v1/training-jobs", json=unknown), http.post("/v1/fleets/main/unknown", json=unknown)):
        assert found.status_code in (400, 404)
        assert len(found.json()["Fields"]) <= MAX_FIELDS


@pytest.mark.security
def test_the_document_of_the_api_is_encoded_once_and_strangers_pay_for_it(service, monkeypatch):
    paid = []

    async def pay(seconds: float) -> None:
        paid.append(seconds)

    monkeypatch.setattr(service.app.state.services.strangers, "pay", pay)
    url = f"http://{service.address}/v1/openapi.json"
    first, again = (httpx.get(url, trust_env=False, timeout=30) for _ in range(2))
    monkeypatch.setattr(surface.gzip, "compress", None)
    assert first.json() == again.json() == httpx.get(url, trust_env=False, timeout=30).json()
    assert paid == [STRANGER_SECONDS] * 3
    httpx.get(f"http://{service.address}/v1/health", trust_env=False, timeout=30)
    httpx.post(f"http://{service.address}/v1/session", json={"Token": "wrong"}, trust_env=False, timeout=30)
    assert paid == [STRANGER_SECONDS] * 4, "refused sign-ins are paid for, and health checks are not"


def test_every_operation_is_named_and_described(http):
    document = http.get("/v1/openapi.json").json()
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    ids = [operation["operationId"] for operation in operations]
    assert len(ids) == len(set(ids))
    assert all(name[0].isupper() and "_" not in name for name in ids)
    assert all(operation["description"].endswith(".") for operation in operations)


def test_fields_are_pascal_case_everywhere(http):
    schemas = http.get("/v1/openapi.json").json()["components"]["schemas"]
    ours = {name: shape for name, shape in schemas.items() if name not in ("HTTPValidationError", "ValidationError")}
    wrong = [
        f"{name}.{field}"
        for name, shape in ours.items()
        for field in shape.get("properties", {})
        if not field[0].isupper() or "_" in field
    ]
    assert wrong == []


def operations(http: httpx.Client) -> list[tuple[str, str, dict]]:
    """Return every operation: its method, its path and its entry in the OpenAPI document.

    Each path names an object that does not exist.
    """
    paths = http.get("/v1/openapi.json").json()["paths"]
    ids = {"SourceId": "0" * 64, "SnapshotId": "1-1-" + "0" * 32}
    return [
        (method.upper(), re.sub(r"\{(\w+)\}", lambda name: ids.get(name[1], "1"), path), operation)
        for path, methods in paths.items()
        for method, operation in methods.items()
    ]


def test_a_misspelt_field_of_the_query_is_refused_by_every_operation(http):
    found = operations(http)
    assert len(found) > 50
    for method, path, operation in found:
        body = assert_refused(http.request(method, path, params={"Dryrun": "true"}), 400, "ValidationException")
        assert [field["Field"] for field in body["Fields"]] == ["Dryrun"], operation["operationId"]


def test_who_takes_no_body_says_so_instead_of_ignoring_it(http):
    bare = [
        (method, path)
        for method, path, operation in operations(http)
        if method != "GET" and "requestBody" not in operation
    ]
    assert len(bare) > 10
    for method, path in bare:
        body = assert_refused(http.request(method, path, json={"Force": True}), 400, "ValidationException")
        assert [field["Field"] for field in body["Fields"]] == ["Force"]
        assert_refused(http.request(method, path, content=b"x"), 400, "ValidationException")
        assert (
            "Fields" not in (answer := http.request(method, path, content=b"{}").json())
            or answer["Code"] != "ValidationException"
        )
