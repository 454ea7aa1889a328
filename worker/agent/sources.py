"""Fetches source archives on an idle node, so that the node's next job starts sooner.

Invariant: the disk holds only archives of the newest request. A node with a job fetches no archives.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from everstep.protocol.plan import SourceArchive
from worker.errors import SourceRefused, StorageError
from worker.node.full_disks import FullDisks
from worker.provisioning.source import SourceArchives
from worker.tasks import Signal

log = logging.getLogger(__name__)


class SourcePrefetch:
    """Fetches the source archives that the control plane requests on an idle node."""

    def __init__(self, archives: SourceArchives, full_disks: FullDisks, *, on_change: Callable[[], None]) -> None:
        self._archives = archives
        self._full_disks = full_disks
        self._on_change = on_change
        self._wanted: tuple[SourceArchive, ...] = ()
        self._asked = Signal()
        self._unsound: set[str] = set()

    @property
    def settled(self) -> tuple[str, ...]:
        """Digests of the archives that this node need not fetch: they are stored here, or are damaged in S3."""
        return tuple(sorted({*self._archives.held, *self._unsound}))

    async def run(self) -> None:
        """Fetch the requested source archives until cancelled. The next request retries a failed fetch."""
        while True:
            version = self._asked.version
            for source in self._wanted:
                if source.sha256 in self._unsound or source.sha256 in self._archives.held:
                    continue
                try:
                    await asyncio.to_thread(self._archives.get, source)
                except (StorageError, OSError) as error:
                    self._full_disks.note(error)
                    log.info("source archive %s cannot be fetched yet: %s", source.sha256[:12], error)
                except SourceRefused as error:
                    # During the fetch, the control plane may have sent a request that no longer names this archive.
                    if source in self._wanted:
                        log.warning("a requested source archive is unusable: %s", error)
                        self._unsound.add(source.sha256)
                self._on_change()
            await self._asked.wait(version)

    async def want(self, sources: tuple[SourceArchive, ...]) -> None:
        """Fetch the given source archives from now on, and delete all other source archives from this node's disk."""
        self._wanted = sources
        self._unsound &= {source.sha256 for source in sources}
        try:
            await asyncio.to_thread(self._archives.keep, {source.sha256 for source in sources})
        except OSError as error:
            # The next request of the control plane repeats the attempt.
            log.info("unneeded source archives cannot be deleted: %s", error)
        self._asked.notify()

    def stop(self) -> None:
        """Stop fetching source archives in advance, because the node has received a job."""
        self._wanted = ()
        self._unsound.clear()
