"""SQLite files with the newest schema: migrated once in a process and then copied, since migrating takes longer than
most tests.
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
    """Make a database without rows at a path where there is none yet."""
    assert not path.exists()
    shutil.copyfile(_template(), path)


@functools.cache
def _template() -> Path:
    directory = tempfile.TemporaryDirectory(prefix="everstep-test-")
    atexit.register(directory.cleanup)
    path = Path(directory.name) / "template.db"
    database = Database(f"sqlite:///{path}")
    schema.migrate(database)
    database.close()
    return path
