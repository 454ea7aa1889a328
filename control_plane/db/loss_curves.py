"""Reads the training loss of several runs, reduced to a few points per run for lists of jobs.

It decodes only the chunks and columns that it needs. The number of statements does not depend on the number of runs.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import select, tuple_
from sqlalchemy.orm import Session

from control_plane.core.loss_curves import loss_name, newest_at, sampled_steps
from control_plane.core.metrics import first_step
from control_plane.db.metrics import unpack
from control_plane.db.models import JobRow, MetricChunkRow, MetricRow


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCurve:
    """A few points of the training loss of one run."""

    run_id: str
    name: str
    """Name of the metric."""
    steps: tuple[int, ...]
    values: tuple[float, ...]
    """Logged value per step, finite or not."""


def read(session: Session, run_ids: Sequence[str], project: str | None, limit: int) -> tuple[LossCurve, ...]:
    """Return at most `limit` (at least 2) points per run, at equal distances up to the newest, as `run_ids` orders.

    Runs that do not exist, that belong to another project or that log no loss are left out.
    """
    names: defaultdict[str, list[str]] = defaultdict(list)
    listed = (
        select(MetricRow.run_id, MetricRow.name)
        .join(JobRow, JobRow.run_id == MetricRow.run_id)
        .where(JobRow.run_id.in_(run_ids))
    )
    for run_id, name in session.execute(listed if project is None else listed.where(JobRow.project == project)):
        names[run_id].append(name)
    losses = {run_id: loss_name(found) for run_id, found in names.items()}
    wanted = {run_id: name for run_id, name in losses.items() if name is not None}
    chunks = _chunks(session, wanted)
    return tuple(
        _curve(run_id, wanted[run_id], chunks[run_id], limit) for run_id in dict.fromkeys(run_ids) if run_id in chunks
    )


_Chunk = tuple[int, int, bytes, tuple[str, ...]]
"""First step, steps per point, packed points, node ids."""


def _chunks(session: Session, wanted: Mapping[str, str]) -> Mapping[str, list[_Chunk]]:
    """Return the stored chunks of one metric of each run, sorted by step."""
    found: defaultdict[str, list[_Chunk]] = defaultdict(list)
    if not wanted:
        return found
    query = select(
        MetricChunkRow.run_id, MetricChunkRow.width, MetricChunkRow.number, MetricChunkRow.points, MetricChunkRow.nodes
    ).where(tuple_(MetricChunkRow.run_id, MetricChunkRow.name).in_(list(wanted.items())))
    for run_id, width, number, packed, nodes in session.execute(query):
        found[run_id].append((first_step(number, width), width, packed, nodes))
    for chunks in found.values():
        chunks.sort(key=lambda chunk: chunk[0])
    return found


def _curve(run_id: str, name: str, chunks: Sequence[_Chunk], limit: int) -> LossCurve:
    columns: dict[int, tuple[Sequence[int], Sequence[float]]] = {}

    def column(index: int) -> tuple[Sequence[int], Sequence[float]]:
        if index not in columns:
            columns[index] = _columns(chunks[index])
        return columns[index]

    starts = [chunk[0] for chunk in chunks]
    first, last = column(0)[0][0], column(len(chunks) - 1)[0][-1]
    points: dict[int, float] = {}
    for step in sampled_steps(first, last, limit):
        index = newest_at(starts, step)
        assert index is not None, f"run {run_id}: step {step} lies before the first chunk at {starts[0]}"
        steps, values = column(index)
        place = newest_at(steps, step)
        # All points of this chunk (a stored series) are later than the step, so use the last point of the previous
        # chunk.
        if place is None:
            steps, values = column(index - 1)
            place = len(steps) - 1
        points[steps[place]] = values[place]
    return LossCurve(run_id=run_id, name=name, steps=tuple(points), values=tuple(points.values()))


def _columns(chunk: _Chunk) -> tuple[Sequence[int], Sequence[float]]:
    """Return the last step and the value at that step of each point."""
    _, width, packed, nodes = chunk
    if width == 1 and not nodes:
        count = len(packed) // 24
        return struct.unpack_from(f"<{count}q", packed), struct.unpack_from(f"<{count}d", packed, 16 * count)
    found = unpack(packed, width, nodes)
    return [point.last_step for point in found], [point.last for point in found]
