"""Simulates a link. Its clock advances with each transfer, and simultaneous transfers share its rate evenly."""

from __future__ import annotations

import contextlib

from worker.core.link_use import STANDSTILL_SECONDS
from worker.replication.pacing import NodePacer
from worker.replication.streams import ChunkQueue

BEGIN = 1000.0


class Wire:
    """Simulates a node's link, with the node's pacer.

    Args:
        bytes_per_second: rate of the link.
    """

    def __init__(self, bytes_per_second: float) -> None:
        self.bytes_per_second = bytes_per_second
        self.now = BEGIN
        self.pacer = NodePacer(lambda: self.now)

    def wait(self, seconds: float) -> None:
        """Advance the clock in small steps, and count the link's use after each step, as a running node does."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + STANDSTILL_SECONDS / 2)
            self.pacer.link.count()

    def stand_still(self, seconds: float) -> None:
        """Advance the clock while this node is stopped."""
        self.now += seconds

    def queue(self) -> ChunkQueue:
        """Return the queue of a new transfer."""
        return ChunkQueue(lambda: self.now, self.pacer.link)

    def carry(self, *sizes: int, verified_seconds: float = 0.0, at_once: bool = True) -> list[ChunkQueue]:
        """Run simultaneous transfers of these sizes that begin now, and return their queues.

        The clock advances until every holder has verified its transfer.

        Args:
            *sizes: bytes of each transfer, ascending.
            verified_seconds: seconds from the last byte of a transfer until its holder has verified it, without other
                traffic.
            at_once: True if the transfers are not paced.
        """
        queues = [self.queue() for _ in sizes]
        contexts = [contextlib.ExitStack() for _ in sizes]
        for queue, context in zip(queues, contexts, strict=True):
            context.enter_context(self.pacer.counted(queue))
            queue.add([(0, 1)])
        before = 0
        for number, (size, queue, context) in enumerate(zip(sizes, queues, contexts, strict=True)):
            self.wait((size - before) * (len(sizes) - number) / self.bytes_per_second)
            before = size
            queue.taken(size)
            queue.finish()
            if number + 1 == len(sizes):
                self.wait(verified_seconds)
            if at_once:
                self.pacer.measured(queue)
            context.close()
        return queues
