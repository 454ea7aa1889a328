"""How long a snapshot holds the training thread: a state of a chosen size on real nodes, beside what no snapshot could go below.

Seconds blocked are the session's own: the copy at the boundary, and what the guard waited for the copy in the
background before the optimizer's step. The first three snapshots of a launch are audited, copied whole at the boundary
and compared byte by byte; they are shown apart. Later ones are not.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from benchmarks.cluster_jobs import SCRIPTS, Bench, Json
from benchmarks.errors import BenchmarkFailed
from benchmarks.measures import Floor, Summary

AUDITED_COUNT = 3
"""`everstep.training.guard.AUDITED_AT_START`; not imported, for it would bring torch into the process that measures (a test compares them)."""
COMPUTES = ("wait", "matmul")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How a state lies on nodes, one rank each."""

    state_mib: int
    nodes: int

    @property
    def copies(self) -> int:
        """Of each shard; a node alone has its own only."""
        return min(2, self.nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockingRow:
    """One kind of computation at one shape."""

    shape: Shape
    compute: str
    state_bytes: int
    """Per rank, the tensors alone."""
    span_seconds: float
    """Of the stand-in for forward and backward."""
    memcpy: Floor
    plain_step: Floor
    step: Summary
    """With snapshots."""
    first_blocked: float | None
    """The very first snapshot of the launch, slowest rank; None where this row is not the first."""
    audited_blocked: Summary | None
    """The other audited ones."""
    blocked: Summary
    """All later ones, of all ranks."""
    mean_blocked: float
    """Of the later ones."""
    mean_held: float
    """All that the session held the script by the script's own clock, boundaries without a snapshot included, per later snapshot."""
    steps_per_snapshot: float

    @property
    def is_conclusive(self) -> bool:
        """Both floors stood still."""
        return self.memcpy.stood_still and self.plain_step.stood_still


def measure(bench: Bench, shapes: list[Shape], *, snapshots: int, floor_steps: int) -> list[BlockingRow]:
    """Run one job per shape and return a row for each kind of computation.

    Args:
        bench: where.
        shapes: which.
        snapshots: at least so many per row and rank, audited ones not counted.
        floor_steps: steps and copies to each floor, before and after.

    Raises:
        BenchmarkFailed: a job ended otherwise, or took too few snapshots.
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
    """Return one row from what every rank of a job left; ranks are taken together, floors and steps as well as snapshots."""
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
