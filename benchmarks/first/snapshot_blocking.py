"""Measures how long a snapshot blocks training, for states of several sizes, with floors for comparison.

A floor is a bound that no snapshot can beat: a plain memcpy of the state, and a step without Everstep.

Everstep's session in the rank reports the blocked seconds. They consist of the copy at the boundary, and of the guard's
wait for the background copy before the optimizer's step. Everstep audits the first three snapshots of a launch: it
copies them whole at the boundary and compares them byte by byte. The page of results shows audited snapshots
separately.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from benchmarks.cluster_jobs import SCRIPTS, Bench, Json
from benchmarks.errors import BenchmarkFailed
from benchmarks.measures import Floor, Summary

AUDITED_COUNT = 3
"""Number of a launch's first snapshots that Everstep audits: compares with the state byte by byte.

A test compares the number with `everstep.training.guard.AUDITED_AT_START`. The measuring process cannot import that
constant, because the import would load torch.
"""
COMPUTES = ("wait", "matmul")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Size of a state and number of nodes, with one rank per node."""

    state_mib: int
    nodes: int

    @property
    def copies(self) -> int:
        """Number of copies of each shard: 2, or 1 on a single node."""
        return min(2, self.nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockingRow:
    """Measured values for one state size and one substitute for the forward and backward passes.

    `compute` names the substitute: a wait, or matrix products.
    """

    shape: Shape
    compute: str
    state_bytes: int
    """Bytes of one rank's tensors."""
    span_seconds: float
    """Duration of the wait or matrix products that replace forward and backward."""
    memcpy: Floor
    plain_step: Floor
    step: Summary
    """Duration of each step, in seconds, while Everstep takes a snapshot at every step."""
    first_blocked: float | None
    """Seconds for which the launch's first snapshot blocked the slowest rank.

    One launch measures both replacements of forward and backward, so only the first row of a launch has this value. In
    the second row, it is None.
    """
    audited_blocked: Summary | None
    """Seconds for which each audited snapshot (compared byte by byte), except the launch's first, blocked a rank."""
    blocked: Summary
    """Seconds for which each snapshot without an audit (a byte comparison) blocked a rank, over all ranks."""
    mean_blocked: float
    """Mean number of seconds for which a snapshot without an audit blocked a rank, as the session reported it."""
    mean_held: float
    """Total seconds for which the session blocked the script ÷ number of snapshots without an audit.

    The script's clock measures the seconds. They include boundaries at which no snapshot was taken.
    """
    steps_per_snapshot: float

    @property
    def is_conclusive(self) -> bool:
        """True if both lower bounds hardly changed during the run: a plain memcpy, and a step without Everstep."""
        return self.memcpy.stood_still and self.plain_step.stood_still


def measure(bench: Bench, shapes: list[Shape], *, snapshots: int, floor_steps: int) -> list[BlockingRow]:
    """Run one job per state size (shape). Return one row for each kind of work that replaces forward and backward.

    Args:
        bench: the cluster.
        shapes: sizes of the state, one job each.
        snapshots: minimal number of snapshots per row and rank. The first snapshots, which Everstep compares with the
            state byte by byte, do not count.
        floor_steps: number of steps without a session, and of plain copies. Both are measured before and after the
            snapshots.

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
    """Return the table row for one size of the state and one substitute for forward and backward.

    The row summarizes the samples of all ranks.
    """
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
    """Return all ranks' timings of one floor: an operation that no snapshot can beat, timed before and after the
    snapshots.
    """
    before, after = ([seconds for rank in ranks for seconds in rank[when][name]] for when in ("before", "after"))
    return Floor(Summary.of(before), Summary.of(after))
