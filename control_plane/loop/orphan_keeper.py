"""Deletes orphans: uploaded shards in S3 of checkpoints that are incomplete and can never become complete.

The keeper examines a run after each of its generations, after its end, and after each later deletion of a checkpoint.
It remembers the examined generations in memory only, so a restarted server examines every run once more.

Invariant: this module deletes only objects that `core.orphans` returns. It reads the checkpoints' rows before it lists
the objects. A checkpoint that is completed afterwards belongs to a newer generation than the examined generations.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from itertools import islice
from typing import Final

from control_plane.cloud.errors import CloudError
from control_plane.cloud.objects import DELETED_AT_ONCE, ServiceStore
from control_plane.core.orphans import KEPT_SECONDS, ListedObject, orphans
from control_plane.db import automation, checkpoints, jobs
from control_plane.db.errors import NotFound
from control_plane.db.jobs import LaunchedRun
from control_plane.db.session import Database
from control_plane.loop.records import prefix_of
from control_plane.loop.repeating import repeat
from everstep.protocol.errors import ProtocolError
from everstep.protocol.ids import Generation
from everstep.protocol.plan import ObjectReference

log = logging.getLogger(__name__)

ORPHAN_CHECK_SECONDS: Final = 600.0
RUNS_AT_ONCE: Final = 50
"""Limit of runs that one call of `delete_due` examines.

Otherwise a restarted server would list the objects of every run at once.
"""


class OrphanKeeper:
    """The loop that deletes orphans: uploaded shards that no checkpoint can contain.

    Several servers may run this loop, because deletion is idempotent.
    """

    def __init__(self, database: Database, objects: ServiceStore, now: Callable[[], datetime]) -> None:
        self._database = database
        self._objects = objects
        self._now = now
        self._examined: dict[str, tuple[int, int]] = {}
        """For each run: the generation below which the keeper has deleted all orphans, and a number of checkpoints.

        The number counts the run's deleted checkpoints at that time. If it grows after the run's end, the keeper
        examines the run again: the deletion can leave frozen objects (constant parameters) that no checkpoint names.
        """

    async def run(self, stop: asyncio.Event) -> None:
        """Delete orphans (shards that no checkpoint can contain) every `ORPHAN_CHECK_SECONDS` until `stop` is set."""
        await repeat(self.delete_due, stop, seconds=ORPHAN_CHECK_SECONDS, trouble="could not delete orphaned shards")

    def delete_due(self) -> int:
        """Delete orphans (shards in S3 that no checkpoint can contain) of the runs whose generations ended since the
        last call.

        Return the number of deleted objects. Blocks: call it in a thread.
        """
        with self._database.read() as session:
            if automation.find(session) is not None:
                return 0
            runs = jobs.launched(session)
            deleted = checkpoints.deleted_counts(session)
        self._examined = {run.run_id: self._examined.get(run.run_id, (1, 0)) for run in runs}
        count = 0
        for run, ended_before in islice(self._due(runs, deleted), RUNS_AT_ONCE):
            examined = ended_before, deleted.get(run.run_id, 0)
            try:
                count += self._collect(run.run_id, Generation(ended_before))
                self._examined[run.run_id] = examined
            except CloudError as error:
                log.warning("run %s: could not delete orphaned shards; the next pass retries: %s", run.run_id, error)
            except ProtocolError as error:
                # Mark the run as examined although its manifest is invalid. Another attempt would fail in the same
                # way, and would take the place of another run within `RUNS_AT_ONCE`.
                self._examined[run.run_id] = examined
                log.error("run %s: orphaned shards stay, because a stored manifest is invalid: %s", run.run_id, error)
            except NotFound:
                log.info("run %s: the job was deleted", run.run_id)
        return count

    def _due(self, runs: Iterable[LaunchedRun], deleted: Mapping[str, int]) -> Iterator[tuple[LaunchedRun, int]]:
        for run in runs:
            ended_before = run.generation if run.ended_at is None else run.generation + 1
            generation, deleted_count = self._examined[run.run_id]
            is_new_deletion = run.ended_at is not None and deleted.get(run.run_id, 0) > deleted_count
            if (ended_before > generation or is_new_deletion) and self._is_quiet(run):
                yield run, ended_before

    def _is_quiet(self, run: LaunchedRun) -> bool:
        """Return whether all ended generations of a run ended more than 2 * `KEPT_SECONDS` ago.

        An object that was written less than `KEPT_SECONDS` ago is never an orphan (`core.orphans`). The keeper examines
        each generation once, so all of its objects must be older by then. An upload may outlast its generation: the
        factor 2 leaves it `KEPT_SECONDS` for its last writes.
        """
        since = run.launched_at if run.ended_at is None else run.ended_at
        return (self._now() - since).total_seconds() > 2 * KEPT_SECONDS

    def _collect(self, run_id: str, ended_before: Generation) -> int:
        with self._database.read() as session:
            job = jobs.get_run(session, run_id)
            prefix = prefix_of(job.spec.checkpoint_uri)
            rows = checkpoints.of_run(session, run_id)
            frozen = checkpoints.frozen_keys(rows) if job.ended_at is not None else None
            named: dict[tuple[int, int], frozenset[str] | None] = {}
            for each in rows:
                manifest = each.contents()
                if each.state == checkpoints.DELETING:
                    named[each.generation, each.step] = None
                elif manifest is not None:
                    keys = [shard.key for shard in manifest.shards] + [shared.key for shared in manifest.replicated]
                    named[each.generation, each.step] = frozenset({each.manifest_key, *keys})
        folder = ObjectReference(bucket=prefix.bucket, key=f"{prefix.key}run={run_id}/")
        found = (ListedObject(info.reference.key, info.modified_at.timestamp()) for info in self._objects.list(folder))
        left = orphans(found, folder.key, named, frozen=frozen, ended_before=ended_before, now=self._now().timestamp())
        count = 0
        while keys := list(islice(left, DELETED_AT_ONCE)):
            self._objects.delete(folder.bucket, keys)
            count += len(keys)
        if count:
            log.info("run %s: deleted %d uploaded shards that no checkpoint contains", run_id, count)
        return count
