"""Verifies requested checkpoints in S3, and stores for each whether its objects are intact (the verdict).

If two servers verify the same checkpoint, both store the same verdict.

Invariant: this module stores a verdict only after it could read everything. If it could not, the request stays with the
reason, and is tried again later. Damage counts only if two reads find the same.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial

from control_plane.cloud.errors import CloudError, GarbledAnswer, ObjectTooLarge
from control_plane.cloud.objects import ServiceStore
from control_plane.core.verification import CheckpointVerdict, Damage, DamageKind, blocked
from control_plane.db import checkpoints
from control_plane.db.checkpoints import SavedCheckpoint
from control_plane.db.session import Database
from control_plane.loop.shard_verification import IDLE_BYTES, KnownContents, Mismatch, Stopped, existing, shard_damage
from everstep.protocol.agent_messages import Obstacle
from everstep.protocol.errors import ProtocolError, UnknownVersion
from everstep.protocol.plan import ObjectReference

log = logging.getLogger(__name__)

VERIFICATION_POLL_SECONDS = 1.0


class Verifier:
    """The background loop that verifies checkpoints. Tests pass a smaller `idle_bytes`."""

    def __init__(
        self, database: Database, objects: ServiceStore, now: Callable[[], datetime], *, idle_bytes: int = IDLE_BYTES
    ) -> None:
        self._idle_bytes = idle_bytes
        self._database = database
        self._objects = objects
        self._now = now

    def verify_next(self, is_stopped: Callable[[], bool] = lambda: False) -> bool:
        """Verify the checkpoint with the oldest request, which may take hours. Blocks.

        Return whether a verdict was stored. The verifier calls `is_stopped` before each chunk; if it returns True, the
        request stays.
        """
        with self._database.read() as session:
            asked = checkpoints.to_verify(session, self._now())
        if asked is None:
            return False
        run_id, checkpoint = asked
        try:
            verdict = CheckpointVerdict.of(*self._damage(checkpoint, is_stopped))
        except Stopped:
            return False
        except Exception as error:  # No content of one checkpoint may stop the verification of the others.
            self._wait(run_id, checkpoint, error)
            return False
        with self._database.write() as session:
            checkpoints.store_verdict(session, run_id, checkpoint, verdict=verdict, now=self._now())
        log.info("run %s: the checkpoint of step %d is %s", run_id, checkpoint.step, str(verdict) or "intact")
        return True

    def _wait(self, run_id: str, checkpoint: SavedCheckpoint, error: Exception) -> None:
        match error:
            case CloudError():
                obstacle = error.obstacle
            case OSError():
                obstacle = Obstacle.NO_ANSWER
            case UnknownVersion():
                obstacle = Obstacle.REFUSED
            case _:
                obstacle = Obstacle.GARBLED
                log.error("run %s: the verification of step %d failed", run_id, checkpoint.step, exc_info=error)
        why = blocked(checkpoint.blocked, obstacle, str(error), self._now().timestamp())
        with self._database.write() as session:
            checkpoints.store_blocked(session, run_id, checkpoint, why)
        log.warning("run %s: could not verify the checkpoint of step %d: %s", run_id, checkpoint.step, error)

    def _damage(self, checkpoint: SavedCheckpoint, is_stopped: Callable[[], bool]) -> Iterator[Damage]:
        try:
            manifest = checkpoint.contents()
        except UnknownVersion:
            raise  # A newer version of Everstep wrote the manifest. It may be intact.
        except ProtocolError as error:
            yield Damage(kind=DamageKind.RECORD, detail=f"the stored manifest is invalid: {error}")
            return
        if manifest is None:
            yield Damage(kind=DamageKind.RECORD, detail="there is no manifest")
            return
        yield from _agreed(partial(self._manifest_damage, checkpoint))
        known = KnownContents(self._idle_bytes)
        for shard in manifest.shards:
            where = ObjectReference(bucket=checkpoint.bucket, key=shard.key)
            yield from _agreed(partial(shard_damage, self._objects, where, shard, is_stopped, known))

    def _manifest_damage(self, checkpoint: SavedCheckpoint) -> Damage | None:
        where = ObjectReference(bucket=checkpoint.bucket, key=checkpoint.manifest_key)
        expected = checkpoint.manifest or b""
        try:
            info = existing(self._objects, where)
        except Mismatch as error:
            return Damage(kind=DamageKind.MISSING, detail=f"the manifest is missing: {error}")
        try:
            body = self._objects.get(where, limit_bytes=len(expected))
        except ObjectTooLarge:
            is_as_described = info.size_bytes > len(expected)
        else:
            if body == expected:
                return None
            is_as_described = len(body) == info.size_bytes
        if not is_as_described or info.etag == hashlib.md5(expected, usedforsecurity=False).hexdigest():
            raise GarbledAnswer(f"S3 describes another object than it returns for s3://{where.bucket}/{where.key}")
        return Damage(kind=DamageKind.MANIFEST, detail="the manifest in S3 is not the one that was put")


def _agreed(read: Callable[[], Damage | None]) -> Iterator[Damage]:
    """Yield the damage that a read finds, if a second read finds the same. Raises GarbledAnswer for other damage."""
    first = read()
    if first is None or (second := read()) is None:
        return
    if first != second:
        raise GarbledAnswer(f"two reads disagree: {first}; {second}")
    yield first
