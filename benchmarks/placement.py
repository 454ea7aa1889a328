"""How long placement and exact recovery probabilities take, and what they say: `python -m benchmarks.placement`."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

from control_plane.core import domain_loss, placement
from everstep.protocol.ids import NodeId

NODES = (16, 128, 1000, 10_000)
LOST_NODES = (2, 3, 4, 10, 5000)
DOMAIN_NODES = 16
"""Nodes of one failure domain."""


def main() -> int:
    """Print both tables.

    Returns:
        The process's exit code.
    """
    for line in (*nodes_table(), "", *domains_table()):
        sys.stdout.write(f"{line}\n")
    return 0


def nodes_table() -> Iterator[str]:
    """Yield the lines of the table of lost nodes."""
    yield from _head("nodes", "copies", "plan, ms", *(f"{lost} nodes lost" for lost in LOST_NODES), "slowest of these, ms")
    for count in NODES:
        for copies in (2, 3):
            began = time.perf_counter()
            placement.plan(_nodes(count), copies)
            planned = time.perf_counter() - began
            odds, slowest = [], 0.0
            for lost in LOST_NODES:
                began = time.perf_counter()
                odds.append(f"{placement.recovery_probability(count, copies, lost):.6g}" if lost <= count else "")
                slowest = max(slowest, time.perf_counter() - began)
            yield _row(count, copies, f"{planned * 1000:.1f}", *odds, f"{slowest * 1000:.1f}")


def domains_table() -> Iterator[str]:
    """Yield the lines of the table of lost domains: planned with domains, and without."""
    yield from _head("nodes", "copies", "domains", "plan, ms", "1 domain lost", "2 lost", "blind plan: 1 lost", "2 lost", "all four odds, ms")
    for count in NODES[1:]:
        for copies in (2, 3):
            nodes = _nodes(count)
            domains = {node: f"nn-{i // DOMAIN_NODES}" for i, node in enumerate(nodes)}
            began = time.perf_counter()
            aware = placement.plan(nodes, copies, domains)
            planned = time.perf_counter() - began
            blind = placement.plan(nodes, copies)
            began = time.perf_counter()
            odds = [f"{domain_loss.recovery_probability(each, domains, lost):.6g}" for each in (aware, blind) for lost in (1, 2)]
            yield _row(count, copies, len(set(domains.values())), f"{planned * 1000:.1f}", *odds, f"{(time.perf_counter() - began) * 1000:.1f}")


def _nodes(count: int) -> list[NodeId]:
    return [NodeId(f"i-{i}") for i in range(count)]


def _head(*titles: str) -> Iterator[str]:
    yield _row(*titles)
    yield "|" + " ---: |" * len(titles)


def _row(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


if __name__ == "__main__":
    sys.exit(main())
