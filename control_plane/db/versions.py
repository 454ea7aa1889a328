"""Whether anything in the database may have changed, for a few microseconds.

    SQLite        its own `data_version`: a commit of any other connection changes it, and the one that looks never writes
    PostgreSQL    commits of this process alone; those of other replicas are not seen, so what rests on it must soon be too old

Invariant: two equal versions mean that nothing was committed in between, as far as it can be seen (`sees_everything`).
"""

from __future__ import annotations

import sqlite3

from control_plane.db.session import Database


class Versions:
    """Looks at one database. Used in one thread.

    Args:
        database: whose changes are looked for; it exists already.
    """

    def __init__(self, database: Database) -> None:
        self.sees_everything = database.is_sqlite
        self._database = database
        self._connection: sqlite3.Connection | None = None

    def current(self) -> int | None:
        """Return the version now; None where it cannot be told."""
        if not self.sees_everything:
            return self._database.commit_number
        try:
            if self._connection is None:
                assert self._database.url.database is not None
                self._connection = sqlite3.connect(
                    self._database.url.database, timeout=0, isolation_level=None, check_same_thread=False
                )
            (version,) = self._connection.execute("PRAGMA data_version").fetchone()
        except sqlite3.Error:
            return None
        return int(version)

    def close(self) -> None:
        """Close what was opened. Idempotent."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
