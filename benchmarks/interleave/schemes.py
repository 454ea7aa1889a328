"""Defines the schemes of GEMINI's Figure 16, the measured training job, and the order of the schemes. No I/O."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

KIB = 1024
BUFFERS = 4
"""Receive buffers of GEMINI's pipelined scheme."""
BUFFER_BYTES = 256 * KIB
"""Bytes of a node's receive buffers: GEMINI's 128 MiB, reduced as the link's rate."""
MAX_SLOWDOWN = 0.01
"""`MaxSlowdown` if idle time is too short for every step. Everstep has the same default."""


class Scheme(StrEnum):
    """A rule that determines when a node sends the bytes of a snapshot during training.

    - NONE: no checkpoints.
    - BLOCKING: all bytes at the start of the iteration, while training waits.
    - SINGLE: one partition of the snapshot per idle span of the network.
    - UNPIPELINED: many partitions through one receive buffer, which the holder empties before the next partition.
    - UNIFORM: all bytes at a constant rate over 0.8 of the iteration.
    - EVERSTEP: chunks in idle spans of the network. The holder receives each chunk at its final place in memory.
    """

    NONE = "none"
    BLOCKING = "blocking"
    SINGLE = "single"
    UNPIPELINED = "unpipelined"
    UNIFORM = "uniform"
    EVERSTEP = "everstep"

    @property
    def title(self) -> str:
        """Name in the report."""
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
        """Whether training waits at the end of an iteration for the whole snapshot, as in GEMINI's paper."""
        return self in (Scheme.SINGLE, Scheme.UNPIPELINED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The settings of one measurement."""

    name: str
    nodes: int = 4
    copies: int = 2
    """Copies with the owner's: m in GEMINI's paper."""
    state_kib: int = 1536
    """One node's snapshot, and each copy."""
    schemes: tuple[Scheme, ...] = (Scheme.NONE, Scheme.BLOCKING, Scheme.UNIFORM, Scheme.EVERSTEP)
    idle_seconds: tuple[float, ...] = (0.045, 0.016, 0.022, 0.016, 0.035, 0.026)
    """Seconds of the computation before each collective, a timed wait."""
    collective_seconds: float = 0.04
    """Duration while no snapshot is being sent."""
    link_megabits: int = 200
    blocks: int = 9
    block_iterations: int = 5
    is_crowded: bool = False
    """A snapshot takes longer than the idle time, so Everstep's budget selects the steps."""
    settle_iterations: int = 0
    """Iterations before the measurement, in which the budget learns the cost of a snapshot."""

    @property
    def state_bytes(self) -> int:
        """One node's snapshot."""
        return self.state_kib * KIB

    @property
    def link_bytes_per_second(self) -> float:
        """Rate limit, headers included."""
        return self.link_megabits * 1e6 / 8

    @property
    def collective_bytes(self) -> int:
        """Bytes of an all-reduce of `collective_seconds`. A ring of n nodes sends 2 (n - 1) / n of them per link."""
        # The factor 0.94 leaves room for the headers of Ethernet, IP and TCP.
        carried = self.collective_seconds * self.link_bytes_per_second * 0.94
        return int(carried * self.nodes / (2 * (self.nodes - 1))) // 4 * 4

    def holders(self, node: int) -> list[int]:
        """Return the next nodes in the ring."""
        return [(node + step) % self.nodes for step in range(1, self.copies)]


@dataclass(frozen=True, slots=True)
class Block:
    """Iterations under one scheme, the first of which is not measured."""

    scheme: Scheme
    iterations: int
    is_measured: bool = True


def program(case: Case, seed: int = 7) -> list[Block]:
    """Return the same blocks on every rank. Each round has one block of every scheme, in varying order."""
    rng = random.Random(seed)
    blocks = [Block(Scheme.EVERSTEP, case.settle_iterations, is_measured=False)] if case.settle_iterations else []
    for _ in range(case.blocks):
        order: Sequence[Scheme] = rng.sample(case.schemes, len(case.schemes))
        blocks += [Block(scheme, case.block_iterations + 1) for scheme in order]
    return blocks
