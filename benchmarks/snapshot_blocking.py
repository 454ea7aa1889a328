"""Blocking time of a snapshot: a state of a chosen size on real nodes, beside the minimum of any snapshot.

The blocked seconds are the session's own figures: the copy at the boundary, and the guard's wait for the background
copy before the optimizer's step. The first three snapshots of a launch are audited: copied whole at the boundary and
compared byte by byte. They are shown separately.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from benchmarks.cluster_jobs import SCRIPTS, Bench, Json
from benchmarks.errors import BenchmarkFailed
from benchmarks.measures import Floor, Summary

AUDITED_COUNT = 3
"""Same value as `everstep.training.guard.AUDITED_AT_START`; a test compares them.

An import would bring torch into the measuring process.
"""
COMPUTES = ("wait", "matmul")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Distribution of a state over nodes with one rank each."""

    state_mib: int
    nodes: int

    @property
    def copies(self) -> int:
        """Copies of each shard; a single node has only its own."""
        return min(2, self.nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockingRow:
    """One kind of computation with one shape."""

    shape: Shape
    compute: str
    state_bytes: int
    """Bytes of the tensors per rank."""
    span_seconds: float
    """Duration of the replacement for forward and backward."""
    memcpy: Floor
    plain_step: Floor
    step: Summary
    """Step time with snapshots."""
    first_blocked: float | None
    """The first snapshot of the launch on the slowest rank; None if this row is not the first."""
    audited_blocked: Summary | None
    """The other audited snapshots."""
    blocked: Summary
    """All later snapshots of all ranks."""
    mean_blocked: float
    """Mean of the later snapshots."""
    mean_held: float
    """Blocked time per later snapshot by the script's own clock, including boundaries without a snapshot."""
    steps_per_snapshot: float

    @property
    def is_conclusive(self) -> bool:
        """Whether both floors were stable."""
        return self.memcpy.stood_still and self.plain_step.stood_still


def measure(bench: Bench, shapes: list[Shape], *, snapshots: int, floor_steps: int) -> list[BlockingRow]:
    """Run one job per shape; return a row for each kind of computation.

    Args:
        bench: the cluster.
        shapes: the shapes.
        snapshots: minimal snapshots per row and rank, without audited ones.
        floor_steps: steps and copies per floor, before and after.

    Raises:
        BenchmarkFailed: a job failed, or took too few snapshots.
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
                f"{snapshots * shape.nodes} were wanted"
            )
        rows += found
        for each in found:
            bench.say(
                f"  {each.compute}: median {1000 * each.blocked.median:.1f} ms blocked; memcpy "
                f"{1000 * each.memcpy.median:.1f} ms"
            )
    return rows


def row(shape: Shape, compute: str, ranks: list[Json]) -> BlockingRow:
    """Return one row from the output of all ranks, whose samples are pooled."""
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
    """Return a floor from all ranks' timings."""
    before, after = ([seconds for rank in ranks for seconds in rank[when][name]] for when in ("before", "after"))
    return Floor(Summary.of(before), Summary.of(after))
