from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from control_plane.db import jobs
from control_plane.db.jobs import NewJob, SavedJob, SavedJobSpec
from control_plane.db.leases import Lease, Leaser
from control_plane.db.session import Database
from tests import sqlite
from tests.postgresql import BOTH_ENGINES

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)


@pytest.fixture(params=BOTH_ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    """Run each test of this package on both database engines."""
    return str(request.param)


@pytest.fixture
def database(database_url: str, tmp_path: Path) -> Iterator[Database]:
    made = Database(database_url) if database_url else sqlite.migrated(tmp_path / "test.db")
    yield made
    made.close()


def spec(**changes: object) -> SavedJobSpec:
    values: dict[str, object] = {
        "source_sha256": "0" * 64,
        "source_bucket": "b",
        "source_key": "k",
        "source_bytes": 1,
        "entry_point": "train.py",
        "node_count": 2,
        "ranks_per_node": 1,
        "copies": 2,
        "checkpoint_uri": "s3://b/c/",
        "output_uri": "s3://b/o/",
        "log_uri": "s3://b/l/",
    }
    return SavedJobSpec(**{**values, **changes})  # type: ignore[arg-type]


def new_job(name: str = "gpt", **changes: object) -> NewJob:
    values: dict[str, object] = {
        "run_id": name.ljust(32, "0"),
        "name": name,
        "fleet_name": "main",
        "project": "default",
        "priority": 0,
        "tags": {"team": "a"},
        "spec": spec(),
        "state": "queued",
        "reason": "Waiting.",
    }
    return NewJob(**{**values, **changes})  # type: ignore[arg-type]


@pytest.fixture
def job(database: Database) -> SavedJob:
    with database.write() as session:
        return jobs.create(session, new_job(), NOW)


@pytest.fixture
def lease(database: Database, job: SavedJob) -> Lease:
    with database.write() as session:
        claimed = Leaser("owner", 3.0, lambda: 0.0).claim(session, "job", job.run_id)
    assert claimed is not None
    return claimed
