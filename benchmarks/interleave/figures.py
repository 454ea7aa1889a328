"""Computes how much each scheme of sending snapshots slows training, with a bootstrap interval. Pure.

A round contains one block of each scheme and one without snapshots. The n-th iterations of the blocks are compared.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.interleave.schemes import Case, Scheme
from benchmarks.measures import bootstrap_interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One scheme in one case."""

    scheme: Scheme
    iterations: int
    seconds: float
    """Mean of an iteration."""
    slowdown: float
    """Slowdown over all pairs of iterations: with checkpoints ÷ without, − 1."""
    low: float
    high: float
    """Upper bound of the 95 % interval. `low` is the lower bound."""
    kept: int
    """Snapshots of measured iterations that all holders acknowledged before the next boundary, or ever if
    `Case.is_crowded`.
    """
    snapshot_seconds: float | None
    """Seconds from the boundary to the last holder's acknowledgement. None without one."""

    @property
    def kept_ratio(self) -> float:
        """`kept` ÷ measured iterations."""
        return self.kept / self.iterations


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Measured values of one case."""

    case: Case
    rows: tuple[Row, ...]
    busy_ratio: float
    """Share of an iteration without checkpoints in which the network is in use."""
    idle_seconds: float
    """Network time per iteration by the profiler."""
    spans: int
    link_bytes_per_second: float
    """Payload between two nodes, before training."""

    @property
    def load_ratio(self) -> float:
        """Seconds of sending a snapshot to all holders ÷ idle seconds per iteration."""
        return (
            self.case.state_bytes * (self.case.copies - 1) / self.link_bytes_per_second / self.idle_seconds
            if self.idle_seconds
            else math.inf
        )

    def row(self, scheme: Scheme) -> Row:
        return next(row for row in self.rows if row.scheme is scheme)


def evaluate(case: Case, ranks: Sequence[Sequence[Mapping[str, Any]]], nodes: Sequence[Mapping[str, Any]]) -> Figure:
    """Return the values of one case, from the ranks' iterations and profiles, and the agents' snapshots and rates."""
    profile = next(record for record in ranks[0] if "spans" in record)
    measured = [record for record in ranks[0] if record.get("is_measured")]
    blocks = {
        scheme: _blocks([record for record in measured if record["scheme"] == scheme], case) for scheme in case.schemes
    }
    taken = [{sent["number"]: sent["seconds"] for sent in node["sent"]} for node in nodes]
    plain = [record for record in measured if record["scheme"] == Scheme.NONE]
    return Figure(
        case=case,
        rows=tuple(_row(case, scheme, blocks[scheme], blocks[Scheme.NONE], taken) for scheme in case.schemes),
        busy_ratio=statistics.fmean(record["busy_seconds"] for record in plain)
        / statistics.fmean(record["seconds"] for record in plain),
        idle_seconds=sum(span[1] for span in profile["spans"]),
        spans=len(profile["spans"]),
        link_bytes_per_second=min(node["bandwidth_bytes_per_second"] for node in nodes),
    )


def _blocks(records: Sequence[Mapping[str, Any]], case: Case) -> list[list[Mapping[str, Any]]]:
    size = case.block_iterations
    return [list(records[start : start + size]) for start in range(0, len(records), size)]


def _row(
    case: Case,
    scheme: Scheme,
    blocks: list[list[Mapping[str, Any]]],
    plain: list[list[Mapping[str, Any]]],
    taken: Sequence[Mapping[int, float]],
) -> Row:
    records = [record for block in blocks for record in block]
    pairs = [
        (one["seconds"], other["seconds"])
        for block, beside in zip(blocks, plain, strict=True)
        for one, other in zip(block, beside, strict=True)
    ]
    low, high = interval(pairs)
    sent = [[of.get(record["number"]) for of in taken] for record in records]
    whole = [max(each) for each in sent if None not in each]
    kept = sum(
        None not in each and (case.is_crowded or max(each) <= record["seconds"])
        for each, record in zip(sent, records, strict=True)
    )
    return Row(
        scheme=scheme,
        iterations=len(records),
        seconds=statistics.fmean(record["seconds"] for record in records),
        slowdown=slowdown(pairs),
        low=low,
        high=high,
        kept=kept,
        snapshot_seconds=statistics.fmean(whole) if whole else None,
    )


def slowdown(pairs: Sequence[tuple[float, float]]) -> float:
    """Return total seconds with checkpoints ÷ without, − 1, of pairs of the same iterations."""
    return sum(one for one, _ in pairs) / sum(other for _, other in pairs) - 1


def interval(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the bootstrap interval of the slowdown. Whole pairs are resampled, so that drift affects both values."""
    return bootstrap_interval(lambda samples: slowdown(samples[0]), pairs)
