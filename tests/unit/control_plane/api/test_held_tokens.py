"""The service reads a token from the database once and then keeps it in memory.

After any write to the database, by any process, the service reads the token again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from control_plane.api.held_tokens import HeldTokens
from control_plane.db import nonces, tokens
from control_plane.db.session import Database
from control_plane.db.tokens import NewToken, Role, TokenKind
from control_plane.db.versions import Versions
from tests import sqlite
from tests.unit.control_plane.api.conftest import START, Clock


class Desk:
    """The cache of tokens under test, and a second connection to its database, as another process would open."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = Clock()
        self.own, self.other = sqlite.migrated(path), Database(f"sqlite:///{path}")
        self.versions = Versions(self.own)
        self.held = HeldTokens(self.own, self.versions, self.clock)
        self.looked_up = 0
        find = tokens.find

        def counted(*given):
            self.looked_up += 1
            return find(*given)

        monkeypatch.setattr(tokens, "find", counted)

    def mint(self, seconds: int | None = None) -> tuple[str, str]:
        expires_at = None if seconds is None else START + timedelta(seconds=seconds)
        with self.other.write() as session:
            secret, record = tokens.mint(
                session, NewToken(kind=TokenKind.USER, role=Role.VIEWER, expires_at=expires_at), START
            )
        return secret, record.id

    def find(self, secret: str) -> str | None:
        found = asyncio.run(self.held.find(secret))
        return None if found is None else found.id

    def close(self) -> None:
        self.versions.close()
        self.own.close()
        self.other.close()


@pytest.fixture
def desk(tmp_path, monkeypatch) -> Iterator[Desk]:
    made = Desk(tmp_path / "test.db", monkeypatch)
    yield made
    made.close()


def test_a_token_is_looked_up_once_until_something_is_written(desk):
    (one, one_id), (two, two_id) = desk.mint(), desk.mint()
    assert [desk.find(secret) for secret in (one, two, one, two)] == [one_id, two_id, one_id, two_id]
    assert desk.looked_up == 2
    desk.mint()
    assert [desk.find(one), desk.find(one)] == [one_id, one_id]
    assert desk.looked_up == 3


def test_a_token_that_another_process_revokes_is_refused_at_once(desk):
    secret, token_id = desk.mint()
    assert desk.find(secret) == desk.find(secret) == token_id
    with desk.other.write() as session:
        tokens.revoke(session, token_id, START)
    assert desk.find(secret) is None


def test_a_token_that_expires_while_it_is_held_is_refused_at_once(desk):
    secret, token_id = desk.mint(seconds=10)
    assert desk.find(secret) == token_id
    desk.clock.advance(10)
    assert desk.find(secret) is None


def test_what_is_no_token_is_not_held(desk):
    assert [desk.find("est_none"), desk.find("est_none")] == [None, None]
    assert desk.looked_up == 2


def test_where_commits_of_others_are_not_seen_every_request_looks(desk):
    desk.versions.sees_everything = False
    secret, token_id = desk.mint()
    assert desk.find(secret) == desk.find(secret) == token_id
    assert desk.looked_up == 2


def test_a_token_that_is_revoked_while_it_is_looked_up_is_not_held(desk, monkeypatch):
    secret, token_id = desk.mint()
    find = tokens.find

    def overtaken(*given):
        found = find(*given)
        with desk.other.write() as session:
            tokens.revoke(session, token_id, START)
        return found

    monkeypatch.setattr(tokens, "find", overtaken)
    assert desk.find(secret) == token_id, "it was good when the request came"
    monkeypatch.setattr(tokens, "find", find)
    assert desk.find(secret) is None


def test_the_number_of_cached_tokens_is_limited(desk):
    desk.held = HeldTokens(desk.own, desk.versions, desk.clock, token_limit=1)
    (one, _), (two, two_id) = desk.mint(), desk.mint()
    desk.find(one)
    assert [desk.find(two), desk.find(two)] == [two_id, two_id]
    assert desk.looked_up == 3


def test_a_browser_session_is_looked_up_once_until_it_is_signed_out(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, token_id = desk.mint()
    found, find_by_id = [], tokens.find_by_id
    monkeypatch.setattr(tokens, "find_by_id", lambda *given: found.append(given) or find_by_id(*given))
    for _ in range(3):
        record = asyncio.run(desk.held.find_of_session("cookie", token_id))
        assert record is not None
        assert record.id == token_id
    assert len(found) == 1
    with desk.other.write() as session:
        nonces.spend(session, "cookie", START + timedelta(days=1))
    assert asyncio.run(desk.held.find_of_session("cookie", token_id)) is None
    assert asyncio.run(desk.held.find_of_session("another cookie", token_id)) is not None


@pytest.mark.security
async def test_requests_with_one_token_share_a_look_up_until_the_next_commit(desk: Desk) -> None:
    secret, own_id = desk.mint()
    found = await asyncio.gather(*(desk.held.find(secret) for _ in range(50)))
    assert {record.id for record in found if record is not None} == {own_id}
    assert (len(found), desk.looked_up) == (50, 1)
    desk.mint()
    await desk.held.find(secret)
    assert desk.looked_up == 2
