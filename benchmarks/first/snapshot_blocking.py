"""Measures how long a snapshot blocks training, for states of several sizes.

The floors are a plain memcpy of the state, and a step without Everstep. Blocked seconds are the copy at the boundary,
and the wait before the optimizer's step. The first three snapshots of a launch are audited and shown separately.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from benchmarks.cluster_jobs import SCRIPTS, Bench, Json
from benchmarks.errors import BenchmarkFailed
from benchmarks.measures import Floor, Summary

AUDITED_COUNT = 3
"""Snapshots of a launch that Everstep audits. A test compares it with `everstep.training.guard.AUDITED_AT_START`, whose
import would load torch.
"""
COMPUTES = ("wait", "matmul")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Size of a state and number of nodes, with one rank each."""

    state_mib: int
    nodes: int

    @property
    def copies(self) -> int:
        """Copies of each shard: 2, or 1 on a single node."""
        return min(2, self.nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockingRow:
    """One state size and one substitute (`compute`) for forward and backward: a wait, or matrix products."""

    shape: Shape
    compute: str
    state_bytes: int
    """Bytes of one rank."""
    span_seconds: float
    """Seconds of the substitute."""
    memcpy: Floor
    plain_step: Floor
    step: Summary
    """Seconds per step with a snapshot each."""
    first_blocked: float | None
    """Seconds of the launch's first snapshot, on the slowest rank. None in the launch's second row."""
    audited_blocked: Summary | None
    """Seconds of each audited snapshot, except the launch's first."""
    blocked: Summary
    """Seconds of each snapshot without an audit, over all ranks."""
    mean_blocked: float
    """Mean of snapshots without an audit, as the session reported it."""
    mean_held: float
    """Seconds in the session by the script's clock ÷ snapshots without an audit. Includes boundaries without one."""
    steps_per_snapshot: float

    @property
    def is_conclusive(self) -> bool:
        """Whether both floors hardly changed."""
        return self.memcpy.stood_still and self.plain_step.stood_still


def measure(bench: Bench, shapes: list[Shape], *, snapshots: int, floor_steps: int) -> list[BlockingRow]:
    """Run one job per state size. Return one row per substitute.

    `snapshots` is the minimum per row and rank, without audited ones. `floor_steps` run before and after them. Raises
    BenchmarkFailed if a job failed, or took too few snapshots.
    """
    rows: list[BlockingRow] = []
    for shape in shapes:
        bench.say(
            f"snapshots of {shape.state_mib} MiB per rank on {shape.nodes} "
            f"node{'s' if shape.nodes > 1 else ''}, {shape.copies} copies"
        )
        parameters = {"state_mib": shape.state_mib, "snapshots": snapshots + AUDITED_COUNT, "floor_steps": floor_steps}
        job = bench.submit(
            f"blocking-{shape.state_mib}-{shape.nodes}",
            SCRIPTS,
            "synthetic.py",
            nodes=shape.nodes,
            copies=shape.copies,
            hyperparameters=parameters,
        )
        job.completed()
        found = [row(shape, compute, job.outputs("result.json")) for compute in COMPUTES]
        if any(each.blocked.count < snapshots * shape.nodes for each in found):
            raise BenchmarkFailed(
                f"job {job.name} took {min(each.blocked.count for each in found)} snapshots, "
                f"but the row needs {snapshots * shape.nodes}"
            )
        rows += found
        for each in found:
            bench.say(
                f"  {each.compute}: median {1000 * each.blocked.median:.1f} ms blocked; memcpy "
                f"{1000 * each.memcpy.median:.1f} ms"
            )
    return rows


def row(shape: Shape, compute: str, ranks: list[Json]) -> BlockingRow:
    """Return the row of one size and one substitute, from all ranks' samples."""
    is_first = compute == COMPUTES[0]
    skipped = AUDITED_COUNT if is_first else 0
    later = [seconds for rank in ranks for seconds in rank["blocked"][compute][skipped:]]
    audited = [seconds for rank in ranks for seconds in rank["blocked"][compute][1:skipped]]
    return BlockingRow(
        shape=shape,
        compute=compute,
        state_bytes=max(rank["state_bytes"] for rank in ranks),
        span_seconds=ranks[0]["span_seconds"],
        memcpy=floor(ranks, "memcpy"),
        plain_step=floor(ranks, compute),
        step=Summary.of([seconds for rank in ranks for seconds in rank["steps"][compute]]),
        first_blocked=max(rank["blocked"][compute][0] for rank in ranks) if is_first else None,
        audited_blocked=Summary.of(audited) if audited else None,
        blocked=Summary.of(later),
        mean_blocked=statistics.fmean(later),
        mean_held=sum(seconds for rank in ranks for count, seconds in rank["held"][compute] if count > skipped)
        / len(later),
        steps_per_snapshot=len(ranks[0]["steps"][compute]) / len(ranks[0]["blocked"][compute]),
    )


def floor(ranks: list[Json], name: str) -> Floor:
    """Return all ranks' timings of one floor, before and after the snapshots."""
    before, after = ([seconds for rank in ranks for seconds in rank[when][name]] for when in ("before", "after"))
    return Floor(Summary.of(before), Summary.of(after))
