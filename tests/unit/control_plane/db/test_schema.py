from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import text

from control_plane.db import schema
from control_plane.db.errors import SchemaMismatch
from control_plane.db.session import Database


@pytest.fixture
def empty(empty_database_url):
    made = Database(empty_database_url)
    yield made
    made.close()


def test_a_new_database_needs_a_migration(empty):
    with pytest.raises(SchemaMismatch, match="start once with --migrate"):
        schema.require_current(empty)


def test_migrating_makes_it_current_and_may_be_repeated(empty):
    assert schema.migrate(empty) is None
    schema.require_current(empty)
    assert schema.migrate(empty) == schema.newest()


def test_of_replicas_that_migrate_at_once_one_waits_for_the_other(empty):
    with ThreadPoolExecutor(3) as threads:
        before = list(threads.map(lambda _: schema.migrate(empty), range(3)))
    assert None in before
    schema.require_current(empty)


def test_a_schema_of_the_future_is_left_alone(empty):
    schema.migrate(empty)
    with empty.write() as session:
        session.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    for refuse in (schema.require_current, schema.migrate):
        with pytest.raises(SchemaMismatch, match=r"9999.*newer version migrated it"):
            refuse(empty)
    assert schema.current(empty) == "9999"
