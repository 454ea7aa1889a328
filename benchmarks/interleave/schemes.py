"""What is compared: the schemes of GEMINI's Figure 16, the training they run beside, and in which order they take turns. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

KIB = 1024
BUFFERS = 4
"""Receiver's buffers of the pipelined schemes, as GEMINI's."""
BUFFER_BYTES = 256 * KIB
"""All of them together: as much smaller than GEMINI's 128 MiB as the link is slower than its."""
MAX_SLOWDOWN = 0.01
"""The job's budget where not every snapshot fits, as by default."""


class Scheme(StrEnum):
    """How snapshot bytes share the network with training.

    NONE: no checkpoint. BLOCKING: all of it at the beginning of the iteration, training waits. SINGLE: one partition
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
        """As the report names it."""
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
        """Whether training waits for what did not fit, as in the paper; the others leave it for the next iteration."""
        return self in (Scheme.SINGLE, Scheme.UNPIPELINED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One training and the schemes that run beside it."""

    name: str
    nodes: int = 4
    copies: int = 2
    """m, the owner's included."""
    state_kib: int = 1536
    """Of one node's shards."""
    schemes: tuple[Scheme, ...] = (Scheme.NONE, Scheme.BLOCKING, Scheme.UNIFORM, Scheme.EVERSTEP)
    idle_seconds: tuple[float, ...] = (0.045, 0.016, 0.022, 0.016, 0.035, 0.026)
    """Computation before each collective, a timed wait."""
    collective_seconds: float = 0.04
    """What each collective is to take on an otherwise idle network."""
    link_megabits: int = 200
    blocks: int = 9
    block_iterations: int = 5
    is_crowded: bool = False
    """The snapshot is more than the idle time can hold: how often Everstep takes one is for its budget to say."""
    settle_iterations: int = 0
    """Under Everstep before anything is measured: until the budget knows what a snapshot costs."""

    @property
    def state_bytes(self) -> int:
        """Of one copy."""
        return self.state_kib * KIB

    @property
    def link_bytes_per_second(self) -> float:
        """As shaped, headers included."""
        return self.link_megabits * 1e6 / 8

    @property
    def collective_bytes(self) -> int:
        """What an all-reduce has to have to take `collective_seconds`: a ring carries 2 (n - 1) / n of it over every link."""
        carried = self.collective_seconds * self.link_bytes_per_second * 0.94  # headers of Ethernet, IP and TCP
        return int(carried * self.nodes / (2 * (self.nodes - 1))) // 4 * 4

    def holders(self, node: int) -> list[int]:
        """Return the nodes that hold `node`'s copies: the next ones of a ring."""
        return [(node + step) % self.nodes for step in range(1, self.copies)]


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive iterations under one scheme; the first one settles and is not measured."""

    scheme: Scheme
    iterations: int
    is_measured: bool = True


def program(case: Case, seed: int = 7) -> list[Block]:
    """Return all blocks: in every round each scheme once, in another order each time. The same on every rank."""
    rng = random.Random(seed)
    blocks = [Block(Scheme.EVERSTEP, case.settle_iterations, is_measured=False)] if case.settle_iterations else []
    for _ in range(case.blocks):
        order: Sequence[Scheme] = rng.sample(case.schemes, len(case.schemes))
        blocks += [Block(scheme, case.block_iterations + 1) for scheme in order]
    return blocks
