"""The commands `everstep db backup | restore | restored | check | migrate`: `python -P -m control_plane.db_commands`.

They need neither a running server nor a token, so they also work when only the database has survived.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Final

from sqlalchemy.exc import ArgumentError, DBAPIError

from control_plane import options
from control_plane.cloud.connection import Connection
from control_plane.cloud.errors import CloudError
from control_plane.cloud.objects import ObjectInfo, ServiceStore, require_missing
from control_plane.cloud.s3 import S3ServiceStore
from control_plane.core.checkpoints import TrashMark
from control_plane.core.database_restore import (
    NUMBERS_END,
    Difference,
    DifferenceKind,
    Place,
    Reconciliation,
    StoredRun,
    is_in_place,
    reconcile,
)
from control_plane.core.observed.steps import NO_GENERATION
from control_plane.core.orphans import PLACE
from control_plane.db import automation, backups, checks, schema
from control_plane.db.backups import RestoredRun, RunChanges, StoredManifest
from control_plane.db.errors import BackupFailed, DatabaseError, SchemaMismatch
from control_plane.db.session import Database
from control_plane.errors import ImplausibleClock
from control_plane.loop import checkpoint_marks as marks
from control_plane.loop.records import run_folder
from control_plane.replica import is_in_use
from control_plane.settings import embedded_database
from control_plane.steady_clock import steady_now
from everstep.host.local_keys import UnusableKeys
from everstep.protocol.errors import ProtocolError
from everstep.protocol.ids import Generation, Step
from everstep.protocol.manifest import CheckpointManifest, decode_manifest
from everstep.protocol.plan import ObjectReference

log = logging.getLogger("everstep.db")

_SENTENCES: Final = {
    DifferenceKind.FOUND: "S3 has a checkpoint that the backup lacks. It was added",
    DifferenceKind.MISSING: "S3 lacks the manifest. The checkpoint counts as deleted",
    DifferenceKind.PINNED: "a mark in S3 says that it is pinned. It was pinned",
    DifferenceKind.TRASHED: "a mark in S3 says that it is in the trash. It was moved there",
    DifferenceKind.UNDELETED: "the backup has it in the trash, and S3 does not. It was taken out",
    DifferenceKind.UNREADABLE: "the manifest in S3 is invalid. Its objects stay, and no job restores from them",
    DifferenceKind.NOT_SEEN: "S3 was not read, so later checkpoints, pins and deletions are unknown",
}
EXIT_FAILED = 1
"""The database is damaged, or a program, a disk or the cloud failed."""
EXIT_REFUSED = 2
"""The user must change the command. The message says what to change."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Return 0, `EXIT_FAILED` or `EXIT_REFUSED`.

    `arguments` lack the program's name. None: `sys.argv`.
    """
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(message)s")
    given = _parser().parse_args(arguments)
    os.umask(0o077)
    try:
        match given.command:
            case "backup":
                return _back_up(given)
            case "restore":
                return _restore(given)
            case "restored":
                return _restored(given)
            case "check":
                return _check(given)
            case _:
                return _migrate(given)
    except (BackupFailed, CloudError, OSError) as error:
        log.error("%s", error)
        return EXIT_FAILED
    except DBAPIError as error:
        log.error("the database failed: %s", str(error.orig).strip())
        return EXIT_FAILED
    except (DatabaseError, ArgumentError, ImplausibleClock, UnusableKeys) as error:
        log.error("%s", error)
        return EXIT_REFUSED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="everstep db", description="Back up, restore, check and migrate the control plane's database."
    )
    place = options.of_the_database()
    commands = parser.add_subparsers(dest="command", required=True)
    backup = commands.add_parser("backup", parents=[place], help="write the database to a file; servers may run")
    backup.add_argument("file", type=Path, help="new file; only its owner can read it")
    restore = commands.add_parser(
        "restore",
        parents=[place, options.of_the_cloud()],
        help="restore a backup to an empty database; all servers must be stopped",
    )
    restore.add_argument("file", type=Path, help="file of `everstep db backup`")
    restore.add_argument(
        "--without-checkpoints",
        action="store_true",
        help="do not ask S3 for newer checkpoints, pins and deletions. No job restores from such checkpoints",
    )
    restored = commands.add_parser(
        "restored", parents=[place], help="show what a restore changed; until --accept, nothing is deleted from S3"
    )
    restored.add_argument("--accept", action="store_true", help="end the pause of deletions; servers may run")
    commands.add_parser("check", parents=[place], help="find damage; servers may run")
    commands.add_parser("migrate", parents=[place], help="migrate to this version's schema; back up first")
    return parser


def _url(given: argparse.Namespace) -> str:
    return given.database_url or embedded_database(given.state_dir.resolve())


def _existing(given: argparse.Namespace) -> Database:
    """Open the database that the options name."""
    # A connection to a missing SQLite file would create it.
    database = Database(_url(given))
    if database.is_sqlite and not Path(str(database.url.database)).exists():
        raise SchemaMismatch(
            f"{database.url.database} does not exist: name --state-dir or --database-url of the server"
        )
    return database


def _back_up(given: argparse.Namespace) -> int:
    database = _existing(given)
    try:
        backups.back_up(database, given.file)
    finally:
        database.close()
    _say(f"wrote {given.file}, {given.file.stat().st_size:,} bytes. It contains neither the server secret nor tokens")
    return 0


def _restore(given: argparse.Namespace) -> int:
    if is_in_use(given.state_dir):
        log.error("a server runs with the state directory %s: stop all servers, then restore again", given.state_dir)
        return EXIT_REFUSED
    connect = None if given.without_checkpoints else lambda: S3ServiceStore(Connection(options.cloud(given)))
    first, changes = restore(given.file, _url(given), connect, steady_now())
    found = sum(len(each.changes.checkpoints) for each in changes.values())
    lost = sum(len(each.changes.missing) for each in changes.values())
    _say(f"restored {given.file}. New generations have numbers above {first}")
    _say(f"checkpoints newer than the backup: {found} found in S3; {lost} of the backup are no longer in S3")
    _say("tokens that were revoked after the backup are valid again: check `everstep tokens list`")
    _say("nothing is deleted from S3 until you have seen the differences: everstep db restored")
    return 0


def _restored(given: argparse.Namespace) -> int:
    database = _existing(given)
    try:
        with database.read() as session:
            pending = automation.pending_restores(session)
        for each in pending:
            _say(f"restored at {each.restored_at:%Y-%m-%d %H:%M} UTC, with {len(each.differences)} differences from S3")
            for difference in each.differences:
                _say(f"  {_sentence(Difference.of(difference))}")
        if not pending:
            _say("no restore waits: deletions are not paused")
        elif given.accept:
            with database.write() as session:
                automation.accept_restores(session, steady_now())
            _say("accepted: the server deletes from S3 again, by the limits of jobs, and from the trash")
        else:
            _say("nothing is deleted from S3 until you run: everstep db restored --accept")
    finally:
        database.close()
    return 0


def _sentence(difference: Difference) -> str:
    what = f"{difference.job_name} (run {difference.run_id})"
    if difference.step is not None:
        what = f"{what}, step {difference.step} of generation {difference.generation}"
    return f"{what}: {_SENTENCES[difference.kind]}"


def restore(
    file: Path, url: str, connect: Callable[[], ServiceStore] | None, now: datetime
) -> tuple[Generation, dict[str, RunChanges]]:
    """Restore a backup to a database without tables. No generation number, idempotency key or event id is reused.

    `connect` returns the store of checkpoints, if needed; None ignores S3. Return the number that all new generations
    exceed, and the changes by run that made rows match S3.

    Raises:
        DatabaseError: the backup or the database cannot be used. See `backups`.
        CloudError: S3 does not answer. The restored database has no schema version, so no server starts on it.
        ImplausibleClock: `now` is before the backup.
    """
    database = backups.load(file, url)
    try:
        runs = backups.runs(database)
        objects = connect() if runs and connect is not None else None
        changes = {run.run_id: unseen(run) if objects is None else found_in_s3(objects, run) for run in runs}
        first = backups.finish(database, file, changes, now)
        backups.publish(database, url)
    finally:
        backups.discard(database)
    return first, changes


def found_in_s3(objects: ServiceStore, run: RestoredRun) -> RunChanges:
    """Return the changes after which a run's rows agree with its manifests and marks in S3.

    Invalid manifests, and those of other runs, are skipped with a warning. Raises CloudError if S3 does not answer, if
    its list lacks a manifest that a second list contains, or if it lists no object of a run with checkpoints. For an
    ended run, the result then says that S3 was not seen, because a missing bucket must not prevent the restore.
    """
    try:
        return _found_in_s3(objects, run)
    except CloudError as error:
        if not run.has_ended:
            raise
        log.warning("run %s, which has ended: could not look into S3: %s", run.run_id, error)
        return unseen(run)


def unseen(run: RestoredRun) -> RunChanges:
    """Return a result without changes, whose only difference is that S3 was not read."""
    difference = Difference(kind=DifferenceKind.NOT_SEEN, job_name=run.job_name, run_id=run.run_id)
    nothing = Reconciliation(generations=(), checkpoints=(), missing=())
    return RunChanges(changes=nothing, manifests={}, differences=(difference,))


def _found_in_s3(objects: ServiceStore, run: RestoredRun) -> RunChanges:
    folder = run_folder(run.checkpoint_uri, run.run_id)
    known = run.backup.complete | run.backup.deleted
    decoded: list[CheckpointManifest] = []
    stored: dict[Place, StoredManifest] = {}
    present: set[Place] = set()
    pinned: dict[Place, datetime] = {}
    trashed: dict[Place, TrashMark] = {}
    issued = 0
    for info in objects.list(folder):
        key = info.reference.key
        issued = max(issued, marks.issued_in(key))
        found = PLACE.match(key.removeprefix(folder.key))
        if found is None:
            continue
        place = (Generation(int(found["generation"])), Step(int(found["step"])))
        match key.removeprefix(f"{folder.key}{found[0]}"):
            case marks.PINNED:
                pinned[place] = marks.pin_of(objects.get(info.reference), info.modified_at)
            case marks.TRASHED:
                trashed[place] = marks.trash_of(objects.get(info.reference), info.modified_at)
            case "manifest.json":
                present.add(place)
                if place not in known and (manifest := _manifest(objects, folder.key, info)) is not None:
                    decoded.append(manifest[0])
                    stored[place] = manifest[1]
            case _:
                pass
    for generation, step in sorted(run.backup.complete - present):
        manifest_key = f"{folder.key}gen={generation}/step={step}/manifest.json"
        require_missing(objects, ObjectReference(bucket=folder.bucket, key=manifest_key), folder.key)
    s3 = StoredRun(manifests=decoded, present=present, pinned=pinned.keys(), trashed=trashed.keys())
    changes = reconcile(s3, run.backup)
    return RunChanges(
        changes=changes,
        manifests=stored,
        pinned=pinned,
        trashed=trashed,
        issued=Generation(issued) if issued < NUMBERS_END else NO_GENERATION,
        differences=changes.differences(run.job_name, run.run_id),
    )


def _manifest(objects: ServiceStore, folder: str, info: ObjectInfo) -> tuple[CheckpointManifest, StoredManifest] | None:
    body = objects.get(info.reference)
    try:
        manifest = decode_manifest(body)
    except ProtocolError as error:
        log.warning("skipped the manifest %s: %s", info.reference.key, error)
        return None
    if not is_in_place(manifest, folder, info.reference.key):
        log.warning("skipped the manifest %s: it names objects of another run", info.reference.key)
        return None
    return manifest, StoredManifest(
        bucket=info.reference.bucket,
        key=info.reference.key,
        body=body,
        object_bytes=sum(each.object_bytes for each in manifest.shards)
        + sum(each.object_bytes for each in manifest.replicated),
        modified_at=info.modified_at,
    )


def _check(given: argparse.Namespace) -> int:
    database = _existing(given)
    try:
        faults, revision = checks.check(database), schema.current(database)
    finally:
        database.close()
    for fault in faults:
        _say(fault)
    _say(f"{len(faults)} faults" if faults else f"the database is intact, with schema {revision}")
    return EXIT_FAILED if faults else 0


def _migrate(given: argparse.Namespace) -> int:
    database = Database(_url(given))
    try:
        before, after = schema.migrate(database), schema.current(database)
    finally:
        database.close()
    _say(f"schema {before or 'none'} → {after}")
    return 0


def _say(words: str) -> None:
    sys.stdout.write(f"{words}\n")


if __name__ == "__main__":
    sys.exit(main())
