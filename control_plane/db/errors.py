"""Errors of the database.

DatabaseError
├── StaleLease          the row's lease is no longer ours: discard what was worked out under it
├── NotFound            no row of that name
├── AlreadyExists       a row of that name exists
├── Conflict            the row is not in a state that allows the change
└── SchemaMismatch      the database has a schema that this version does not know
"""

from __future__ import annotations


class DatabaseError(Exception):
    """What the database said no to, expected and typed."""


class StaleLease(DatabaseError):
    """Another replica of the control plane owns the row now."""


class NotFound(DatabaseError):
    """There is no such row.

    Args:
        noun: "training job", "fleet" …
        name: the name that was looked for.
    """

    def __init__(self, noun: str, name: str) -> None:
        super().__init__(f"there is no {noun} named {name!r}")
        self.noun = noun
        self.name = name


class AlreadyExists(DatabaseError):
    """There is such a row already.

    Args:
        noun: "training job", "fleet" …
        name: the name that is taken.
    """

    def __init__(self, noun: str, name: str) -> None:
        super().__init__(f"there is already a {noun} named {name!r}")
        self.noun = noun
        self.name = name


class Conflict(DatabaseError):
    """The row is not in a state that allows the change."""


class SchemaMismatch(DatabaseError):
    """The database's schema is not the one that this version was written for."""
