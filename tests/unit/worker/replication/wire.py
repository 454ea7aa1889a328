"""A link without a network: its clock moves as it carries, and the transfers that go over it at once share it
evenly.
"""

from __future__ import annotations

import contextlib

from worker.core.link_use import STANDSTILL_SECONDS
from worker.replication.pacing import NodePacer
from worker.replication.streams import ChunkQueue

BEGIN = 1000.0


class Wire:
    """A node's link, and its pacer.

    Args:
        bytes_per_second: that it carries.
    """

    def __init__(self, bytes_per_second: float) -> None:
        self.bytes_per_second = bytes_per_second
        self.now = BEGIN
        self.pacer = NodePacer(lambda: self.now)

    def wait(self, seconds: float) -> None:
        """Let time pass in which this node runs: whoever has something to send counts, many times a second."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + STANDSTILL_SECONDS / 2)
            self.pacer.link.count()

    def stand_still(self, seconds: float) -> None:
        """Let time pass in which this node does not."""
        self.now += seconds

    def queue(self) -> ChunkQueue:
        """Return the queue of a new transfer."""
        return ChunkQueue(lambda: self.now, self.pacer.link)

    def carry(self, *sizes: int, verified_seconds: float = 0.0, at_once: bool = True) -> list[ChunkQueue]:
        """Send transfers of these many bytes, all of which begin now; returns when every holder has verified its own.

        Args:
            *sizes: bytes of each, ascending.
            verified_seconds: from when the kernel has taken all of one until its holder has verified it; nobody else
                sends meanwhile.
            at_once: they were not paced.
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
