from __future__ import annotations

from contextlib import ExitStack
from datetime import UTC, datetime

from control_plane.db import events
from control_plane.db.events import NewEvent
from control_plane.db.session import Database
from tests.postgresql import PostgreSql


def test_a_database_that_is_used_again_has_no_rows_and_begins_with_the_same_ids(postgresql: PostgreSql) -> None:
    ids = []
    for _ in range(2):
        with ExitStack() as stack, postgresql.database() as url:
            database = Database(url)
            # The stack closes the connections only after `postgresql.database` has ended, as happens after a failed
            # test. The database must be usable again even then.
            stack.callback(database.close)
            with database.write() as session:
                assert events.newest_id(session) == 0
                events.append(session, NewEvent(at=datetime.now(UTC), type="FleetDrift", message="It drifts."))
            with database.read() as session:
                ids.append(events.newest_id(session))
    assert ids[0] == ids[1]
