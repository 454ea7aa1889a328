"""Deletes uploads of source archives that no client completed within `KEPT`.

A presigned upload URL expires after minutes, so no client still completes an upload that is a day old.

Invariant: this module deletes only objects under `PREFIX`. Completed sources have another prefix.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import datetime, timedelta
from itertools import islice
from typing import Final

from control_plane.cloud.objects import DELETED_AT_ONCE, ServiceStore
from everstep.protocol.plan import ObjectReference

log = logging.getLogger(__name__)

PREFIX: Final = "uploads/"
KEPT: Final = timedelta(days=1)
EXPIRY_CHECK_SECONDS: Final = 3_600.0


class UploadKeeper:
    """The loop that deletes uncompleted uploads. Several servers may run it, because deletion is idempotent."""

    def __init__(self, objects: ServiceStore, bucket: str, now: Callable[[], datetime]) -> None:
        self._objects = objects
        self._bucket = bucket
        self._now = now

    def delete_due(self) -> int:
        """Delete the uploads that are older than `KEPT`, and return their number. Blocks."""
        count = 0
        before = self._now() - KEPT
        uploads = self._objects.list(ObjectReference(bucket=self._bucket, key=PREFIX))
        left = (info.reference.key for info in uploads if info.modified_at < before)
        while keys := list(islice(left, DELETED_AT_ONCE)):
            self._objects.delete(self._bucket, keys)
            count += len(keys)
        if count:
            log.info("deleted %d source uploads that no client completed", count)
        return count
