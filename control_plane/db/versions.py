"""Provides the database's version, a number that changes with each commit, so that caches notice new commits.

    SQLite        the pragma `data_version`, which changes with each commit of any other connection; the connection of
                  this module only reads
    PostgreSQL    the number of commits of this process only; callers must limit the age of their caches

The caches of `api.answers` and `api.held_tokens` depend on this version.

Invariant: if two reads return the same version, no commit happened between them. The version covers commits of other
processes only if `sees_everything` is true.
"""

from __future__ import annotations

import sqlite3

from control_plane.db.session import Database


class Versions:
    """Reads a number that changes with each commit to one database. Only one thread at a time may use an instance."""

    def __init__(self, database: Database) -> None:
        self.sees_everything = database.is_sqlite
        self._database = database
        self._connection: sqlite3.Connection | None = None

    def current(self) -> int | None:
        """Return the database's version, a number that changes with each commit to the database.

        On PostgreSQL, only commits of this process count. None if the database cannot be read.
        """
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
