"""Writes a backup of the database to a file, and restores the database from such a file.

    SQLite        the file is a SQLite database, copied with SQLite's online backup
    PostgreSQL    the file is a dump of pg_dump in custom format

A backup contains the digests of tokens, but neither the tokens nor the server secret.

    back_up   servers may run; the file has one consistent state
    load      restores the file. No server can start on the result yet
    finish    one transaction: migrates the schema, raises generation numbers and event ids so that none is used twice,
              and adapts generations and checkpoints to the objects in S3
    publish   SQLite: moves the complete file to its place
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Final

from sqlalchemy import Connection, func, inspect, select, text, update
from sqlalchemy.orm import Session

from control_plane.core import database_restore
from control_plane.core.checkpoints import TrashMark
from control_plane.core.database_restore import BackedUpRun, Difference, Place, Reconciliation
from control_plane.core.observed.steps import NO_GENERATION
from control_plane.db import automation, checkpoints, events, postgresql_dumps, schema
from control_plane.db.automation import DatabaseRestore
from control_plane.db.errors import BackupFailed, DatabaseInUse, UnusableBackup
from control_plane.db.models import CheckpointRow, EventRow, GenerationRow, JobRow
from control_plane.db.session import Database
from everstep.protocol import ids

_SQLITE_MAGIC: Final = b"SQLite format 3\0"
_SUFFIXES: Final = ("", "-wal", "-shm")


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredRun:
    """A run in a loaded backup that has not ended, or has checkpoints."""

    run_id: str
    job_name: str
    checkpoint_uri: str
    """`s3://bucket/prefix/`."""
    has_ended: bool
    backup: BackedUpRun


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredManifest:
    """A checkpoint's manifest in S3. The checkpoint's row in the database contains a copy of the manifest's bytes."""

    bucket: str
    key: str
    body: bytes
    object_bytes: int
    """Size without objects with frozen parameters, which several checkpoints use."""
    modified_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class RunChanges:
    """The run's manifests in S3, and the changes after which the run's restored rows match its checkpoints in S3."""

    changes: Reconciliation
    manifests: Mapping[Place, StoredManifest]
    pinned: Mapping[Place, datetime] = field(default_factory=dict)
    """Time in each mark of a pin."""
    trashed: Mapping[Place, TrashMark] = field(default_factory=dict)
    issued: ids.Generation = NO_GENERATION
    """The highest generation number that S3 names as issued."""
    differences: Sequence[Difference] = ()


def back_up(database: Database, file: Path) -> None:
    """Write one consistent state of the database to a new file, which only its owner can read.

    Servers may run meanwhile.

    Raises:
        DatabaseInUse: the file exists.
        UnusableBackup: the database has no Everstep tables.
        BackupFailed: the disk is full, or pg_dump is missing or fails. No file remains.
    """
    if file.exists():
        raise DatabaseInUse(f"{file} exists: name a new file")
    if schema.current(database) is None:
        where = database.url.render_as_string(hide_password=True)
        raise UnusableBackup(f"the database {where} has no Everstep tables, so there is nothing to back up")
    partial = file.with_name(f".{file.name}.partial")
    try:
        os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))
        if database.is_sqlite:
            _copy_sqlite(Path(str(database.url.database)), partial)
        else:
            postgresql_dumps.dump(database.url, partial)
        _sync(partial)
        partial.rename(file)
    except (OSError, sqlite3.Error) as error:
        raise BackupFailed(f"the backup to {file} failed: {error}") from error
    finally:
        partial.unlink(missing_ok=True)


def load(file: Path, url: str) -> Database:
    """Load a backup into a new database, which the caller closes. No server can use it before `finish` and `publish`.

    The database of `url` does not exist yet (SQLite) or has no tables (PostgreSQL). A SQLite database is in a temporary
    file beside the file of `url`.

    Raises:
        UnusableBackup: the file is no backup, is damaged, or belongs to the other kind of database.
        DatabaseInUse: the database of the URL has tables, or the file of the URL exists.
        BackupFailed: the disk is full, or pg_restore is missing or fails.
    """
    target = Database(url)
    try:
        _refuse_other_kind(file, target)
        if target.is_sqlite:
            return _load_sqlite(file, Path(str(target.url.database)))
        if postgresql_dumps.revision(file) is None:
            raise UnusableBackup(f"{file} contains no Everstep tables")
        if tables := inspect(target.engine).get_table_names():
            raise DatabaseInUse(
                f"the database {target.url.render_as_string(hide_password=True)} has {len(tables)} tables: create an "
                "empty database, and name it with --database-url. Keep the old one until the new one works"
            )
        postgresql_dumps.load(file, target.url)
    finally:
        target.close()
    return Database(url)


def newest_time(database: Database) -> datetime | None:
    """Return the newest time of a job or event. None without any."""
    with database.read() as session:
        times = [session.scalar(select(func.max(column))) for column in (JobRow.modified_at, EventRow.at)]
    return max((each for each in times if each is not None), default=None)


def runs(database: Database) -> tuple[RestoredRun, ...]:
    """Return the runs of a loaded backup that have not ended or have complete checkpoints, by run id."""
    with database.read() as session:
        numbers: dict[str, set[ids.Generation]] = {}
        for run_id, number in session.execute(select(GenerationRow.run_id, GenerationRow.number)):
            numbers.setdefault(run_id, set()).add(ids.Generation(number))
        places: dict[str, dict[str, set[Place]]] = {}
        columns = (
            CheckpointRow.run_id,
            CheckpointRow.generation,
            CheckpointRow.step,
            CheckpointRow.state,
            CheckpointRow.completed_at,
            CheckpointRow.pinned_at,
        )
        for run_id, generation, step, state, completed_at, pinned_at in session.execute(select(*columns)):
            of_run = places.setdefault(run_id, {"complete": set(), "deleted": set(), "pinned": set(), "trashed": set()})
            place = (ids.Generation(generation), ids.Step(step))
            if state in (checkpoints.DELETING, checkpoints.DELETED):
                of_run["deleted"].add(place)
            elif completed_at is not None:
                of_run["complete"].add(place)
            if state == checkpoints.TRASHED:
                of_run["trashed"].add(place)
            if pinned_at is not None:
                of_run["pinned"].add(place)
        jobs = session.execute(
            select(JobRow.run_id, JobRow.name, JobRow.spec, JobRow.ended_at).order_by(JobRow.run_id)
        ).all()
    nothing: dict[str, set[Place]] = {"complete": set()}
    return tuple(
        RestoredRun(
            run_id=run_id,
            job_name=name,
            checkpoint_uri=spec["checkpoint_uri"],
            has_ended=ended_at is not None,
            backup=BackedUpRun(generations=frozenset(numbers.get(run_id, ())), **places.get(run_id, nothing)),
        )
        for run_id, name, spec, ended_at in jobs
        if ended_at is None or places.get(run_id, nothing)["complete"]
    )


def finish(database: Database, file: Path, changes: Mapping[str, RunChanges], now: datetime) -> ids.Generation:
    """Make a loaded backup usable, in one transaction. Return a generation number below all that start afterwards.

    `file` is the backup; a PostgreSQL backup's schema revision is read from it. `changes` are what the objects in S3
    require, by run id.

    Raises:
        SchemaMismatch: a newer version of Everstep made the backup.
        ImplausibleClock: the clock shows a time before the backup.
        DanglingReferences: the backup has rows whose foreign keys name no row.
    """
    newest = newest_time(database)
    first = database_restore.first_number(now.timestamp(), 0.0 if newest is None else newest.timestamp())
    revision = None if database.is_sqlite else postgresql_dumps.revision(file)
    with database.migrating() as connection:
        if revision is not None:
            connection.execute(text("INSERT INTO alembic_version VALUES (:revision)"), {"revision": revision})
        schema.upgrade(connection)
        with Session(connection) as session:
            _raise_numbers(session, first, {run_id: each.issued for run_id, each in changes.items()})
            for run_id, each in sorted(changes.items()):
                _apply(session, run_id, each, now)
            _record(session, connection, first, now)
            differences = [asdict(each) for run in changes.values() for each in run.differences]
            restore = DatabaseRestore(restored_at=now, first_generation=first, differences=differences)
            automation.add_restore(session, restore)
            session.commit()
    return first


def publish(database: Database, url: str) -> None:
    """Close a restored database after `finish`, and move a SQLite file to the path in the URL.

    Raises DatabaseInUse if another process created a file at this path during the restore.
    """
    database.close()
    if not database.is_sqlite:
        return
    staged, place = Path(str(database.url.database)), Path(str(Database(url).url.database))
    _sync(staged)
    try:
        os.link(staged, place)
    except FileExistsError as error:
        raise DatabaseInUse(f"{place} appeared during the restore: a server is running. Stop it") from error
    discard(database)


def discard(database: Database) -> None:
    """Close a database that `load` opened, and delete its temporary file. Idempotent."""
    database.close()
    if database.is_sqlite:
        _unlink(Path(str(database.url.database)))


def _raise_numbers(session: Session, first: ids.Generation, in_s3: Mapping[str, ids.Generation]) -> None:
    for run_id, issued in session.execute(select(JobRow.run_id, JobRow.issued_generation)).all():
        raised = max(database_restore.issued_number(ids.Generation(issued), first), in_s3.get(run_id, NO_GENERATION))
        session.execute(update(JobRow).where(JobRow.run_id == run_id).values(issued_generation=raised))


def _apply(session: Session, run_id: str, run: RunChanges, now: datetime) -> None:
    """Add generations and checkpoints that S3 has and the backup lacks.

    Mark checkpoints without manifest as deleted.
    """
    changes = run.changes
    seen_at: dict[ids.Generation, datetime] = {}
    for (generation, _), manifest in run.manifests.items():
        seen_at[generation] = min(manifest.modified_at, seen_at.get(generation, manifest.modified_at))
    for record in changes.generations:
        at = seen_at.get(record.generation, now)
        session.add(
            GenerationRow(
                run_id=run_id,
                number=record.generation,
                parent=record.parent,
                base_step=record.base_step,
                world_size=record.world_size,
                plan=b"",
                created_at=at,
                started_at=at,
            )
        )
    for found in changes.checkpoints:
        manifest = run.manifests[found.generation, found.step]
        row = session.get(CheckpointRow, (run_id, found.generation, found.step)) or CheckpointRow(
            run_id=run_id, generation=found.generation, step=found.step, created_at=manifest.modified_at
        )
        row.state, row.bucket, row.manifest_key = checkpoints.COMPLETE, manifest.bucket, manifest.key
        row.manifest, row.object_bytes = manifest.body, manifest.object_bytes
        row.completed_at = manifest.modified_at
        session.add(row)
        newest = update(JobRow).where(JobRow.run_id == run_id, JobRow.max_boundary < found.step)
        session.execute(newest.values(max_boundary=found.step))
    session.flush()
    for generation, step in changes.missing:
        row = session.get_one(CheckpointRow, (run_id, generation, step))
        row.state, row.manifest, row.verify_requested_at = checkpoints.DELETED, None, None
    for generation, step in changes.pinned:
        session.get_one(CheckpointRow, (run_id, generation, step)).pinned_at = run.pinned[generation, step]
    for generation, step in changes.trashed:
        stored = checkpoints.find(session, run_id, step=step, generation=generation)
        checkpoints.set_trashed(session, run_id, stored, run.trashed[generation, step])
    for generation, step in changes.undeleted:
        stored = checkpoints.find(session, run_id, step=step, generation=generation)
        checkpoints.set_state(session, run_id, stored, checkpoints.COMPLETE)
    session.flush()


def _record(session: Session, connection: Connection, first: ids.Generation, now: datetime) -> None:
    """Store the event DatabaseRestored, with an id above all ids issued after the backup."""
    number = database_restore.first_event_id(events.newest_id(session), now.timestamp())
    message = (
        f"The database was restored from a backup. New generations have numbers above {first}. Nothing is deleted from "
        "S3 until a person has accepted the differences (everstep db restored)."
    )
    session.add(EventRow(id=number, at=now, type="DatabaseRestored", message=message))
    session.flush()
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT setval(pg_get_serial_sequence('event', 'id'), :number)"), {"number": number})


def _refuse_other_kind(file: Path, target: Database) -> None:
    try:
        with file.open("rb") as opened:
            begin = opened.read(len(_SQLITE_MAGIC))
    except OSError as error:
        raise UnusableBackup(f"the backup {file} cannot be read: {error.strerror}") from error
    kind = "sqlite" if begin == _SQLITE_MAGIC else "postgresql" if begin.startswith(postgresql_dumps.MAGIC) else ""
    if not kind:
        raise UnusableBackup(f"{file} is no backup: it begins neither like a SQLite file nor like a dump of pg_dump")
    if kind != target.url.get_backend_name():
        raise UnusableBackup(
            f"{file} is a backup of {kind}, and the database URL names {target.url.get_backend_name()}: restore to a "
            f"{kind} database"
        )


def _load_sqlite(file: Path, place: Path) -> Database:
    for suffix in _SUFFIXES:
        if (found := Path(f"{place}{suffix}")).exists():
            raise DatabaseInUse(
                f"{found} exists: stop the server, and move the files {place.name}* to another folder. Keep them until "
                "the restored database works"
            )
    staged = place.with_name(f".{place.name}.restoring")
    _unlink(staged)  # An earlier restore that was killed may have left this file.
    try:
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        _copy_sqlite(file, staged)
    except sqlite3.DatabaseError as error:
        _unlink(staged)
        raise UnusableBackup(f"the backup {file} is damaged: {error}") from error
    except OSError as error:
        _unlink(staged)
        raise BackupFailed(f"the restore to {place} failed: {error}") from error
    loaded = Database(f"sqlite:///{staged}")
    if schema.current(loaded) is None:
        discard(loaded)
        raise UnusableBackup(f"{file} contains no Everstep tables")
    return loaded


def _copy_sqlite(origin: Path, copy: Path) -> None:
    """Copy one consistent state of a SQLite database, while servers may write to it, and check the copy."""
    # Open the origin read-only, but not with SQLite's option `immutable`, which would ignore its write-ahead log.
    source = f"{origin.absolute().as_uri()}?mode=ro"
    with closing(sqlite3.connect(source, uri=True)) as reading, closing(sqlite3.connect(copy)) as writing:
        reading.backup(writing)
        writing.execute("PRAGMA journal_mode=DELETE")  # Store the copy in one file, without a separate log.
        problems: Sequence[tuple[str]] = writing.execute("PRAGMA integrity_check(3)").fetchall()
    if problems != [("ok",)]:
        raise sqlite3.DatabaseError("; ".join(each[0] for each in problems))


def _unlink(path: Path) -> None:
    for suffix in _SUFFIXES:
        Path(f"{path}{suffix}").unlink(missing_ok=True)


def _sync(path: Path) -> None:
    for each in (path, path.parent):
        descriptor = os.open(each, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
