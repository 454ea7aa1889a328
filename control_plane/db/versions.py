"""Provides the database's version, a number that changes with each commit, so that caches notice new commits.

Two reads return the same version only if no commit happened between them. On PostgreSQL (`sees_everything` is false),
the version counts only commits of this process, so callers limit the age of their caches.
"""

from __future__ import annotations

import sqlite3

from control_plane.db.session import Database


class Versions:
    """Reads the version of one database. Only one thread at a time may use an instance."""

    def __init__(self, database: Database) -> None:
        self.sees_everything = database.is_sqlite
        self._database = database
        self._connection: sqlite3.Connection | None = None

    def current(self) -> int | None:
        """Return the database's version, or None if the database cannot be read."""
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
        """Close the connection to the database. Idempotent."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
