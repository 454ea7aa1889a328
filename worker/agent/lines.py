"""Uploads the log lines of the running ranks, and sends new lines to users who follow the job's log.

Invariant: at most one `LogShipper` exists, that of the generation whose ranks were started last.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from everstep.protocol.agent_messages import SEND_LINES_SECONDS, LogLines
from everstep.protocol.plan import GenerationPlan, PlanNode
from worker.core.line_tails import Tail
from worker.logs.uploads import LogShipper
from worker.node.full_disks import FullDisks
from worker.storage.object_store import ObjectStore


@dataclass(eq=False, repr=False)
class RankLogLines:
    """Uploads the log lines of the newest generation, and sends new lines to users who follow the log.

    `now` is Unix time in seconds. `send` sends lines to the control plane and must not block.
    """

    state: Path
    objects: ObjectStore
    full_disks: FullDisks
    _: KW_ONLY
    now: Callable[[], float]
    send: Callable[[LogLines], None]

    def __post_init__(self) -> None:
        self._shipper: LogShipper | None = None
        self._followed_until = 0.0

    def begin(self, plan: GenerationPlan, here: PlanNode) -> None:
        """Start to upload the log lines of a generation's ranks."""
        self._shipper = LogShipper(
            self.state,
            self.objects,
            plan,
            here,
            now=self.now,
            live=self._show,
            on_trouble=self.full_disks.note,
        )
        self._shipper.begin()

    def follow(self) -> None:
        """Send lines to the control plane for `SEND_LINES_SECONDS`, after a pause also recent ones."""
        now = time.monotonic()
        is_new, self._followed_until = now >= self._followed_until, now + SEND_LINES_SECONDS
        if is_new and self._shipper is not None:
            self._shipper.show_recent()

    async def printed(self, number: int) -> Tail:
        """Return the log lines of this node's ranks from line `number` on."""
        return await self._shipper.printed(number) if self._shipper is not None else Tail()

    async def finish(self) -> tuple[str, ...]:
        """Upload the remaining log lines of ended ranks. Return one sentence for each range of lines that is lost."""
        return await self._shipper.finish() if self._shipper is not None else ()

    def hand_over(self) -> LogShipper | None:
        """Return the ended generation's `LogShipper`. The caller owns it from now on, and must call its `finish`."""
        shipper, self._shipper = self._shipper, None
        return shipper

    async def close(self) -> None:
        """Stop the uploads, because this process ends. The node's next agent process uploads the remaining lines."""
        if self._shipper is not None:
            await self._shipper.close()

    def _show(self, lines: LogLines) -> None:
        if time.monotonic() < self._followed_until:
            self.send(lines)
