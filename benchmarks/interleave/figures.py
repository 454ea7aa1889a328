"""Computes how much each scheme of sending snapshots slows training, with a bootstrap interval. Pure functions.

The schemes and training without snapshots take turns, in blocks of iterations. A round contains one block of each. The
n-th iteration of a scheme's block is compared with the n-th iteration of the round's block without snapshots.
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
    """Measured values of one scheme of sending snapshots, for one training job (case)."""

    scheme: Scheme
    iterations: int
    seconds: float
    """Mean duration of an iteration under the scheme, in seconds."""
    slowdown: float
    """Slowdown over all pairs of iterations: time with checkpoints ÷ time without checkpoints, − 1."""
    low: float
    high: float
    """Upper bound of the slowdown's 95 % interval. `low` is the lower bound."""
    kept: int
    """Number of snapshots that all holders acknowledged before the next boundary, in measured iterations.

    If `Case.is_crowded`, snapshots that all holders acknowledged later also count.
    """
    snapshot_seconds: float | None
    """Mean seconds from the boundary until the last holder's acknowledgement. None if no snapshot was acknowledged."""

    @property
    def kept_ratio(self) -> float:
        """Number of snapshots that all holders acknowledged (`kept`) ÷ number of measured iterations."""
        return self.kept / self.iterations


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Measured values of one case."""

    case: Case
    rows: tuple[Row, ...]
    busy_ratio: float
    """Share of an iteration without checkpoints in which the network is in use."""
    idle_seconds: float
    """Idle network time per iteration, as measured by the profiler."""
    spans: int
    link_bytes_per_second: float
    """Bytes of payload per second that a link between two nodes carries, measured before training."""

    @property
    def load_ratio(self) -> float:
        """Seconds that a node needs to send its snapshot to all holders ÷ idle seconds of the network per iteration."""
        return (
            self.case.state_bytes * (self.case.copies - 1) / self.link_bytes_per_second / self.idle_seconds
            if self.idle_seconds
            else math.inf
        )

    def row(self, scheme: Scheme) -> Row:
        return next(row for row in self.rows if row.scheme is scheme)


def evaluate(case: Case, ranks: Sequence[Sequence[Mapping[str, Any]]], nodes: Sequence[Mapping[str, Any]]) -> Figure:
    """Return the measured values of one case.

    Args:
        case: the settings of the measurement.
        ranks: for each rank, its records of iterations and of the network profile.
        nodes: for each agent, its sent snapshots and the measured rate of its link.
    """
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
    """Return the relative slowdown by checkpoints: total seconds with checkpoints ÷ total seconds without, − 1.

    Each pair in `pairs` has the duration of an iteration with checkpoints, and of the same iteration without them.
    """
    return sum(one for one, _ in pairs) / sum(other for _, other in pairs) - 1


def interval(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the bootstrap interval of the slowdown.

    Whole pairs are resampled, so that drift of the machine affects both values of a pair.

    Args:
        pairs: (seconds with checkpoints, seconds without checkpoints) of the n-th iterations of two blocks of a round.
    """
    return bootstrap_interval(lambda samples: slowdown(samples[0]), pairs)
