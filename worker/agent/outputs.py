"""Uploads the log lines and output files that the ranks of ended generations have left on this node.

A new generation of the same run does not wait for these uploads. The release of the node from the run waits for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from everstep.protocol.agent_messages import NodeFault
from everstep.protocol.limits import cut
from worker.logs.outputs import MAX_UNSTORED, RankOutputs, Unstored
from worker.logs.uploads import LogShipper
from worker.member.member import Member
from worker.storage.object_store import ObjectStore
from worker.tasks import end


class EndedOutputs:
    """Uploads the log lines and outputs of ended generations in the background. The agent owns the object."""

    def __init__(
        self, objects: ObjectStore, rank_outputs: RankOutputs, on_change: Callable[[], None] = lambda: None
    ) -> None:
        self._on_change = on_change
        self._objects = objects
        self._rank_outputs = rank_outputs
        self._tasks: set[asyncio.Task[object]] = set()
        self.faults: tuple[NodeFault, ...] = ()

    @property
    def is_pending(self) -> bool:
        """True while the log lines or output files of an ended generation are uploaded."""
        return bool(self._tasks)

    def store(self, member: Member, shipper: LogShipper | None, *, is_stored: bool) -> None:
        """Upload an ended generation's log lines and outputs in the background, then delete the local log files.

        `shipper` is None if the ranks were never started. With `is_stored`, only log lines remain to be uploaded.
        """

        async def work() -> None:
            missing = await shipper.finish() if shipper is not None else ()
            missing += await member.held_lines.ship(self._objects)
            if not is_stored:
                unstored = await self._rank_outputs.upload_all(member.plan, member.here)
                missing += tuple(words for _, words in unstored)
                self._report(unstored)
            await asyncio.to_thread(self._rank_outputs.forget_source, member.plan)
            if not missing:
                await asyncio.to_thread(self._rank_outputs.forget_streams, member.plan)

        task: asyncio.Task[object] = asyncio.create_task(work(), name="streams of an ended generation")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _report(self, unstored: Iterable[Unstored]) -> None:
        added = tuple(
            NodeFault(code="output_missing", message=cut(words), is_permanent=False, output=output)
            for output, words in unstored
        )
        if added:
            self.faults = (*self.faults, *added)[-MAX_UNSTORED:]
            self._on_change()

    def forget(self) -> None:
        """Drop the reports about unstored outputs, because the node no longer works for their run."""
        self.faults = ()

    async def wait(self, timeout_seconds: float) -> None:
        """Wait until all uploads of log lines and output files have ended, for at most `timeout_seconds`."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_seconds)

    async def wait_while_moving(self) -> None:
        """Wait until all uploads of log lines and files have ended or make no progress (`RankOutputs.is_moving`)."""
        begun = self._rank_outputs.monotonic()
        while self._tasks and self._rank_outputs.is_moving(begun):
            await asyncio.wait(self._tasks, timeout=self._rank_outputs.poll_seconds)

    def abandon(self) -> None:
        """Cancel all uploads of ended generations, without waiting for their threads. The rest is lost."""
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        """Cancel all uploads of ended generations, and wait until they have ended."""
        await end(*self._tasks)
