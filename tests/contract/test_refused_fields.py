"""Every field of every operation refuses values that no schema allows, and the service responds with the documented
error.

`test_bad_input.py` generates requests from the schemas. This file sends other values that JSON and HTTP allow:

    null, NUL and half of a surrogate pair
    numbers that are not finite or too large
    page tokens that the service never returned

Operations and fields are read from the OpenAPI document, so these tests cover each new field automatically. Tests of
parameters and tokens run on both engines, because PostgreSQL refuses values that SQLite stores.
"""

from __future__ import annotations

import base64
import json
import random
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from control_plane.api.caller_threads import EventAllowance
from control_plane.api.json_body import MAX_DEPTH
from control_plane.api.surface import make_surface, operations
from control_plane.core.observed.spans import Bucket, JobSpan
from control_plane.db import drills, ledger_hours
from control_plane.db.drills import NewDrill
from control_plane.db.models import DrillRow
from everstep.protocol.constraints import path_of, unknown
from tests.postgresql import BOTH_ENGINES
from tests.unit.control_plane.api.conftest import GROUP, START, Service
from tests.unit.control_plane.api.test_commands import agent, says
from tests.unit.control_plane.api.test_results import Job

pytestmark = pytest.mark.security

DOCUMENT = make_surface().openapi()
KNOWN = {
    "TrainingJobName": "gpt",
    "FleetName": "main",
    "NodeId": "i-0",
    "IncidentId": "inc-0",
    "Project": "speech",
    "Rank": "0",
    "Step": "4",
    "TokenId": "tok-0",
    "SourceId": "0" * 64,
    "SnapshotId": "1-1-" + "0" * 32,
}
"""Names of existing objects. With them, the tested field is the only reason for a refusal."""
NEEDED = {"GetOutput": "Key=x", "ReadSnapshot": "Begin=0&End=1"}
"""Required query parameters of operations.

Without them, the service would refuse the request because of the missing parameter.
"""
JSON_VALUES = {
    "null": "null",
    "NaN": "NaN",
    "Infinity": "Infinity",
    "negative infinity": "-Infinity",
    "1e999": "1e999",
    "10^400": "9" * 400,
    "half a surrogate pair": '"\\ud800"',
    "NUL": '"a\\u0000b"',
    "too long": json.dumps("x" * 200_000),
    "too deep": "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1),
}
"""Values that fields of every type refuse."""
WRONG_TYPES = {
    "string": "[7]",
    "integer": '"7"',
    "number": '"7"',
    "boolean": '"true"',
    "array": '{"a":1}',
    "object": "[1]",
}
TEXT_VALUES = {
    "integer": ["x", "1.5", "NaN", "Infinity", "1e999", "9" * 30, "9" * 5_000, ""],
    "boolean": ["maybe", "2"],
}
TEXT_VALUES["number"] = ["x", "NaN", "Infinity", "1e999", "9" * 30, ""]
EVIL_PARTS = [
    "null",
    "true",
    "NaN",
    "Infinity",
    "-Infinity",
    "1e999",
    "9" * 30,
    "-1",
    '"\\u0000"',
    '"\\ud800"',
    "{}",
    '["a"]',
]
"""Replacements for one element of a page token. The service must refuse every token with such an element."""
ODD_PARTS = [
    "0",
    '""',
    json.dumps("x" * 300),
    '"2026-01-01"',
    '"0001-01-01T00:00:00+14:00"',
    '"9999-12-31T23:59:59-14:00"',
    "9" * 18,
    "[]",
    "0.5",
]
"""Unusual replacements for one element of a page token.

The service may accept or refuse a token with such an element, but must not fail.
"""

ONE_ENGINE = pytest.mark.parametrize("service", ["sqlite"], indirect=True)
"""Mark for tests of request bodies, which the service refuses before it uses the database."""

Operation = dict[str, Any]


@pytest.fixture(scope="module", params=BOTH_ENGINES)
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with database_of(request) as url, Service(tmp_path_factory.mktemp("service"), url) as running:
        # One token makes thousands of refused calls here.
        state = running.app.state
        state.services = replace(state.services, refused_calls=EventAllowance(1_000_000, 0.0))
        for name in (GROUP, "other"):
            running.operator.create_group(name, max_size=8)
        with closing(running.client()) as client:
            client.create_fleet(
                FleetName="main", AutoScalingGroupName=GROUP, MinNodeCount=2, AllowDrills=True, AllowCommands=True
            )
            code = tmp_path_factory.mktemp("code")
            (code / "train.py").write_text("print('hello')\n")
            job = Job(running, client, source := client.upload_source(Directory=code))
            client.create_training_job(
                TrainingJobName="second", Source=source, EntryPoint="train.py", NodeCount=1, FleetName="main"
            )
            client.create_fleet(FleetName="other", AutoScalingGroupName="other")
            fill(running, client, job)
        with agent(running, "i-0", says), agent(running, "i-1", says):
            yield running


@contextmanager
def database_of(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "sqlite":
        yield ""
        return
    with request.getfixturevalue("postgresql").database() as url:
        yield url


def fill(service: Service, client: Any, job: Job) -> None:
    """Create two objects for each list operation, so that each list has a second page."""
    job.launch(1)
    job.run_ranks()
    job.connect("i-0", "i-1")
    spans = [JobSpan(start=second, bucket=Bucket.QUEUE) for second in range(3)]
    job.write(ledger_hours.record_spans, [(span, span.start + 1) for span in spans])
    for number in range(2):
        job.put("output", f"gen=1/rank={number}/model.bin", b"weights")
        job.checkpoint(4 * number + 4)
        job.open_incident(f"inc-{number}", number)
        client.update_training_job(TrainingJobName="gpt", Priority=number + 1)
        client.create_token(Role="viewer")
        client.put_project_quota(Project=("speech", "vision")[number], MaxNodeCount=4)
        with service.database.write() as session:
            what = {
                "run_id": job.run,
                "job_name": "gpt",
                "fleet_name": "main",
                "project": "default",
                "kind": "kill-rank",
                "rank": number,
            }
            made = drills.create(
                session, NewDrill(**what, node_id=f"i-{number}", requested_by="a", requested_at=START, state="absorbed")
            )
            session.get(DrillRow, made.id).ended_at = START


@pytest.fixture(scope="module")
def http(service: Service) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {service.admin_token}", "content-type": "application/json"}
    with httpx.Client(base_url=f"http://{service.address}", headers=headers, trust_env=False, timeout=20) as made:
        yield made


class Answered:
    """The status and headers of a response. For a refusal, also its body."""

    def __init__(self, http: httpx.Client, method: str, path: str, body: bytes | None = None) -> None:
        with http.stream(method, path, content=body) as answer:
            self.status = answer.status_code
            self.headers = answer.headers
            self.said: dict[str, Any] = {}
            if self.status >= 400:
                assert answer.read(), f"{method} {path}: {self.status} without a body"
                self.said = answer.json()

    def is_refused(self, field: str, what: str, statuses: tuple[int, ...] = (400,)) -> None:
        assert self.status in statuses, f"{what}: {self.status} {self.said}"
        assert self.said.keys() == {"Code", "Message", "RequestId", "Hint", "Fields"}, what
        assert self.headers["x-amzn-requestid"] == self.said["RequestId"]
        if self.status == 400:
            named = [each["Field"] for each in self.said["Fields"]]
            assert any(name == field or field.startswith((f"{name}.", f"{name}[")) for name in named), (
                f"{what}: {field} is not among {named}"
            )


def every_operation() -> list[Any]:
    return [
        pytest.param((path, method, operation), id=operation["operationId"])
        for path, method, operation in operations(DOCUMENT)
    ]


def resolved(schema: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in schema or "allOf" in schema:
        schema = DOCUMENT["components"]["schemas"][
            (schema.get("$ref") or schema["allOf"][0]["$ref"]).rpartition("/")[2]
        ]
    return schema


def fields_of(
    schema: dict[str, Any], path: tuple[str | int, ...] = ()
) -> Iterator[tuple[tuple[str | int, ...], dict[str, Any]]]:
    """Yield path and schema of each field of a body. A list or map contributes one entry."""
    schema = resolved(schema)
    if path:
        yield path, schema
    for name, inner in schema.get("properties", {}).items():
        yield from fields_of(inner, (*path, name))
    if schema.get("type") == "array":
        yield from fields_of(schema["items"], (*path, 0))
    if isinstance(schema.get("additionalProperties"), dict):
        yield from fields_of(schema["additionalProperties"], (*path, "a"))
    elif "patternProperties" in schema:
        yield from fields_of(next(iter(schema["patternProperties"].values())), (*path, "a"))


def body_with(path: tuple[str | int, ...], raw: str) -> bytes:
    for part in reversed(path):
        raw = f"[{raw}]" if isinstance(part, int) else f"{{{json.dumps(part)}: {raw}}}"
    return raw.encode()


def address(path: str, operation: Operation, **query: str) -> str:
    needed = NEEDED.get(operation["operationId"], "")
    said = "&".join(
        [*([needed] if needed and "Key" not in query else []), *(f"{name}={value}" for name, value in query.items())]
    )
    return path.format(**KNOWN) + (f"?{said}" if said else "")


@pytest.mark.long(keep=40)
@ONE_ENGINE
@pytest.mark.parametrize("called", every_operation())
def test_no_field_of_a_body_accepts_what_no_schema_allows(
    http: httpx.Client, called: tuple[str, str, Operation]
) -> None:
    path, method, operation = called
    schema = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    if schema is None:
        return
    where, name = address(path, operation), operation["operationId"]
    fields = list(fields_of(schema))
    for field, inner in fields:
        types = [each["type"] for each in inner.get("anyOf", [inner]) if "type" in each]
        values = {**JSON_VALUES, **{f"not {kind}": WRONG_TYPES[kind] for kind in types[:1]}}
        for what, raw in values.items():
            Answered(http, method, where, body_with(field, raw)).is_refused(
                path_of(field), f"{name}.{path_of(field)} {what}"
            )
    for what, raw in {"null": "null", "a list": "[]", "nothing known": '{"Bogus": 1}'}.items():
        assert Answered(http, method, where, raw.encode()).status == 400, f"{name}: {what}"
    for field in {field for field, _ in fields if field[-1] == "a"}:
        for key in ("\\u0000", "\\ud800"):
            answer = Answered(http, method, where, body_with(field[:-1], f'{{"{key}": "x"}}'))
            answer.is_refused(path_of(field[:-1]), f"{name}.{path_of(field[:-1])} with the key {key}")


@ONE_ENGINE
@pytest.mark.parametrize("called", every_operation())
def test_no_body_is_read_by_names_that_the_contract_does_not_have(
    http: httpx.Client, called: tuple[str, str, Operation]
) -> None:
    path, method, operation = called
    schema = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    for name in resolved(schema).get("properties", {}) if schema is not None else ():
        ours = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("_")
        answer = Answered(http, method, address(path, operation), body_with((ours,), "[[7]]"))
        assert {"Field": ours, "Message": unknown(ours)} in answer.said["Fields"], (
            f"{operation['operationId']} reads {ours}"
        )


@pytest.mark.long(keep=40)
@pytest.mark.parametrize("called", every_operation())
def test_no_parameter_accepts_what_no_schema_allows(http: httpx.Client, called: tuple[str, str, Operation]) -> None:
    path, method, operation = called
    name, body = operation["operationId"], b"" if method in ("GET", "DELETE") else b"{}"
    Answered(http, method, address(path, operation, Bogus="1"), body).is_refused(
        "Bogus", f"{name} with an unknown parameter"
    )
    for parameter in operation["parameters"]:
        field, schema = parameter["name"], resolved(parameter["schema"])
        values = ["%00", "a%00b", *TEXT_VALUES.get(schema.get("type", ""), ["x" * 40_000])]
        for value in values:
            if parameter["in"] == "path":
                if not value:
                    continue
                answer = Answered(http, method, address(path.replace(f"{{{field}}}", value), operation), body)
            else:
                answer = Answered(http, method, address(path, operation, **{field: value}), body)
            answer.is_refused(field, f"{name}.{field}={value[:20]!r}")
        for value in ("%ED%A0%80", "%FF", "..%2F.."):
            where = path.replace(f"{{{field}}}", value) if parameter["in"] == "path" else path
            query = {} if parameter["in"] == "path" else {field: value}
            if method == "GET":
                assert Answered(http, method, address(where, operation, **query)).status < 500, (
                    f"{name}.{field}={value}"
                )


# Page tokens


def listed() -> list[Any]:
    takes = [
        each
        for each in every_operation()
        if "NextToken" in [parameter["name"] for parameter in each.values[0][2]["parameters"]]
    ]
    return [each for each in takes if each.id != "FollowLogs"]


def token_of(http: httpx.Client, where: str, name: str) -> tuple[str, bool]:
    """Return a page token of the operation, and whether the service compresses this kind of token."""
    is_log = name == "GetLogEvents"
    query = "Limit=1&StartFromHead=true" if is_log else "MaxResults=1"
    said = http.get(f"{where}?{query}").json()
    token: str = said["NextForwardToken" if is_log else "NextToken"]
    return token, is_log


def packed(raw: str, is_compressed: bool) -> str:
    said = raw.encode()
    return quote(base64.urlsafe_b64encode(zlib.compress(said, 9) if is_compressed else said).decode())


@pytest.mark.parametrize("called", listed())
def test_a_forged_token_of_a_page_is_refused_or_a_position(
    http: httpx.Client, called: tuple[str, str, Operation]
) -> None:
    path, _, operation = called
    name, where = operation["operationId"], path.format(**KNOWN)
    token, is_compressed = token_of(http, where, name)
    assert Answered(http, "GET", f"{where}?NextToken={quote(token)}").status == 200
    seed = random.randrange(2**32)  # pytest-randomly seeds this generator and prints the seed
    rng = random.Random(seed)
    for length in sorted(rng.sample(range(1, len(token)), min(12, len(token) - 1))):
        Answered(http, "GET", f"{where}?NextToken={quote(token[:length])}").is_refused(
            "NextToken", f"{name}, seed {seed}, {length} characters"
        )
    said = base64.urlsafe_b64decode(token)
    parts = [json.dumps(part) for part in json.loads(zlib.decompress(said) if is_compressed else said)]
    shapes = [
        "",
        "null",
        "1",
        '"x"',
        "{}",
        "[",
        "[]",
        f"[{', '.join([*parts, '1'])}]",
        "[" * 500,
        '{"a":' * 100,
        "[" * 300 + "]" * 300,
    ]
    for raw in shapes:
        Answered(http, "GET", f"{where}?NextToken={packed(raw, is_compressed)}").is_refused(
            "NextToken", f"{name}: {raw[:60]}"
        )
    for index in range(len(parts)):
        for part in (*EVIL_PARTS, *ODD_PARTS):
            raw = f"[{', '.join([*parts[:index], part, *parts[index + 1 :]])}]"
            answer = Answered(http, "GET", f"{where}?NextToken={packed(raw, is_compressed)}")
            if part in EVIL_PARTS and not (is_compressed and part in ("{}", "null", '["a"]')):
                answer.is_refused("NextToken", f"{name}: {raw[:80]}")
            assert answer.status in (200, 400), f"{name}: {answer.status} for {raw[:80]}"
    for _ in range(20):
        bits = bytearray(token.encode())
        bits[rng.randrange(len(bits))] ^= 1 << rng.randrange(7)
        status = Answered(http, "GET", f"{where}?NextToken={quote(bytes(bits))}").status
        assert status in (200, 400), f"{name}, seed {seed}: {status} for {bits!r}"


@pytest.mark.parametrize("called", listed())
def test_a_token_of_another_list_harms_nobody(http: httpx.Client, called: tuple[str, str, Operation]) -> None:
    path, _, operation = called
    for other in listed():
        its_path, _, its_operation = other.values[0]
        token, _ = token_of(http, its_path.format(**KNOWN), its_operation["operationId"])
        status = Answered(http, "GET", f"{path.format(**KNOWN)}?NextToken={quote(token)}").status
        assert status in (200, 400), f"{operation['operationId']} with a token of {other.id}: {status}"
