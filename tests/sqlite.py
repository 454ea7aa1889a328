"""SQLite files with the newest schema.

Each process migrates one file and copies it for each test, because a migration takes longer than most tests.
"""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

from control_plane.db import schema
from control_plane.db.session import Database


def make_migrated(path: Path) -> None:
    """Create an empty database with the newest schema at this path. The path must have no file yet."""
    assert not path.exists()
    shutil.copyfile(_template(), path)


def migrated(path: Path) -> Database:
    """Create a database as `make_migrated` does, and open it. The caller closes it."""
    make_migrated(path)
    return Database(f"sqlite:///{path}")


@functools.cache
def _template() -> Path:
    directory = tempfile.TemporaryDirectory(prefix="everstep-test-")
    atexit.register(directory.cleanup)
    path = Path(directory.name) / "template.db"
    database = Database(f"sqlite:///{path}")
    schema.migrate(database)
    database.close()
    return path
