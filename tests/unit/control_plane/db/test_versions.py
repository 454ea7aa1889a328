"""Tests how a server detects new commits in the database."""

from __future__ import annotations

import pytest

from control_plane.db import events
from control_plane.db.events import NewEvent
from control_plane.db.session import Database
from control_plane.db.versions import Versions
from tests.unit.control_plane.db.conftest import NOW


def write(database: Database) -> None:
    with database.write() as session:
        events.append(session, NewEvent(at=NOW, type="T", message="m"))


@pytest.mark.parametrize("engine", ["sqlite"])
def test_sqlite_shows_every_commit_also_of_another_process_and_nothing_else(database: Database) -> None:
    versions, other = Versions(database), Database(str(database.url))
    assert versions.sees_everything
    seen = [versions.current()]
    with database.read() as session:
        events.newest_id(session)
    assert versions.current() == seen[0]
    for writer in (database, other, database):
        write(writer)
        seen.append(versions.current())
    assert len({*seen}) == 4
    versions.close()
    other.close()


@pytest.mark.parametrize("engine", ["postgresql"])
def test_elsewhere_commits_of_this_process_count(database: Database) -> None:
    versions = Versions(database)
    assert not versions.sees_everything
    before = versions.current()
    write(database)
    assert versions.current() != before


def test_what_cannot_be_told_is_none(tmp_path) -> None:
    nowhere = Database(f"sqlite:///{tmp_path / 'no' / 'such.db'}")
    assert Versions(nowhere).current() is None
    nowhere.close()
