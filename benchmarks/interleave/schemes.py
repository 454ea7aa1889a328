"""The schemes of GEMINI's Figure 16, the training beside them, and the order in which they take turns. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

KIB = 1024
BUFFERS = 4
"""Receive buffers of the pipelined schemes, as in GEMINI."""
BUFFER_BYTES = 256 * KIB
"""Total bytes of the buffers: GEMINI's 128 MiB, scaled down like the link's rate."""
MAX_SLOWDOWN = 0.01
"""The job's budget where not every snapshot fits; the default value."""


class Scheme(StrEnum):
    """A rule for sharing the network between snapshot bytes and training.

    NONE: no checkpoints. BLOCKING: all bytes at the start of the iteration, while training waits. SINGLE: one partition
    per idle span. UNPIPELINED: many partitions through one receive buffer, which is copied out before the next is sent.
    UNIFORM: evenly over 0.8 of the iteration. EVERSTEP: chunks in idle spans, received in place.
    """

    NONE = "none"
    BLOCKING = "blocking"
    SINGLE = "single"
    UNPIPELINED = "unpipelined"
    UNIFORM = "uniform"
    EVERSTEP = "everstep"

    @property
    def title(self) -> str:
        """Name of the scheme in the report."""
        return {
            Scheme.NONE: "no checkpoint",
            Scheme.BLOCKING: "blocking",
            Scheme.SINGLE: "one partition per span",
            Scheme.UNPIPELINED: "many partitions, no pipeline",
            Scheme.UNIFORM: "uniform pacing",
            Scheme.EVERSTEP: "Everstep",
        }[self]

    @property
    def delays_update(self) -> bool:
        """Whether training waits for bytes that did not fit, as in the paper; other schemes send them in the next
        iteration.
        """
        return self in (Scheme.SINGLE, Scheme.UNPIPELINED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One training job and the schemes that run beside it."""

    name: str
    nodes: int = 4
    copies: int = 2
    """Number of copies m, including the owner's."""
    state_kib: int = 1536
    """KiB of one node's shards."""
    schemes: tuple[Scheme, ...] = (Scheme.NONE, Scheme.BLOCKING, Scheme.UNIFORM, Scheme.EVERSTEP)
    idle_seconds: tuple[float, ...] = (0.045, 0.016, 0.022, 0.016, 0.035, 0.026)
    """Computation before each collective, as a timed wait."""
    collective_seconds: float = 0.04
    """Intended duration of each collective on an otherwise idle network."""
    link_megabits: int = 200
    blocks: int = 9
    block_iterations: int = 5
    is_crowded: bool = False
    """Whether the snapshot exceeds the idle time, so that Everstep's budget decides how often to take one."""
    settle_iterations: int = 0
    """Iterations under Everstep before the measurement, until the budget has learned a snapshot's cost."""

    @property
    def state_bytes(self) -> int:
        """Bytes of one copy."""
        return self.state_kib * KIB

    @property
    def link_bytes_per_second(self) -> float:
        """Shaped rate, headers included."""
        return self.link_megabits * 1e6 / 8

    @property
    def collective_bytes(self) -> int:
        """Bytes of an all-reduce that takes `collective_seconds`: a ring sends 2 (n - 1) / n of them per link."""
        carried = self.collective_seconds * self.link_bytes_per_second * 0.94  # headers of Ethernet, IP and TCP
        return int(carried * self.nodes / (2 * (self.nodes - 1))) // 4 * 4

    def holders(self, node: int) -> list[int]:
        """Return the nodes that hold `node`'s copies: its successors in a ring."""
        return [(node + step) % self.nodes for step in range(1, self.copies)]


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive iterations under one scheme; the first one is not measured."""

    scheme: Scheme
    iterations: int
    is_measured: bool = True


def program(case: Case, seed: int = 7) -> list[Block]:
    """Return all blocks: each round has every scheme once, in varying order. The same on every rank."""
    rng = random.Random(seed)
    blocks = [Block(Scheme.EVERSTEP, case.settle_iterations, is_measured=False)] if case.settle_iterations else []
    for _ in range(case.blocks):
        order: Sequence[Scheme] = rng.sample(case.schemes, len(case.schemes))
        blocks += [Block(scheme, case.block_iterations + 1) for scheme in order]
    return blocks
