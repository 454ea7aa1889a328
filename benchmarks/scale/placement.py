"""Measures placement, and compares recovery probabilities with the paper about GEMINI (Wang et al., SOSP '23)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from control_plane.core import domain_loss, placement
from everstep.protocol.ids import NodeId

NODES = (16, 128, 1000, 10_000)
COPIES = (2, 3)
LOST_NODES = (2, 3, 4, 10, 5000)
LOST_DOMAINS = (1, 2)
DOMAIN_NODES = 16
"""Nodes per failure domain."""
CALLS = 5
"""Number of separately timed calls of each placement function."""

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFigure:
    """Placement without failure domains."""

    nodes: int
    copies: int
    plan_seconds: Sequence[float]
    odds: dict[int, float]
    """Probability that every shard still has a copy, by nodes lost at the same time."""
    odds_seconds: Sequence[float]
    """Seconds of each call for one probability of `odds`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DomainFigure:
    """Placement over failure domains. `blind_odds` are those of a placement that ignores them."""

    nodes: int
    copies: int
    domains: int
    plan_seconds: Sequence[float]
    odds: dict[int, float]
    """Probability that every shard still has a copy, by failure domains lost at the same time."""
    blind_odds: dict[int, float]
    odds_seconds: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A computed recovery probability with the expected one."""

    what: str
    found: float
    expected: float
    """See `known_figures`, to four decimal places."""

    @property
    def falls_short(self) -> bool:
        """Whether the value differs, rounded to four decimals."""
        return round(self.found, 4) != self.expected


def plan_figure(count: int, copies: int, *, calls: int = CALLS) -> PlanFigure:
    """Time placement of `count` nodes without failure domains, `calls` times, and compute its probabilities."""
    nodes = _nodes(count)
    _, plan_seconds = _timed(partial(placement.plan, nodes, copies), calls)
    odds: dict[int, float] = {}
    odds_seconds: list[float] = []
    for lost in (lost for lost in LOST_NODES if lost <= count):
        odds[lost], took = _timed(partial(placement.recovery_probability, count, copies, lost), calls)
        odds_seconds += took
    return PlanFigure(nodes=count, copies=copies, plan_seconds=plan_seconds, odds=odds, odds_seconds=odds_seconds)


def domain_figure(count: int, copies: int, *, calls: int = CALLS) -> DomainFigure:
    """Time placement of `count` nodes over failure domains, `calls` times, and compute its probabilities."""
    nodes = _nodes(count)
    domains = {node: f"nn-{i // DOMAIN_NODES}" for i, node in enumerate(nodes)}
    aware, plan_seconds = _timed(partial(placement.plan, nodes, copies, domains), calls)
    blind = placement.plan(nodes, copies)
    odds: list[dict[int, float]] = [{}, {}]
    odds_seconds: list[float] = []
    for each, of_plan in zip((aware, blind), odds, strict=True):
        for lost in LOST_DOMAINS:
            of_plan[lost], took = _timed(
                partial(domain_loss.recovery_probability, each.fatal_losses, domains, lost), calls
            )
            odds_seconds += took
    return DomainFigure(
        nodes=count,
        copies=copies,
        domains=len(set(domains.values())),
        plan_seconds=plan_seconds,
        odds=odds[0],
        blind_odds=odds[1],
        odds_seconds=odds_seconds,
    )


def known_figures() -> list[Known]:
    """Return computed recovery probabilities with those of GEMINI's paper."""
    # Those for 16 nodes were checked by enumeration. For the ring, Figure 9 shows 0.600, a union bound; the value
    # here is exact.
    groups = {
        (16, 2): 0.9333,
        (16, 3): 0.8,
        (16, 4): 0.6154,
        (32, 2): 0.9677,
        (64, 2): 0.9841,
        (128, 2): 0.9921,
        (1000, 2): 0.999,
        (32, 3): 0.9032,
        (64, 3): 0.9524,
        (128, 3): 0.9764,
        (1000, 3): 0.997,
    }
    found = [
        Known(
            what=f"{count} nodes, 2 copies, {lost} lost",
            found=placement.recovery_probability(count, 2, lost),
            expected=expected,
        )
        for (count, lost), expected in groups.items()
    ]
    nodes = _nodes(16)
    ring = placement.Placement((), {node: (node, nodes[(i + 1) % 16]) for i, node in enumerate(nodes)})
    return [
        *found,
        Known(
            what="16 nodes in a ring, 2 copies, 3 lost",
            found=domain_loss.recovery_probability(ring.fatal_losses, {}, 3),
            expected=0.6286,
        ),
    ]


def _nodes(count: int) -> list[NodeId]:
    return [NodeId(f"i-{i}") for i in range(count)]


def _timed(work: Callable[[], Found], calls: int) -> tuple[Found, list[float]]:
    seconds = []
    for _ in range(calls):
        began = time.perf_counter()
        found = work()
        seconds.append(time.perf_counter() - began)
    return found, seconds
