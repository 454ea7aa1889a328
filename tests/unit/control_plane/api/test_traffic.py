"""Compressed and conditional responses: the middleware changes only complete JSON responses to GET.

No response to GET contains a credential, so compression cannot reveal one.
"""

from __future__ import annotations

import gzip
import json

import httpx
import pytest

from control_plane.api.surface import make_surface
from control_plane.api.traffic import MIN_BYTES, THREAD_BYTES, Compression, Conditional, accepts_gzip

LONG = json.dumps({"Text": "word " * MIN_BYTES}).encode()
HUGE = json.dumps({"Text": "word " * THREAD_BYTES}).encode()


class Inner:
    """The application behind the middleware."""

    def __init__(self) -> None:
        self.status = 200
        self.media_type = "application/json"
        self.parts = [LONG]
        self.headers: dict[str, str] = {}

    async def __call__(self, scope, receive, send) -> None:
        headers = {"content-type": self.media_type, "content-length": str(sum(map(len, self.parts))), **self.headers}
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": self.status, "headers": raw})
        for number, part in enumerate(self.parts):
            await send({"type": "http.response.body", "body": part, "more_body": number + 1 < len(self.parts)})


class World:
    def __init__(self) -> None:
        self.inner = Inner()
        self.app = Conditional(Compression(self.inner))

    async def ask(self, method: str = "GET", path: str = "/v1/things", **headers: str):
        """Return status, headers and body of a response as they are on the wire."""
        headers = {"accept-encoding": "gzip, deflate, br"} | {
            name.replace("_", "-"): value for name, value in headers.items()
        }
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        sent: list[dict] = []

        async def send(message) -> None:
            sent.append(message)

        await self.app({"type": "http", "method": method, "path": path, "headers": raw}, None, send)
        start, *bodies = sent
        found = httpx.Headers([(name, value) for name, value in start["headers"]])
        return start["status"], found, b"".join(each["body"] for each in bodies)


@pytest.fixture
def world() -> World:
    return World()


@pytest.mark.parametrize("body", [LONG, HUGE], ids=["on the event loop", "in a thread"])
async def test_a_long_response_is_compressed(world: World, body: bytes) -> None:
    world.inner.parts = [body]
    status, headers, sent = await world.ask()
    assert (status, headers["content-encoding"], headers["vary"]) == (200, "gzip", "accept-encoding")
    assert gzip.decompress(sent) == body
    assert int(headers["content-length"]) == len(sent) < len(body) / 10


async def test_a_client_without_gzip_receives_the_plain_response(world: World) -> None:
    _, headers, sent = await world.ask(accept_encoding="identity")
    assert (sent, headers["vary"], headers["content-length"]) == (LONG, "accept-encoding", str(len(LONG)))
    assert "content-encoding" not in headers


@pytest.mark.parametrize(
    ("method", "path", "change"),
    [
        ("POST", "/v1/things", {}),
        ("GET", "/metrics", {}),
        ("GET", "/v1/things", {"parts": [b'"' + b"x" * (MIN_BYTES - 3) + b'"']}),
        ("GET", "/v1/things", {"parts": [LONG[:2000], LONG[2000:]]}),
        ("GET", "/v1/things", {"media_type": "application/vnd.amazon.eventstream"}),
        ("GET", "/v1/things", {"status": 404}),
        ("GET", "/v1/things", {"headers": {"content-encoding": "br"}}),
    ],
    ids=["not GET", "not the API", "short", "a stream", "not JSON", "an error", "already compressed"],
)
async def test_other_responses_are_not_compressed(world: World, method: str, path: str, change: dict) -> None:
    for name, value in change.items():
        setattr(world.inner, name, value)
    _, headers, sent = await world.ask(method, path)
    assert sent == b"".join(world.inner.parts)
    assert headers.get("content-encoding") != "gzip"


@pytest.mark.parametrize(
    ("offer", "accepted"),
    [("gzip", True), ("br, GZIP;q=0.5", True), ("gzip;q=0", False), ("br", False), ("", False), ("x-gzip", False)],
)
def test_gzip_is_used_only_if_the_client_offers_it(offer: str, accepted: bool) -> None:
    assert accepts_gzip({"type": "http", "headers": [(b"accept-encoding", offer.encode())]}) is accepted


async def test_a_client_that_has_the_response_receives_no_body(world: World) -> None:
    _, headers, _ = await world.ask()
    status, again, sent = await world.ask(if_none_match=f'"other", {headers["etag"]}')
    assert (status, sent, again["etag"]) == (304, b"", headers["etag"])
    assert not {"content-length", "content-type", "content-encoding"} & set(again)
    world.inner.parts = [LONG.replace(b"word", b"news")]
    status, changed, sent = await world.ask(if_none_match=headers["etag"])
    assert (status, gzip.decompress(sent)) == (200, world.inner.parts[0])
    assert changed["etag"] != headers["etag"]


async def test_streams_and_errors_have_no_etag(world: World) -> None:
    world.inner.parts = [LONG, LONG]
    assert "etag" not in (await world.ask())[1]
    world.inner.parts, world.inner.status = [LONG], 409
    assert "etag" not in (await world.ask())[1]


def test_no_get_operation_returns_a_credential() -> None:
    """Responses to GET may be compressed, so none of them may contain a credential of Everstep (BREACH)."""
    document = make_surface().openapi()
    schemas = document["components"]["schemas"]

    def sensitive(schema: object, name: str, seen: frozenset[str] = frozenset()) -> set[str]:
        if isinstance(schema, list):
            return {found for each in schema for found in sensitive(each, name, seen)}
        if not isinstance(schema, dict):
            return set()
        found = {name} if schema.get("x-sensitive") else set()
        reference = str(schema.get("$ref", "")).rpartition("/")[2]
        if reference and reference not in seen:
            found |= sensitive(schemas[reference], name, seen | {reference})
        for key, value in schema.items():
            found |= sensitive(value, key, seen)
        return found

    def of(method: str) -> dict[str, set[str]]:
        return {
            operation["operationId"]: names
            for methods in document["paths"].values()
            for each, operation in methods.items()
            if each == method and (names := sensitive(operation["responses"].get("200", {}), ""))
        }

    created = {
        name
        for methods in document["paths"].values()
        for name in sensitive(methods.get("post", {}).get("responses", {}).get("201", {}), "")
    }
    assert {"Secret", "JoinToken"} <= created, "the search finds the credentials that POST operations return"
    # Environment contains what the job's owner put there, possibly secrets. Compression can reveal a secret only to an
    # attacker who controls another part of the response. Only members of the job's project control any part, so nobody
    # outside the project can attack it.
    assert of("get") == {"DescribeTrainingJob": {"Environment"}}


def test_the_service_compresses_its_lists_and_answers_304(service, client) -> None:
    base = f"http://{service.address}"
    with httpx.Client(
        base_url=base, headers={"authorization": f"Bearer {service.admin_token}"}, trust_env=False
    ) as http:
        first = http.get("/v1/fleets")
        assert first.status_code == 200
        again = http.get("/v1/fleets", headers={"if-none-match": first.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        assert http.get("/v1/openapi.json").headers["content-encoding"] == "gzip"
