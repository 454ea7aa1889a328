"""Lists a run's checkpoints in S3 while its job waits for a person's consent to repeat training.

The database may lack a checkpoint that S3 has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime
from typing import Final

from control_plane.cloud.errors import CloudError
from control_plane.cloud.objects import ServiceStore
from control_plane.core.observed.steps import StoreListing
from control_plane.core.orphans import PLACE
from control_plane.loop.executor import Executor
from control_plane.loop.records import folder_of_run
from everstep.protocol.agent_messages import Obstacle
from everstep.protocol.ids import RunId, Step
from everstep.protocol.plan import ObjectReference

LISTING_SECONDS: Final = 30.0
OLDEST_SECONDS: Final = 2 * LISTING_SECONDS
"""Age from which a listing proves nothing. S3 can be slow, and a job can wait for consent a second time."""


class StoreListings:
    """The newest listing of each run. Used on the server's event loop; S3 is listed in threads."""

    def __init__(self, objects: ServiceStore, executor: Executor, now: Callable[[], datetime]) -> None:
        self._objects = objects
        self._executor = executor
        self._now = now
        self._newest: dict[RunId, tuple[datetime, StoreListing]] = {}

    def newest(self, run: RunId) -> StoreListing | None:
        """Return the newest listing of a run. None before the first one, and if the newest one is old."""
        found = self._newest.get(run)
        return None if found is None or self._age(found[0]) > OLDEST_SECONDS else found[1]

    def refresh(self, run: RunId, prefix: ObjectReference) -> None:
        """Start to list the objects of a run, unless the newest listing is recent."""
        found = self._newest.get(run)
        if found is None or self._age(found[0]) > LISTING_SECONDS:
            self._executor.begin_work(f"listing/{run}", lambda: self._list(run, folder_of_run(prefix, run)))

    def forget(self, run: RunId) -> None:
        """Drop the listing of a run that no longer waits."""
        self._newest.pop(run, None)

    def _age(self, at: datetime) -> float:
        return (self._now() - at).total_seconds()

    async def _list(self, run: RunId, folder: ObjectReference) -> None:
        self._newest[run] = self._now(), await asyncio.to_thread(listing_of, self._objects, folder)


def listing_of(objects: ServiceStore, folder: ObjectReference) -> StoreListing:
    """List the manifests in a run's folder. A folder without any object counts as unreadable."""
    try:
        keys = [info.reference.key.removeprefix(folder.key) for info in objects.list(folder)]
    except CloudError as error:
        return StoreListing(obstacle=error.obstacle)
    # Every run's folder contains a mark (`loop.checkpoint_marks`), so S3 answered about another bucket.
    if not keys:
        return StoreListing(obstacle=Obstacle.NO_BUCKET)
    places = [PLACE.match(key) for key in keys if key.endswith("/manifest.json")]
    return StoreListing(steps=tuple(sorted({Step(int(found["step"])) for found in places if found is not None})))
