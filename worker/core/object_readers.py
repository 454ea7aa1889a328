"""Decides which node reads which part of an S3 object that the shards of several nodes share.

    part     order of the nodes    reader, if only B and C use the object
    1        A  B  C               B
    2        B  C  A               B
    3        C  A  B               C

The order of a part depends only on the plan, the object's key and the part's number. Invariant: a node waits only for
nodes before it in a part's order, so nodes never wait for each other in a circle.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from everstep.protocol.ids import NodeId
from worker.core.shared_parts import LATE_SECONDS


def reading_order(nodes: Sequence[NodeId], key: str, number: int) -> Iterator[NodeId]:
    """Yield each node once, in the order in which they should read part `number` (from 1) of an S3 object."""
    # Consecutive parts begin with different nodes. The parts of a lost node are divided among all others.
    left, rest = list(nodes), number + zlib.crc32(key.encode())
    while left:
        rest, place = divmod(rest, len(left))
        yield left.pop(place)


@dataclass(frozen=True, slots=True)
class ObjectReaders:
    """The nodes from which one node gets parts of shared S3 objects while it loads its shards. Immutable."""

    here: NodeId
    nodes: tuple[NodeId, ...]
    """The nodes that load from S3 by plan, without `here` if the plan names a peer as its source."""
    excluded: frozenset[NodeId] = frozenset()
    """Nodes that are lost or slow, or whose load has failed."""
    lacking: frozenset[tuple[NodeId, str]] = frozenset()
    """Pairs of a node and the key of an object that the node does not use."""

    @property
    def peers(self) -> tuple[NodeId, ...]:
        """The nodes in `nodes` except `here` and the nodes in `excluded`."""
        return tuple(node for node in self.nodes if node != self.here and node not in self.excluded)

    def reader(self, key: str, number: int) -> NodeId:
        """Return the node that reads a part of an object from S3: another node, or `here`."""
        for node in reading_order(self.nodes, key, number):
            if node == self.here or not (node in self.excluded or (node, key) in self.lacking):
                return node
        return self.here

    def exclude(self, *nodes: NodeId) -> ObjectReaders:
        """Record lost and slow nodes, from which this node expects no more parts."""
        return replace(self, excluded=self.excluded | set(nodes))

    def lack(self, node: NodeId, key: str) -> ObjectReaders:
        """Record that a node does not use an object, and therefore reads no part of it."""
        return replace(self, lacking=self.lacking | {(node, key)})


def patience_seconds(own_seconds: float) -> float:
    """Return how many seconds a node waits for other nodes' parts after it has read its own parts in `own_seconds`."""
    return max(LATE_SECONDS, own_seconds)
