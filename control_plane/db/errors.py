"""Errors that database functions raise. Callers must handle them.

Other exceptions, such as SQLAlchemy's error for a lost connection, are unexpected.
"""

from __future__ import annotations

from collections.abc import Mapping


class DatabaseError(Exception):
    """Base class of expected database errors."""


class StaleLease(DatabaseError):
    """Another control-plane server has taken over the lease that permits writes to the row."""


class NotFound(DatabaseError):
    """The row does not exist. `noun` is its kind for the message, for example "training job"."""

    def __init__(self, noun: str, name: str) -> None:
        super().__init__(f"there is no {noun} named {name!r}")
        self.noun = noun
        self.name = name


class AlreadyExists(DatabaseError):
    """A row with this name exists already. `noun` is its kind for the message."""

    def __init__(self, noun: str, name: str) -> None:
        super().__init__(f"there is already a {noun} named {name!r}")
        self.noun = noun
        self.name = name


class AmbiguousName(DatabaseError):
    """Jobs of several projects have this name.

    Only a search over all projects raises this error, so it reveals no project.
    """

    def __init__(self, name: str, run_ids: Mapping[str, str]) -> None:
        """Create the error for a name. `run_ids` contains the run id of each project's job."""
        projects = " and ".join(", ".join(run_ids).rsplit(", ", 1))
        super().__init__(
            f"there are training jobs named {name!r} in the projects {projects}; use a RunId: "
            + ", ".join(f"{run_id} ({project})" for project, run_id in run_ids.items())
        )
        self.name = name
        self.run_ids = run_ids


class Conflict(DatabaseError):
    """The row's state does not allow the change."""


class TooMuch(DatabaseError):
    """A report would read too many rows. `remedy` describes requests that read fewer rows."""

    def __init__(self, found: str, remedy: str) -> None:
        super().__init__(f"the time range has {found}, which is too much for one report")
        self.remedy = remedy


class SchemaMismatch(DatabaseError):
    """The database's schema is not the one that this version needs."""


class DanglingReferences(DatabaseError):
    """A migration or a damaged file left rows whose foreign keys name no row."""


class UnusableBackup(DatabaseError):
    """The file is no backup, is damaged, or is a backup of another kind of database."""


class DatabaseInUse(DatabaseError):
    """A backup or a restore would overwrite data, or disturb a running server."""


class BackupFailed(DatabaseError):
    """A program or a disk failed during a backup or a restore. The message ends with the program's output."""
