"""Tokens of people: the API shows the secret once and lists tokens without it.

Revoking a token also ends the responses and sessions that depend on it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
from fastapi.responses import StreamingResponse
from sqlalchemy.exc import OperationalError

from control_plane.api.auth import Admin, Reader
from control_plane.api.open_answers import WhileTokenIsGood
from control_plane.api.surface import OPEN_OPERATIONS, least_roles
from control_plane.db import tokens
from control_plane.db.tokens import NewToken, Role, TokenKind
from everstep.doctor import facts as doctor_facts
from tests.unit.control_plane.api.conftest import Service, all_pages, refused


@pytest.mark.covers(
    "CreateToken.Role",
    "CreateToken.Project",
    "CreateToken.Description",
    "CreateToken.ExpiresInSeconds",
    "ListTokens.IncludeEnded",
)
def test_a_token_is_shown_once_and_listed_without_its_secret(client, service) -> None:
    made = client.create_token(Role="submitter", Project="speech", Description="ci", ExpiresInSeconds=60)
    listed = client.list_tokens()["Tokens"]
    assert {token["Description"] for token in listed} == {"first administrator", "ci"}
    assert made["Secret"] not in repr(client.list_tokens())
    assert made["Secret"] not in repr(client.list_events())
    with service.database.read() as session:
        assert made["Secret"] not in repr(tokens.get(session, made["Token"]["TokenId"]))
    identity = service.client(made["Secret"]).get_caller_identity()
    assert (identity["Role"], identity["Project"], identity["TokenId"]) == (
        "submitter",
        "speech",
        made["Token"]["TokenId"],
    )
    assert identity["ExpirationTime"] == made["Token"]["ExpirationTime"]
    service.clock.advance(60)
    with refused("AccessDeniedException", "expired"):
        service.client(made["Secret"]).get_caller_identity()
    assert len(client.list_tokens()["Tokens"]) == 1
    assert len(client.list_tokens(IncludeEnded=True)["Tokens"]) == 2


@pytest.mark.covers("ListTokens.Project", "ListTokens.MaxResults", "ListTokens.NextToken")
def test_tokens_are_listed_by_project_page_by_page_and_agents_are_not_among_them(client, service) -> None:
    for number in range(3):
        client.create_token(Role="viewer", Project="speech", Description=str(number))
    client.create_token(Role="viewer", Project="vision")
    client.create_join_token(FleetName="main")
    with service.database.write() as session:
        tokens.mint(
            session,
            NewToken(kind=TokenKind.SESSION, role=Role.AGENT, fleet_name="main", node_id="i-1"),
            service.clock(),
        )
    assert len(all_pages(client, "list_tokens", Project="speech", MaxResults=1)) == 3
    kinds = [token["Kind"] for token in all_pages(client, "list_tokens", MaxResults=2)]
    assert (kinds.count("user"), kinds.count("join"), len(kinds)) == (5, 1, 6)


@pytest.mark.parametrize("role", [Role.SUBMITTER, Role.VIEWER])
def test_tokens_are_the_administrators(service, role) -> None:
    nobody = service.client(service.token(role))
    for call in (
        lambda: nobody.create_token(Role="viewer"),
        nobody.list_tokens,
        lambda: nobody.revoke_token(TokenId="tok-1"),
    ):
        with refused("AccessDeniedException", "needs the role admin"):
            call()


def test_an_admin_has_no_project(client) -> None:
    with refused("ValidationException", "an admin token applies to every project"):
        client.create_token(Role="admin", Project="speech")


@pytest.mark.covers("RevokeToken.TokenId")
def test_a_revoked_token_is_refused_at_once_and_revoking_again_changes_nothing(client, service) -> None:
    made = client.create_token(Role="viewer")
    viewer = service.client(made["Secret"])
    viewer.list_fleets()
    first = client.revoke_token(TokenId=made["Token"]["TokenId"])
    with refused("AccessDeniedException", "revoked"):
        viewer.list_fleets()
    service.clock.advance(1)
    assert client.revoke_token(TokenId=made["Token"]["TokenId"])["RevocationTime"] == first["RevocationTime"]
    assert sum(event["Type"] == "TokenRevoked" for event in client.list_events()["Events"]) == 1
    with refused("ResourceNotFoundException"):
        client.revoke_token(TokenId="tok-none")


def test_an_agents_session_is_not_revoked_by_its_id(client, service) -> None:
    with service.database.write() as session:
        new = NewToken(kind=TokenKind.SESSION, role=Role.AGENT, fleet_name="main", node_id="i-1")
        _, record = tokens.mint(session, new, service.clock())
    with refused("ResourceNotFoundException"):
        client.revoke_token(TokenId=record.id)


def test_the_last_administrator_that_lasts_is_not_revoked(client) -> None:
    own = client.get_caller_identity()["TokenId"]
    client.create_token(Role="admin", ExpiresInSeconds=60)
    with refused("ConflictException", "last administrator"):
        client.revoke_token(TokenId=own)
    client.create_token(Role="admin")
    client.revoke_token(TokenId=own)


def test_the_first_token_is_in_a_file_that_its_owner_alone_reads(service) -> None:
    path = service.settings.state_directory / "admin_token"
    assert path.stat().st_mode & 0o777 == 0o600
    assert service.client(path.read_text().strip()).get_caller_identity()["Role"] == "admin"


def test_the_doctor_asks_who_calls_and_what_time_it_is(service, monkeypatch) -> None:
    monkeypatch.setenv("EVERSTEP_ENDPOINT_URL", f"http://{service.address}")
    monkeypatch.setenv("EVERSTEP_TOKEN", service.token(Role.VIEWER, "speech"))
    facts = doctor_facts.service_facts()
    assert (facts.role, facts.project, facts.error) == ("viewer", "speech", "")
    assert facts.skew_seconds == pytest.approx(time.time() - service.clock().timestamp(), abs=30)
    monkeypatch.setenv("EVERSTEP_TOKEN", "est_none")
    assert doctor_facts.service_facts().is_refused


# Tests of responses that never end


@pytest.fixture
def streaming(tmp_path) -> Iterator[Service]:
    """Yield a service with an operation whose response never ends, like the response of a followed log."""
    service = Service(tmp_path)

    async def endless(_caller: Reader) -> StreamingResponse:
        async def pieces() -> AsyncIterator[bytes]:
            yield b"first\n"
            await asyncio.Event().wait()

        return StreamingResponse(pieces())

    service.app.add_api_route("/v1/endless", endless)
    with service:
        yield service


def test_an_answer_that_goes_on_ends_with_its_token(streaming, client_of) -> None:
    made = client_of(streaming).create_token(Role="viewer")
    url, headers = f"http://{streaming.address}/v1/endless", {"authorization": f"Bearer {made['Secret']}"}
    with httpx.stream("GET", url, headers=headers, timeout=30, trust_env=False) as answer:
        pieces = answer.iter_bytes()
        assert next(pieces) == b"first\n"
        client_of(streaming).revoke_token(TokenId=made["Token"]["TokenId"])
        with pytest.raises(httpx.RemoteProtocolError):
            next(pieces)
    assert httpx.get(url, headers=headers, trust_env=False, timeout=30).status_code == 401


@pytest.fixture
def client_of():
    made = []

    def connect(service):
        made.append(service.client())
        return made[-1]

    yield connect
    for client in made:
        client.close()


def scope() -> dict:
    return {"type": "http", "path": "/", "state": {"token_id": "tok-1"}}


async def sent_to_nobody(_message: object) -> None:
    pass


async def nothing_comes() -> dict:
    return await asyncio.Event().wait()


async def test_an_answer_whose_token_stays_good_comes_to_its_own_end() -> None:
    looks: list[str] = []
    loop, looked_twice = asyncio.get_running_loop(), asyncio.Event()

    def is_good(_scope: object, token_id: str) -> bool:
        looks.append(token_id)
        if len(looks) == 2:
            loop.call_soon_threadsafe(looked_twice.set)
        return True

    async def app(_scope, _receive, send) -> None:
        await send({"type": "http.response.body", "body": b"x", "more_body": True})
        await looked_twice.wait()
        await send({"type": "http.response.body", "body": b""})

    await WhileTokenIsGood(app, is_good, poll_seconds=0)(scope(), nothing_comes, sent_to_nobody)
    assert set(looks) == {"tok-1"}


async def test_an_outage_of_the_database_neither_ends_a_response_nor_its_checks(caplog) -> None:
    def is_good(*_: object) -> bool:
        looks.append(1)
        if len(looks) == 1:
            raise OperationalError("SELECT 1", {}, Exception("the database is away"))
        return False

    async def app(_scope, _receive, send) -> None:
        await send({"type": "http.response.body", "body": b"x", "more_body": True})
        await asyncio.Event().wait()

    looks = list[int]()
    async with asyncio.timeout(20):
        await WhileTokenIsGood(app, is_good, poll_seconds=0)(scope(), nothing_comes, sent_to_nobody)
    assert len(looks) == 2
    assert "the database is away" in caplog.text


async def test_an_answer_in_one_piece_is_not_looked_after() -> None:
    async def app(_scope, _receive, send) -> None:
        await send({"type": "http.response.body", "body": b"x"})

    await WhileTokenIsGood(app, lambda *_: pytest.fail("asked"))(scope(), nothing_comes, sent_to_nobody)


async def test_what_ends_an_answer_for_another_reason_is_passed_on() -> None:
    async def app(_scope, _receive, send) -> None:
        await send({"type": "http.response.body", "body": b"x", "more_body": True})
        await asyncio.Event().wait()

    answering = asyncio.create_task(WhileTokenIsGood(app, lambda *_: True)(scope(), nothing_comes, sent_to_nobody))
    await asyncio.sleep(0)
    answering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answering


# Tests of the lowest role that may call each operation


def test_every_operation_has_a_least_role_and_what_needs_none_is_known() -> None:
    roles = least_roles()
    assert {name for name, role in roles.items() if role == "none"} == OPEN_OPERATIONS
    changing = {
        name: role
        for name, role in roles.items()
        if not name.startswith(("List", "Describe", "Get", "BatchGet", "Export", "Follow", "Stream"))
    }
    assert {name for name, role in changing.items() if role == "viewer"} == set()
    assert (roles["ListFleets"], roles["StopTrainingJob"], roles["RevokeToken"], roles["ListTokens"]) == (
        "viewer",
        "submitter",
        "admin",
        "admin",
    )
    assert Admin is not Reader
