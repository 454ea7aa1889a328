"""The service answers every request as the OpenAPI document describes.

Most requests are generated from that document. Other requests contain errors that no schema describes. The tests run in
one process against the real application on loopback, and send the same requests in every run.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import re
import socket
import tarfile
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import httpx
import hypothesis
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)
from starlette.routing import Route

from control_plane.api import envelope, peers
from control_plane.api.caller_threads import OPEN_DOWNLOADS
from control_plane.api.surface import OPEN_OPERATIONS, is_server_sent, least_roles, make_surface
from control_plane.db import tokens
from control_plane.db.tokens import NewToken, Role, TokenKind
from tests.unit.control_plane.api.conftest import GROUP, Service, impatient
from tests.unit.control_plane.api.test_commands import agent, says
from tests.unit.control_plane.api.test_results import Job
from tests.unit.control_plane.api.test_snapshots import Agent as SnapshotAgent

DOCUMENT = make_surface().openapi()
EXAMPLES = 15
"""Number of generated requests per operation, separately for valid and for invalid requests."""
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
KNOWN = {
    "TrainingJobName": "gpt",
    "FleetName": "main",
    "NodeId": "i-0",
    "IncidentId": "inc-0",
    "Project": "speech",
    "Rank": 0,
    "Step": 5,
    "SnapshotId": "1-1-" + "0" * 32,
}
"""Names of existing objects. Without these names, every generated request would return 404."""
NEEDED: dict[str, dict[str, str | int]] = {"GetOutput": {"Key": "x"}, "ReadSnapshot": {"Begin": 0, "End": 1}}
"""Required query parameters, by operation."""
GOES_ON = frozenset({"FollowLogs", "StreamEvents"})
LEFT_OUT = GOES_ON | {"PutSource"}
"""Operations with an endless response or a binary body. Other tests cover these operations."""
ROLES = (Role.VIEWER, Role.SUBMITTER, Role.ADMIN)
"""The roles, ordered from the fewest permissions to the most."""
LEAST_ROLES = least_roles()
PHASES = (hypothesis.Phase.generate,)
"""Hypothesis only generates requests.

It does not shrink a failing request, because this takes longer than reading the request.
"""
NO_HTTP = "Invalid HTTP request received."
"""Body of the HTTP server's response to a malformed request. Some generated addresses make a request malformed."""


def operations() -> list[Any]:
    found = schemathesis.openapi.from_dict(DOCUMENT).get_all_operations()
    return [made for made in (each.ok() for each in found) if name_of(made) not in LEFT_OUT]


def name_of(operation: Any) -> str:
    return str(operation.definition.raw["operationId"])


@pytest.fixture(scope="module")
def service(tmp_path_factory) -> Iterator[Service]:
    with Service(tmp_path_factory.mktemp("service")) as running:
        running.operator.create_group(GROUP, max_size=8)
        with contextlib.closing(running.client()) as client:
            client.create_fleet(
                FleetName="main", AutoScalingGroupName=GROUP, MinNodeCount=2, AllowDrills=True, AllowCommands=True
            )
            code = tmp_path_factory.mktemp("code")
            (code / "train.py").write_text("print('hello')\n")
            job = Job(running, client, client.upload_source(Directory=code))
            job.launch(1)
            job.run_ranks()
            job.put("output", "gen=1/rank=0/large.bin", bytes(32 * 2**20))
            job.checkpoint(5)
            job.open_incident("inc-0")
        with contextlib.ExitStack() as agents:
            for rank in range(2):
                snapshots = SnapshotAgent(running, f"i-{rank}", rank, 5, {5})
                agents.enter_context(agent(running, f"i-{rank}", says, snapshots))
            yield running


@pytest.fixture(scope="module")
def http(service: Service) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {service.admin_token}"}
    with httpx.Client(base_url=f"http://{service.address}", headers=headers, trust_env=False, timeout=20) as made:
        yield made


@pytest.fixture(scope="module")
def asker(service: Service) -> Iterator[Asker]:
    with requests.Session() as session:
        session.trust_env = False
        own = {role: service.token(role, "default") for role in ROLES if role is not Role.ADMIN}
        yield Asker(service, session, {**own, Role.ADMIN: service.admin_token})


class Asker:
    """Sends generated requests over persistent connections, with the token of each role."""

    def __init__(self, service: Service, session: requests.Session, of_role: dict[Role, str]) -> None:
        self._service, self._session, self._tokens = service, session, of_role

    def holds(self, case: Any, role: Role, *checks: Any) -> None:
        """Send one request with the token of `role`, and check that the response matches the OpenAPI document."""
        headers = {"Authorization": f"Bearer {self._tokens[role]}"}
        answer = case.call(
            base_url=f"http://{self._service.address}", headers=headers, session=self._session, timeout=20
        )
        if answer.status_code == 400 and answer.text == NO_HTTP:
            return
        case.validate_response(answer, checks=[*CHECKS, *checks])
        least = LEAST_ROLES[name_of(case.operation)]
        if (
            least != "none"
            and ROLES.index(role) < ROLES.index(Role(least))
            and case.method == case.operation.method.upper()
        ):
            assert answer.status_code == 403, f"{role}: {answer.status_code} {answer.text[:200]}"


@pytest.mark.long(keep=12)
@pytest.mark.parametrize("operation", operations(), ids=name_of)
def test_requests_that_fit_are_answered_as_the_contract_says_whoever_sends_them(asker: Asker, operation: Any) -> None:
    @given(operation.as_strategy(generation_mode=GenerationMode.POSITIVE), st.booleans())
    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=PHASES,
    )
    def hold(case: Any, is_known: bool) -> None:
        if is_known:
            case.path_parameters = {
                **case.path_parameters,
                **{name: KNOWN[name] for name in case.path_parameters if name in KNOWN},
            }
        for role in ROLES:
            asker.holds(case, role)

    hold()


@pytest.mark.long(keep=12)
@pytest.mark.parametrize("operation", operations(), ids=name_of)
def test_of_requests_each_field_may_be_wrong_by_itself_and_nothing_is_done(asker: Asker, operation: Any) -> None:
    generation = operation.schema.config.generation_for(operation=operation, phase="coverage")
    cases = list(
        operation.schema.iter_coverage_cases(
            operation, generation_modes=[GenerationMode.NEGATIVE], generation_config=generation
        )
    )
    assert cases
    for case in cases:
        asker.holds(case, Role.ADMIN, negative_data_rejection)


@pytest.mark.long
@pytest.mark.parametrize("operation", operations(), ids=name_of)
def test_requests_that_are_wrong_in_any_way_are_answered_as_the_contract_says(asker: Asker, operation: Any) -> None:
    @given(operation.as_strategy(generation_mode=GenerationMode.NEGATIVE))
    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=PHASES,
    )
    def hold(case: Any) -> None:
        asker.holds(case, Role.ADMIN)

    # Without parameters, no request of the operation can be invalid.
    with contextlib.suppress(hypothesis.errors.Unsatisfiable, schemathesis.errors.SchemathesisError):
        hold()


# Errors that the OpenAPI document does not describe


def refused(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    """Check the form of a refusal and return its body."""
    assert answer.status_code == status, answer.text[:300]
    said: dict[str, Any] = answer.json()
    assert said.keys() == {"Code", "Message", "RequestId", "Hint", "Fields"}
    assert answer.headers["x-amzn-requestid"] == said["RequestId"]
    return said


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff\xfe",
        b"null",
        b'"' + b"x" * 1000 + b'"',
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b'{"NodeCount": ' + b"9" * 10_000 + b"}",
        b'{"NodeCount": 1e999}',
        b'{"NodeCount": NaN}',
        b'{"TrainingJobName": "a\\u0000b"}',
        b'{"TrainingJobName": "\\ud800"}',
    ],
    ids=[
        "nothing",
        "not text",
        "null",
        "text",
        "deep lists",
        "deep objects",
        "long number",
        "infinite",
        "NaN",
        "NUL",
        "half a letter",
    ],
)
@pytest.mark.parametrize(
    "path", ["/v1/training-jobs", "/v1/fleets", "/v1/tokens", "/v1/drills", "/v1/training-jobs/gpt/ranks/0/commands"]
)
def test_a_body_that_is_no_request_is_refused(http: httpx.Client, path: str, body: bytes) -> None:
    refused(http.post(path, content=body, headers={"content-type": "application/json"}))


TEXTS = [
    "a\0b",
    "\ud800",
    "a\r\nX-Evil: 1",
    "x" * 100_000,
    "../../etc/passwd",
    "';DROP TABLE jobs;--",
    "\u202e",
    "{pid}",
    "%s%n",
]


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (
            "/v1/training-jobs",
            {
                "TrainingJobName": "x",
                "EntryPoint": "train.py",
                "NodeCount": 2,
                "Tags": {"a": "?"},
                "HyperParameters": {"a": "?"},
            },
        ),
        ("/v1/tokens", {"Role": "viewer", "Description": "?"}),
        ("/v1/nodes/i-1/drain", {"Reason": "?"}),
        ("/v1/incidents/inc-0/acknowledge", {"Note": "?"}),
        ("/v1/training-jobs/gpt/take-over", {"Reason": "?"}),
        ("/v1/training-jobs/gpt/hand-back", {}),
    ],
)
def test_text_of_any_kind_is_stored_or_refused(
    http: httpx.Client, path: str, fields: dict[str, Any], text: str
) -> None:
    answer = http.post(
        path,
        content=json.dumps(fields).replace('"?"', json.dumps(text)).encode(),
        headers={"content-type": "application/json"},
    )
    assert answer.status_code < 500, answer.text[:300]
    assert "x-evil" not in answer.headers


@pytest.mark.parametrize(
    "name",
    ["..%2f..%2fetc", "%00", "%0d%0aX-Evil:1", "a" * 5000, "%ff", "gpt%2f..%2fgpt", "*", "gpt;x", "%F0%9F%92%A3"],
)
@pytest.mark.parametrize(
    "where",
    ["/v1/training-jobs/{}", "/v1/fleets/{}", "/v1/nodes/{}", "/v1/incidents/{}", "/v1/sources/{}", "/v1/quotas/{}"],
)
def test_a_path_leads_nowhere_else(http: httpx.Client, where: str, name: str) -> None:
    answer = http.get(where.format(name))
    assert answer.status_code in (400, 404, 405), answer.text[:300]
    assert "x-evil" not in answer.headers


@pytest.mark.parametrize("key", ["../../sources/x", "jobs/gpt/run=1/../../other", "\0", "s3://other/x", "x" * 2049, ""])
def test_a_key_that_is_not_the_jobs_is_not_read(http: httpx.Client, key: str) -> None:
    answer = http.get("/v1/training-jobs/gpt/outputs/content", params={"Key": key})
    assert answer.status_code in (400, 404), answer.text[:300]


@pytest.mark.parametrize(
    "token", ["", "x", "e30=", "W10=", "bnVsbA==", "Wzk5OTk5OTk5OTk5OTk5OTk5OTk5OTldCg==", "W1siYSJdXQ==", "\u00e9"]
)
@pytest.mark.parametrize(
    "path",
    [
        "training-jobs",
        "events",
        "incidents",
        "drills",
        "tokens",
        "training-jobs/gpt/outputs",
        "training-jobs/gpt/logs/events",
    ],
)
def test_a_page_token_that_nobody_gave_is_refused(http: httpx.Client, path: str, token: str) -> None:
    answer = http.get(f"/v1/{path}", params={"NextToken": token})
    assert answer.status_code in (200, 400), answer.text[:300]


def raw(service: Service, *parts: bytes) -> bytes:
    """Send bytes unchanged and return all bytes that the service sends until it closes the connection."""
    with dialled(service) as line:
        with contextlib.suppress(OSError):  # the server closes the connection early if the headers are too long
            for part in parts:
                line.sendall(part)
            line.shutdown(socket.SHUT_WR)
        found = b""
        with contextlib.suppress(ConnectionResetError):
            while chunk := line.recv(65536):
                found += chunk
        return found


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/9.9\r\n\r\n",
        b"\0\0\0\0\r\n\r\n",
        b"GET /v1/health HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 200_000 + b"\r\n\r\n",
        b"POST /v1/training-jobs HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/training-jobs HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: "
        b"chunked\r\n\r\n0\r\n\r\n",
        b"GET /v1/health HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\xfe\r\nConnection: close\r\n\r\n",
        b"GET /v1/fleets HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer a\tb\r\nConnection: close\r\n\r\n",
        b"GET /v1/fleets HTTP/1.1\r\nHost: x\r\nCookie: everstep=\xff; =;;;\r\nConnection: close\r\n\r\n",
    ],
)
def test_bytes_that_are_no_http_harm_nobody(service: Service, http: httpx.Client, head: bytes) -> None:
    answer = raw(service, head)
    assert b" 500 " not in answer.partition(b"\r\n")[0]
    assert http.get("/v1/health").status_code == 200


def test_a_body_is_bounded_whether_or_not_it_says_how_long_it_is(http: httpx.Client) -> None:
    refused(http.post("/v1/training-jobs", content=bytes(2**20 + 1)), 413)

    def pieces() -> Iterator[bytes]:
        for _ in range(64):
            yield bytes(2**16)

    with contextlib.suppress(httpx.WriteError):  # the server may close the connection before it has read the whole body
        refused(http.post("/v1/training-jobs", content=pieces()), 413)
    assert http.get("/v1/health").status_code == 200


# Bad tokens, and objects of other projects


STRANGE = (b"\xff\xfe", b"http://[", b"Bearer \xff", b"a=b; =;\xe9", b"9e9")
"""Values of headers that no client of Everstep sends."""


@pytest.mark.parametrize(
    "names", [("Authorization",), ("Host",), ("Origin", "Cookie", "Last-Event-ID", "Accept-Encoding")], ids=",".join
)
def test_no_header_of_a_stranger_is_an_error_of_the_service(service: Service, names: tuple[str, ...]) -> None:
    """Every route is called, also those that the document does not describe."""
    rooms = [getattr(each, "original_router", None) for each in service.app.routes]
    routes = [route for room in rooms if room is not None for route in room.routes if isinstance(route, Route)]
    assert {"/v1/agents/session", "/v1/session", peers.PATH, "/metrics"} <= {route.path for route in routes}
    with httpx.Client(base_url=f"http://{service.address}", trust_env=False, timeout=20) as client:
        for route in routes:
            for value in STRANGE:
                method = min(route.methods or {"GET"})
                answer = client.request(
                    method,
                    re.sub(r"\{[^}]*\}", "x", route.path),
                    headers=[(b"Sec-Fetch-Site", b"same-origin"), *((name.encode(), value) for name in names)],
                    json={"Token": "x"} if method in ("POST", "PUT") else None,
                )
                assert answer.status_code < 500, (method, route.path, value)


def calls() -> Iterator[tuple[str, str, str]]:
    """Yield method, path and name of every operation that requires a token. The paths name existing objects."""
    named = {**KNOWN, "TokenId": "tok-0", "SourceId": "0" * 64}
    for path, methods in DOCUMENT["paths"].items():
        for method, operation in methods.items():
            if operation["operationId"] not in OPEN_OPERATIONS:
                yield method.upper(), path.format(**named), operation["operationId"]


@pytest.fixture(scope="module")
def bad_tokens(service: Service) -> dict[str, str]:
    now = service.clock()
    with service.database.write() as session:
        revoked, record = tokens.mint(session, NewToken(kind=TokenKind.USER, role=Role.ADMIN), now)
        tokens.revoke(session, record.id, now)
        expired, _ = tokens.mint(
            session, NewToken(kind=TokenKind.USER, role=Role.ADMIN, expires_at=now - timedelta(seconds=1)), now
        )
        join, _ = tokens.mint(session, NewToken(kind=TokenKind.JOIN, role=Role.AGENT, fleet_name="main"), now)
    return {"none": "", "unknown": "est_none", "revoked": revoked, "expired": expired, "an agent's": join}


@pytest.mark.parametrize("which", ["none", "unknown", "revoked", "expired", "an agent's"])
def test_no_operation_takes_a_token_that_is_not_good(service: Service, bad_tokens: dict[str, str], which: str) -> None:
    headers = {"authorization": f"Bearer {bad_tokens[which]}"} if bad_tokens[which] else {}
    with httpx.Client(base_url=f"http://{service.address}", headers=headers, trust_env=False, timeout=30) as client:
        for method, path, name in calls():
            answer = client.request(method, path, json={} if method in ("POST", "PUT") else None)
            assert answer.status_code in (401, 403), f"{name}: {answer.status_code}"


BODIES: dict[str, dict[str, Any]] = {
    "AcceptLoss": {"FromStep": 0},
    "ExecuteCommand": {"Command": ["true"]},
    "CreateIncidentNote": {"Text": "seen"},
    "CreateTrainingJobNote": {"Text": "seen"},
}
"""Required fields of operations whose requests have such fields."""


def test_what_is_another_projects_does_not_exist(service: Service) -> None:
    headers = {"authorization": f"Bearer {service.token(Role.SUBMITTER, 'other')}"}
    with httpx.Client(base_url=f"http://{service.address}", headers=headers, trust_env=False, timeout=30) as client:
        for method, path, name in calls():
            if "/training-jobs/gpt" not in path and "/incidents/inc-0" not in path:
                continue
            body = BODIES.get(name, {})
            answer = client.request(
                method,
                path,
                json=body if method == "POST" else None,
                params=NEEDED.get(name, {}),
            )
            assert answer.status_code in (403, 404), f"{name}: {answer.status_code} {answer.text[:200]}"
            assert "default" not in answer.text, f"{name} tells whose it is"
        for method, path, name in calls():
            if method == "GET" and "/training-jobs/gpt" not in path and not name.startswith("Stream"):
                assert "gpt" not in client.get(path).text, f"{name} names a job of another project"


# Uploaded source archives


def archive(*members: tuple[str, bytes | None]) -> bytes:
    """Return a gzipped tar archive. A member without content is a link to /etc/passwd."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            if content is None:
                info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
            else:
                info.size = len(content)
            tar.addfile(info, io.BytesIO(content or b""))
    return packed.getvalue()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"not gzip",
        archive(("a.py", b"x"))[:-5],
        archive(("../a.py", b"x")),
        archive(("/a.py", b"x")),
        archive(("a.py", None)),
        archive(("a\nb.py", b"x"), ("c" * 5000, b"x")),
        archive(("zeros", bytes(64 * 2**20))),
    ],
    ids=["empty", "not gzip", "cut", "climbs", "absolute", "link", "names", "bomb"],
)
def test_an_archive_that_is_not_code_is_refused(http: httpx.Client, body: bytes) -> None:
    refused(http.put(f"/v1/sources/{hashlib.sha256(body).hexdigest()}", content=body))


# Slow clients and concurrent requests


def head_of(service: Service, method: str, path: str, length: int) -> bytes:
    """Return a request's headers, with a new token: other tests may have spent the refused calls of theirs."""
    lines = [
        f"{method} {path} HTTP/1.1",
        "Host: x",
        f"Authorization: Bearer {service.token(Role.ADMIN)}",
        f"Content-Length: {length}",
        "Connection: close",
    ]
    return "\r\n".join([*lines, "", ""]).encode()


def test_clients_that_send_a_byte_at_a_time_hold_up_nobody(service: Service, http: httpx.Client) -> None:
    body = archive(("train.py", b"print(1)\n"))
    head = head_of(service, "PUT", f"/v1/sources/{hashlib.sha256(body).hexdigest()}", len(body))
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(dialled(service)) for _ in range(60)]
        for line in slow:
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            line.sendall(head)
        for letter in body[:5]:
            for line in slow:
                line.sendall(bytes([letter]))
            assert http.get("/v1/training-jobs").status_code == 200
        for line in slow:
            line.sendall(body[5:])
        assert all(line.recv(65536).startswith(b"HTTP/1.1 200") for line in slow)


class Told(logging.Handler):
    """Counts log records about clients that the service disconnects because they do not read."""

    def __init__(self) -> None:
        super().__init__()
        self.count = threading.Semaphore(0)

    def emit(self, record: logging.LogRecord) -> None:
        if "received nothing" in record.getMessage():
            self.count.release()


def test_clients_that_never_read_hold_up_nobody_and_are_let_go(service: Service, http: httpx.Client) -> None:
    (entry,) = http.get("/v1/training-jobs/gpt/outputs").json()["Outputs"]
    head = head_of(service, "GET", f"/v1/training-jobs/gpt/outputs/content?Key={entry['Key']}", 0)
    told = Told()
    log = logging.getLogger(envelope.__name__)
    level = log.level
    log.addHandler(told)
    log.setLevel(logging.INFO)
    try:
        with impatient(service, 0.5), contextlib.ExitStack() as stack:
            deaf = [stack.enter_context(dialled(service, receive_bytes=4096)) for _ in range(OPEN_DOWNLOADS)]
            for line in deaf:
                line.sendall(head)
            assert http.get("/v1/training-jobs").status_code == 200
            assert all(told.count.acquire(timeout=30) for _ in deaf)
            assert all(len(_all_of(line)) < entry["Bytes"] for line in deaf), (
                "what was in the buffers, and then the end"
            )
    finally:
        log.removeHandler(told)
        log.setLevel(level)


def dialled(service: Service, *, receive_bytes: int = 0) -> socket.socket:
    """Return a connection to the service. `receive_bytes` sets the size of its receive buffer."""
    host, port = service.address.split(":")
    line = socket.socket()
    if receive_bytes:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    line.settimeout(30)
    line.connect((host, int(port)))
    return line


@pytest.mark.parametrize(("method", "path"), [("POST", "/v1/fleets"), ("PUT", f"/v1/sources/{'0' * 64}")])
def test_a_body_that_stops_coming_is_not_waited_for(
    service: Service, http: httpx.Client, method: str, path: str
) -> None:
    assert http.get("/v1/health").status_code == 200
    with impatient(service, 0.2), dialled(service) as line:
        line.sendall(head_of(service, method, path, 100) + b"{")
        assert line.recv(65536).startswith(b"HTTP/1.1 408")


def _all_of(line: socket.socket) -> bytes:
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while chunk := line.recv(2**20):
            found += chunk
    return found


def test_two_creates_with_one_token_make_one_job(service: Service, http: httpx.Client) -> None:
    source = http.get("/v1/training-jobs/gpt").json()["Source"]
    request = {
        "TrainingJobName": "twice",
        "Source": source,
        "EntryPoint": "train.py",
        "NodeCount": 1,
        "ClientRequestToken": "one",
    }
    gate = threading.Barrier(8)
    answers: list[httpx.Response] = []

    def create() -> None:
        gate.wait()
        answers.append(http.post("/v1/training-jobs", json=request))

    asking = [threading.Thread(target=create) for _ in range(8)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join(20)
    assert [answer.status_code for answer in answers] == [201] * 8, [answer.text for answer in answers]
    assert len({answer.json()["RunId"] for answer in answers}) == 1
    refused(http.post("/v1/training-jobs", json={**request, "NodeCount": 2}), 409)


def test_streams_are_the_only_operations_that_are_left_out() -> None:
    streams = {
        operation["operationId"]
        for methods in DOCUMENT["paths"].values()
        for operation in methods.values()
        if is_server_sent(operation)
    }
    assert streams <= GOES_ON
    assert len(operations()) == sum(len(methods) for methods in DOCUMENT["paths"].values()) - len(LEFT_OUT)
