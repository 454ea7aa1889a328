"""Ends a run on this node: waits for the uploads of the run's output, then removes its files and processes.

    Release ─▶ Departure.begin ─▶ outputs uploaded or stalled ─▶ Departure.finish ─▶ release
    Prepare of another run ─▶ Departure.release_other ─────────────────────────────────────────▶ release

Invariant: until the release, the node reports the run. After a release, no file, process or promise of the run remains
on this node.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import partial

from everstep.protocol.agent_messages import Release
from everstep.protocol.ids import RunId
from worker.agent.lifecycle import Lifecycle
from worker.agent.outputs import EndedOutputs
from worker.agent.promise import CurrentPromise
from worker.agent.settings import AgentSettings
from worker.core.generation import Membership
from worker.logs.outputs import RankOutputs
from worker.node.file_trees import remove_tree
from worker.node.rank_user import clear, end_processes
from worker.provisioning.source import SourceArchives
from worker.provisioning.supplies import Supplies
from worker.ranks.files import home_of
from worker.ranks.supervisor import Supervisor
from worker.shm.store import SlotStore
from worker.tasks import end

log = logging.getLogger(__name__)
LEAVING_SECONDS = 30.0
"""Longest wait of the node's next job while this node uploads output of its previous job."""


@dataclass(eq=False, repr=False)
class Departure:
    """Ends a run on this node when it is released, or assigned to another run, and then frees the node."""

    settings: AgentSettings
    lifecycle: Lifecycle
    promise: CurrentPromise
    outputs: EndedOutputs
    _: KW_ONLY
    store: SlotStore
    supervisor: Supervisor
    supplies: Supplies
    rank_outputs: RankOutputs
    archives: SourceArchives

    def __post_init__(self) -> None:
        self._waiting: asyncio.Task[None] | None = None
        self._recorded_count: int | None = None
        """Number of this node's unstored outputs that the control plane has recorded. None: it records none."""

    @property
    def has_begun(self) -> bool:
        """True while this node waits for the uploads of a run's output, before it deletes the run's files."""
        return self._waiting is not None and not self._waiting.done()

    async def begin(self, release: Release, *, then: Callable[[Membership], None]) -> None:
        """End a run's ranks on this node, and begin to wait until its output is uploaded or the uploads stall.

        `then` is called after the wait with the `Membership` from before it, which the caller passes to `finish`.
        Without pending uploads, `begin` removes the run itself. A run with outputs that the control plane has not
        recorded remains until a later call.
        """
        run = release.run
        if self.promise.run not in (None, run):
            return
        self._recorded_count = release.unstored_count
        if self.has_begun:
            return
        await self.lifecycle.end_member()
        membership = self.promise.membership
        if membership is None:
            await self._release(run)
        elif not self.outputs.is_pending:
            await self.finish(membership)
        else:
            self._waiting = asyncio.create_task(self._wait(membership, then), name="what a run has left")

    async def _wait(self, membership: Membership, then: Callable[[Membership], None]) -> None:
        await self.outputs.wait_while_moving()
        if self.outputs.is_pending:
            self.lifecycle.fault(
                "output_missing",
                f"run {membership.run}: outputs of ranks that are not in S3 are lost when their node is released, "
                "because nothing has reached S3 for too long",
            )
        then(membership)

    async def finish(self, membership: Membership) -> None:
        """Remove the run of `membership` from this node, unless the node has promised a newer generation since."""
        unstored_count = sum(fault.output is not None for fault in self.lifecycle.reported_faults)
        is_recorded = self._recorded_count is None or unstored_count <= self._recorded_count
        if membership == self.promise.membership and is_recorded:
            await self._release(membership.run, wait_seconds=0.0)

    async def release_other(self, run: RunId) -> bool:
        """Remove the node's current run, unless it is `run`. In that case, only cancel a removal that waits.

        Return False if processes of the current run do not end. The control plane repeats its command.
        """
        other = self.promise.run
        if other is not None and other != run:
            await self._release(other)
        await end(self._waiting)
        return self.promise.run in (None, run)

    async def _release(self, run: RunId, *, wait_seconds: float = LEAVING_SECONDS) -> None:
        if self.promise.run not in (None, run):
            return
        log.info("release run %s", run)
        self.lifecycle.is_unsettled = True
        await self.lifecycle.end_member()
        if not await self.lifecycle.has_ended(run):
            self.lifecycle.is_unsettled = False
            return
        await self.outputs.wait(wait_seconds)
        if self.outputs.is_pending:
            log.error("run %s is released before all output of its ranks is in S3; the rest is lost", run)
            self.outputs.abandon()
        self.promise.lapse()
        await self.store.release()
        await asyncio.to_thread(self._forget_files, run)
        await self.supplies.forget(run)
        self.promise.drop(run)
        self.lifecycle.forget()

    def _forget_files(self, run: RunId) -> None:
        for forget in (
            partial(self._end_processes, run),
            partial(self.supervisor.forget, run),
            partial(self.rank_outputs.forget, run),
            partial(self.archives.keep, ()),
            partial(self._remove_folders, run),
            self._clear_common_folders,
        ):
            try:
                forget()
            except Exception:  # A job chooses the content of its files, which must not stop the agent.
                log.exception("some files of run %s may remain on this node", run)

    def _end_processes(self, run: RunId) -> None:
        if left := end_processes(self.settings.rank_user, seconds=self.supervisor.gone_seconds):
            log.error(
                "processes of run %s cannot be ended, and no job starts on this node until they end: %s", run, left
            )

    def _remove_folders(self, run: RunId) -> None:
        # The pattern also matches incomplete source trees of a killed agent.
        trees = (self.settings.state / "sources").glob(f"{run}*")
        for folder in (*trees, home_of(self.settings.state, run)):
            remove_tree(folder, ignore_errors=True)

    def _clear_common_folders(self) -> None:
        if self.settings.rank_user is not None:
            clear(self.settings.rank_user)

    async def close(self) -> None:
        """Stop waiting for uploads, because this agent process ends."""
        await end(self._waiting)
