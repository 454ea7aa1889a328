"""Deletes orphans: uploaded shards in S3 of checkpoints that are incomplete and can never become complete.

The keeper examines a run after each of its generations, after its end, and after each later deletion of a checkpoint. A
restarted server examines every run once more. A record in S3 states since when objects are in the trash:

    …run=<run>/trash/<Unix seconds>.json    the keys of orphans, relative to the run's folder

Invariant: this module deletes only objects that `core.orphans` returns now, and that a record has named for the job's
`TrashHours`. It reads the checkpoints' rows before it lists the objects. While the run has not ended, S3 must have a
checkpoint from which the job can be restored.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

import msgspec

from control_plane.cloud.errors import CloudError
from control_plane.cloud.objects import ServiceStore, delete_all
from control_plane.core.orphans import KEPT_SECONDS, ListedObject, orphans
from control_plane.db import automation, checkpoints, events, jobs
from control_plane.db.errors import NotFound
from control_plane.db.jobs import LaunchedRun, SavedJob
from control_plane.db.session import Database
from control_plane.loop.checkpoint_keeper import is_same, restorable
from control_plane.loop.checkpoint_marks import PINNED, TRASHED, folder_of, is_stored
from control_plane.loop.records import run_folder
from everstep.protocol.errors import UNDECODABLE, ProtocolError
from everstep.protocol.ids import Generation
from everstep.protocol.plan import ObjectReference

log = logging.getLogger(__name__)

ORPHAN_CHECK_SECONDS: Final = 600.0
RECORD: Final = re.compile(r"(\d{1,10})\.json", re.ASCII)
"""Name of a record. Its time has at most 10 digits, so that it stays far below the limit of `datetime`."""
_NAMES: Final = msgspec.json.Decoder(list[str])
NEVER: Final = datetime.max.replace(tzinfo=UTC)
RUNS_AT_ONCE: Final = 50
"""Limit of runs per call of `delete_due`. A restarted server would otherwise list the objects of every run at once."""


class OrphanKeeper:
    """The loop that deletes orphans. Several servers may run it, because deletion is idempotent."""

    def __init__(
        self,
        database: Database,
        objects: ServiceStore,
        now: Callable[[], datetime],
        *,
        runs_at_once: int = RUNS_AT_ONCE,
    ) -> None:
        self._runs_at_once = runs_at_once
        self._database = database
        self._objects = objects
        self._now = now
        self._examined: dict[str, tuple[int, int]] = {}
        """For each run: the generation below which no orphans are left, and the number of deleted checkpoints then."""
        self._revisit_at: dict[str, datetime] = {}
        """For each run, the time at which the oldest of its orphans in the trash are due."""
        self._failures: dict[str, int] = {}

    def delete_due(self) -> int:
        """Delete orphans of the runs whose generations ended since the last call, and return their number. Blocks."""
        with self._database.read() as session:
            if not automation.may_delete(session):
                return 0
            runs = jobs.launched(session)
            deleted = checkpoints.deleted_counts(session)
        self._revisit_at = {run.run_id: self._revisit_at.get(run.run_id, NEVER) for run in runs}
        self._examined = {run.run_id: self._examined.get(run.run_id, (1, 0)) for run in runs}
        self._failures = {run.run_id: self._failures.get(run.run_id, 0) for run in runs}
        # Runs that fail on every pass must not take the places of other runs within `RUNS_AT_ONCE`.
        due = sorted(self._due(runs, deleted), key=lambda each: self._failures[each[0].run_id])
        count = 0
        for run, ended_before in due[: self._runs_at_once]:
            examined = ended_before, deleted.get(run.run_id, 0)
            self._failures[run.run_id] += 1
            try:
                count += self._collect(run.run_id, Generation(ended_before))
                self._examined[run.run_id], self._failures[run.run_id] = examined, 0
            except CloudError as error:
                log.warning("run %s: could not delete orphaned shards; the next pass retries: %s", run.run_id, error)
            except ProtocolError as error:
                # Mark the run as examined although its manifest is invalid. Another attempt would fail in the same
                # way, and would take the place of another run within `RUNS_AT_ONCE`.
                self._examined[run.run_id] = examined
                log.error("run %s: orphaned shards stay, because a stored manifest is invalid: %s", run.run_id, error)
            except NotFound:
                log.info("run %s: the job was deleted", run.run_id)
            except Exception:  # The objects of one run must not keep the orphans of all others.
                log.exception("run %s: could not delete orphaned shards; a later pass retries", run.run_id)
        return count

    def _due(self, runs: Iterable[LaunchedRun], deleted: Mapping[str, int]) -> Iterator[tuple[LaunchedRun, int]]:
        for run in runs:
            ended_before = run.generation if run.ended_at is None else run.generation + 1
            generation, deleted_count = self._examined[run.run_id]
            # A deletion after the run's end can leave frozen objects that no checkpoint names.
            is_new_deletion = run.ended_at is not None and deleted.get(run.run_id, 0) > deleted_count
            is_due = self._revisit_at.get(run.run_id, NEVER) <= self._now()
            if (ended_before > generation or is_new_deletion or is_due) and self._is_quiet(run):
                yield run, ended_before

    def _is_quiet(self, run: LaunchedRun) -> bool:
        """Return whether all ended generations of a run ended more than 2 * `KEPT_SECONDS` ago."""
        # An object that was written less than `KEPT_SECONDS` ago is never an orphan, and each generation is examined
        # once. An upload may outlast its generation: the factor 2 leaves it `KEPT_SECONDS` for its last writes.
        since = run.launched_at if run.ended_at is None else run.ended_at
        return (self._now() - since).total_seconds() > 2 * KEPT_SECONDS

    def _collect(self, run_id: str, ended_before: Generation) -> int:
        now = self._now()
        with self._database.read() as session:
            job = jobs.get_run(session, run_id)
            rows = checkpoints.of_run(session, run_id)
            generations = frozenset(each.number for each in jobs.lineage(session, run_id))
            base = restorable(session, job)
        folder = run_folder(job.spec.checkpoint_uri, run_id)
        # Read the records before the objects, so that no object counts as trashed before it was an orphan.
        records = self._records(folder)
        frozen = checkpoints.frozen_keys(rows) if job.ended_at is not None else None
        named: dict[tuple[int, int], frozenset[str] | None] = {}
        for each in rows:
            manifest = each.contents()
            if each.state == checkpoints.DELETING:
                named[each.generation, each.step] = None
            elif manifest is not None:
                keys = [shard.key for shard in manifest.shards] + [shared.key for shared in manifest.replicated]
                marks = [f"{folder_of(each).key}{name}" for name in (PINNED, TRASHED)]
                named[each.generation, each.step] = frozenset({each.manifest_key, *keys, *marks})
        listed = (
            ListedObject(info.reference.key, info.modified_at.timestamp(), info.size_bytes)
            for info in self._objects.list(folder)
        )
        found = list(
            orphans(
                listed,
                folder.key,
                named,
                generations=generations,
                frozen=frozen,
                ended_before=ended_before,
                now=now.timestamp(),
            )
        )
        left, wait = {each.key: each for each in found}, timedelta(hours=job.spec.checkpoint_trash_hours)
        is_due = {key: at + wait <= now for at, keys in records.items() for key in keys}
        fresh = [key for key in left if key not in is_due]
        if fresh and wait:
            self._put_record(folder, job, [left[key] for key in fresh], now, wait)
            records[now] = fresh
        due = [key for key in left if is_due.get(key, not wait)]
        kept = next((each for each in rows if is_same(each, base)), None)
        is_safe = job.ended_at is not None or (kept is not None and is_stored(self._objects, kept))
        if due and not is_safe:
            log.info("run %s: %d orphans stay until a checkpoint can be restored", run_id, len(due))
            self._revisit_at[run_id] = now + timedelta(seconds=KEPT_SECONDS)
            return 0
        delete_all(self._objects, folder.bucket, due)
        if over := [_record_key(folder, at) for at in records if at + wait <= now]:
            self._objects.delete(folder.bucket, over)
        self._revisit_at[run_id] = min((at + wait for at in records if at + wait > now), default=NEVER)
        if due:
            log.info("run %s: deleted %d uploaded shards that no checkpoint contains", run_id, len(due))
        return len(due)

    def _records(self, folder: ObjectReference) -> dict[datetime, Sequence[str]]:
        """Return the keys that each record of the run's trash names, by the time of the record."""
        found: dict[datetime, Sequence[str]] = {}
        prefix = ObjectReference(bucket=folder.bucket, key=f"{folder.key}trash/")
        for info in self._objects.list(prefix):
            if (name := RECORD.fullmatch(info.reference.key.removeprefix(prefix.key))) is not None:
                try:
                    names = _NAMES.decode(self._objects.get(info.reference))
                except UNDECODABLE:
                    # An unreadable record names no object, so its objects get a new record.
                    names = []
                found[datetime.fromtimestamp(int(name[1]), UTC)] = [f"{folder.key}{each}" for each in names]
        return found

    def _put_record(
        self, folder: ObjectReference, job: SavedJob, some: Sequence[ListedObject], now: datetime, wait: timedelta
    ) -> None:
        names = [each.key.removeprefix(folder.key) for each in some]
        self._objects.put(
            ObjectReference(bucket=folder.bucket, key=_record_key(folder, now)), msgspec.json.encode(names)
        )
        size, until = sum(each.size_bytes for each in some), f"{now + wait:%Y-%m-%d %H:%M} UTC"
        message = f"Uploads that no checkpoint contains are in the trash until {until}: {size:,} bytes."
        with self._database.write() as session:
            events.append_for_job(session, job, "OrphansTrashed", message, now)


def _record_key(folder: ObjectReference, at: datetime) -> str:
    return f"{folder.key}trash/{int(at.timestamp())}.json"
