"""Stores metrics: values that scripts log, and values that Everstep measures on nodes.

Points of old steps are joined to coarser points, each of which covers several steps (`core.metrics`).

    metric_log      per run: number of the next expected value, and the count of dropped values
    metric          per run and name: the newest value
    metric_chunk    per run, name and width (steps per point): packed points, nodes of the extremes, breakdowns

    packed, little-endian   width 1: steps int64[n], at float64[n], values float64[n]
                            other, or of several nodes:   step, last_step, count, finite_count int64[n] each
                                                          at, minimum, mean, maximum, last float64[n] each

Invariant: storing a batch again changes nothing. The first value of a generation deletes old values of repeated steps.
"""

from __future__ import annotations

import math
import struct
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import TypeVar

from sqlalchemy import LargeBinary, Select, cast, delete, func, null, select
from sqlalchemy.orm import Session

from control_plane.core import metrics
from control_plane.core.breakdowns import decoded, encoded
from control_plane.core.metrics import FOLD, POINTS_PER_CHUNK, Point
from control_plane.db import events
from control_plane.db.models import GenerationRow, JobRow, MetricChunkRow, MetricLogRow, MetricRow
from everstep.protocol.agent_messages import MetricBatch, MetricPoint
from everstep.protocol.ids import NodeId
from everstep.protocol.rank_messages import MAX_METRIC_NAME_LENGTH, OWN_METRICS

MAX_NAMES = 256
"""Limit per run. Values of further names are dropped and counted."""
NOBODY: Mapping[NodeId, Mapping[str, float]] = {}
NOTHING_LOGGED: Mapping[int, Mapping[str, float]] = {}
_Key = TypeVar("_Key")
_INTS = ("step", "last_step", "count", "finite_count")
_FLOATS = ("at", "minimum", "mean", "maximum", "last")
_NODES = ("least_on", "most_on")


class SeriesKind(StrEnum):
    """Whether each series of a metric contains the values of one node, or of one rank."""

    NODE = "Node"
    RANK = "Rank"


def kind_of(name: str) -> SeriesKind:
    """Return the kind of series of a metric: nodes measure Everstep's own metrics, ranks log others."""
    return SeriesKind.NODE if name.startswith(OWN_METRICS) else SeriesKind.RANK


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricRecord:
    """One metric of a run, with its newest value."""

    name: str
    last_step: int
    last_at: datetime
    last_value: float


def store(
    session: Session,
    agent_id: str,
    batch: MetricBatch,
    measured: Mapping[NodeId, Mapping[str, float]] = NOBODY,
    logged: Mapping[int, Mapping[str, float]] = NOTHING_LOGGED,
) -> None:
    """Store a batch of metrics of an agent, unless the run was deleted.

    Idempotent: stored numbers of the agent are skipped. `measured` (by node) and `logged` (by rank) are the newest
    values in the generation of the batch's newest point. Names that rank 0 did not send are ignored, so that other
    nodes cannot exhaust the run's limit of names.
    """
    if session.get(JobRow, batch.run) is None:
        return
    log = session.get(MetricLogRow, batch.run)
    if log is None:
        log = MetricLogRow(
            run_id=batch.run, generation=0, agent_id=agent_id, next_number=batch.first_number, dropped_count=0
        )
        session.add(log)
        session.flush()
    if log.agent_id != agent_id:
        log.agent_id, log.next_number = agent_id, batch.first_number
    log.dropped_count += max(0, batch.first_number - log.next_number)
    fresh = batch.points[max(0, log.next_number - batch.first_number) :]
    log.next_number = max(log.next_number, batch.first_number + len(batch.points))
    by_generation: defaultdict[int, list[MetricPoint]] = defaultdict(list)
    for point in fresh:
        by_generation[point.generation].append(point)
    newest = {kind: _newest(fresh, kind) for kind in SeriesKind}
    for generation, points in sorted(by_generation.items()):
        found = [
            _Found(
                point,
                measured if point is newest[SeriesKind.NODE] else NOBODY,
                logged if point is newest[SeriesKind.RANK] else NOTHING_LOGGED,
            )
            for point in points
        ]
        log.dropped_count += _store_generation(session, log, generation, found)
    session.flush()


@dataclass(frozen=True, slots=True)
class _Found:
    """A received point. The newest one also has the newest values by node (`measured`) or rank (`logged`)."""

    point: MetricPoint
    measured: Mapping[NodeId, Mapping[str, float]]
    logged: Mapping[int, Mapping[str, float]]

    def joined(self, name: str, value: float) -> Point:
        """Return the point to store for one value."""
        step, at = self.point.step, self.point.at_seconds
        if kind_of(name) is SeriesKind.RANK:
            return metrics.logged(step, at, value, _column(self.logged, name))
        return metrics.across(step, at, _column(self.measured, name)) or metrics.logged(step, at, value)


def _newest(points: Sequence[MetricPoint], kind: SeriesKind) -> MetricPoint | None:
    """Return the last point with a metric of `kind`, or None if that is of another generation than the last point."""
    found = next((point for point in reversed(points) if any(kind_of(name) is kind for name in point.values)), None)
    return found if found is not None and found.generation == points[-1].generation else None


def _column(values: Mapping[_Key, Mapping[str, float]], name: str) -> dict[_Key, float]:
    return {key: row[name] for key, row in values.items() if name in row}


def _store_generation(session: Session, log: MetricLogRow, generation: int, points: Sequence[_Found]) -> int:
    """Store the values of one generation, and return the number of dropped values."""
    if generation > log.generation:
        base = _base_after(session, log.run_id, log.generation, generation)
        if log.generation and base is not None:
            _report_difference(session, log.run_id, base, [found.point for found in points])
            _forget_after(session, log.run_id, base)
        log.generation = generation
    superseded_after = _base_after(session, log.run_id, generation, log.generation)
    held = {row.name: row for row in session.scalars(select(MetricRow).where(MetricRow.run_id == log.run_id))}
    by_name: defaultdict[str, dict[int, Point]] = defaultdict(dict)
    dropped_count = 0
    for each in points:
        point = each.point
        if superseded_after is not None and point.step > superseded_after:
            continue
        for name, value in point.values.items():
            if (
                name not in held
                and name not in by_name
                and (len(held.keys() | by_name.keys()) >= MAX_NAMES or not _can_be_named(name))
            ):
                dropped_count += 1
            else:
                by_name[name][point.step] = each.joined(name, value)
    chunks = _chunks(session, log.run_id, by_name)
    for name, found in by_name.items():
        _append(session, log.run_id, name, held.get(name), [found[step] for step in sorted(found)], chunks)
    return dropped_count


def _chunks(
    session: Session, run_id: str, by_name: Mapping[str, Collection[int]]
) -> Mapping[tuple[str, int], MetricChunkRow]:
    """Return the stored chunks of the finest resolution for the given steps, by metric and chunk number."""
    numbers = {metrics.chunk_of(step, 1) for steps in by_name.values() for step in steps}
    query = select(MetricChunkRow).where(MetricChunkRow.run_id == run_id, MetricChunkRow.width == 1)
    found = session.scalars(query.where(MetricChunkRow.name.in_(by_name), MetricChunkRow.number.in_(numbers)))
    return {(row.name, row.number): row for row in found}


def _can_be_named(name: str) -> bool:
    return 0 < len(name) <= MAX_METRIC_NAME_LENGTH and "\x00" not in name


def _base_after(session: Session, run_id: str, before: int, upto: int) -> int | None:
    """Return the lowest step that a started generation after `before`, or `upto` itself, restored; None without any."""
    is_later = (
        (GenerationRow.number > before)
        & (GenerationRow.number <= upto)
        & (GenerationRow.started_at.is_not(None) | (GenerationRow.number == upto))
    )
    return session.scalar(select(func.min(GenerationRow.base_step)).where(GenerationRow.run_id == run_id, is_later))


def _append(
    session: Session,
    run_id: str,
    name: str,
    metric: MetricRow | None,
    fresh: Sequence[Point],
    chunks: Mapping[tuple[str, int], MetricChunkRow],
) -> None:
    fine_from = metric.fine_from_step if metric is not None else 0
    fresh = [point for point in fresh if point.step >= fine_from]
    if not fresh:
        return
    if metric is None:
        metric = MetricRow(
            run_id=run_id, name=name, fine_from_step=0, last_step=-1, last_at=_moment(fresh[0].at), last_value="nan"
        )
        session.add(metric)
        session.flush()
    by_chunk: defaultdict[int, list[Point]] = defaultdict(list)
    for point in fresh:
        by_chunk[metrics.chunk_of(point.step, 1)].append(point)
    has_new_chunk = [
        _merge(session, (run_id, name, 1, chunk), chunks.get((name, chunk)), points)
        for chunk, points in by_chunk.items()
    ]
    if any(has_new_chunk):
        session.flush()
        _fold(session, metric)
    if fresh[-1].step >= metric.last_step:
        _note_last(metric, fresh[-1])


def _merge(
    session: Session, key: tuple[str, str, int, int], row: MetricChunkRow | None, fresh: Iterable[Point]
) -> bool:
    """Add points to a chunk, or create the row. Return whether the row is new."""
    is_new = row is None
    if row is None:
        run_id, name, width, chunk = key
        row = MetricChunkRow(run_id=run_id, name=name, width=width, number=chunk, points=b"", nodes=())
        session.add(row)
    _put(row, metrics.replaced(_points(row), fresh))
    return is_new


def _points(row: MetricChunkRow) -> tuple[Point, ...]:
    return unpack(row.points, row.width, row.nodes, row.breakdowns)


def _put(row: MetricChunkRow, points: Sequence[Point]) -> None:
    row.points, row.nodes = pack(points, row.width)
    row.breakdowns = encoded([point.breakdown for point in points], row.points)


def _fold(session: Session, metric: MetricRow) -> None:
    """Join a metric's oldest points until each resolution is within its limit of chunks."""
    width = 1
    while True:
        of_width = (
            MetricChunkRow.run_id == metric.run_id,
            MetricChunkRow.name == metric.name,
            MetricChunkRow.width == width,
        )
        numbers = session.scalars(select(MetricChunkRow.number).where(*of_width).order_by(MetricChunkRow.number)).all()
        surplus = numbers[: max(0, len(numbers) - metrics.kept_chunks(width))]
        if not surplus:
            return
        for number in surplus:
            row = session.get_one(MetricChunkRow, (metric.run_id, metric.name, width, number))
            wider = metrics.folded(_points(row), width * FOLD)
            key = (metric.run_id, metric.name, width * FOLD, number // FOLD)
            _merge(session, key, session.get(MetricChunkRow, key), wider)
            session.delete(row)
            if width == 1:
                metric.fine_from_step = max(metric.fine_from_step, metrics.first_step(number + 1, 1))
        session.flush()
        width *= FOLD


def _report_difference(session: Session, run_id: str, base: int, repeated: Sequence[MetricPoint]) -> None:
    """Append a warning event if a repeated step has another loss than before: the run is not deterministic.

    Only the first values of a generation are compared, because the caller then deletes the old values.
    """
    for point in sorted(repeated, key=lambda point: point.step):
        for name, value in sorted(point.values.items()):
            if point.step <= base or "loss" not in name.lower() or name.startswith(OWN_METRICS):
                continue
            row = session.get(MetricChunkRow, (run_id, name, 1, metrics.chunk_of(point.step, 1)))
            before = next((held.last for held in _points(row) if held.step == point.step), value) if row else value
            if before == value or (math.isnan(before) and math.isnan(value)):
                continue
            job = session.get_one(JobRow, run_id)
            message = (
                f"Warning: step {point.step} was repeated after a recovery, and its {name} is {value!r}; before the "
                f"recovery it was {before!r}. The run is not deterministic, or a part of its state is not registered "
                "with init()"
            )
            events.append_for_job(
                session,
                job,
                "RepeatedStepDiffers",
                message,
                _moment(point.at_seconds),
                detail={"Step": point.step, "Metric": name, "Before": repr(before), "After": repr(value)},
            )
            return


def _forget_after(session: Session, run_id: str, step: int) -> None:
    """Delete the values of all steps after `step`, because the run repeats these steps."""
    start, end = (
        MetricChunkRow.number * MetricChunkRow.width * POINTS_PER_CHUNK,
        (MetricChunkRow.number + 1) * MetricChunkRow.width * POINTS_PER_CHUNK,
    )
    session.execute(
        delete(MetricChunkRow).where(MetricChunkRow.run_id == run_id, start > step),
        execution_options={"synchronize_session": False},
    )
    for row in session.scalars(select(MetricChunkRow).where(MetricChunkRow.run_id == run_id, end > step)).all():
        points = metrics.until(_points(row), step)
        if points:
            _put(row, points)
        else:
            session.delete(row)
    session.flush()
    for metric in session.scalars(
        select(MetricRow).where(MetricRow.run_id == run_id, MetricRow.last_step > step)
    ).all():
        of_metric = select(MetricChunkRow).where(MetricChunkRow.run_id == run_id, MetricChunkRow.name == metric.name)
        newest = session.scalar(of_metric.order_by(MetricChunkRow.width, MetricChunkRow.number.desc()).limit(1))
        if newest is None:
            session.delete(metric)
            continue
        metric.fine_from_step = min(metric.fine_from_step, step + 1)
        _note_last(metric, _points(newest)[-1])
    session.flush()


def _note_last(metric: MetricRow, point: Point) -> None:
    metric.last_step, metric.last_at, metric.last_value = point.last_step, _moment(point.at), repr(point.last)


def names(session: Session, run_id: str) -> tuple[MetricRecord, ...]:
    """Return all metrics of a run, each with its newest value, sorted by name."""
    rows = session.scalars(select(MetricRow).where(MetricRow.run_id == run_id).order_by(MetricRow.name))
    return tuple(
        MetricRecord(name=row.name, last_step=row.last_step, last_at=row.last_at, last_value=float(row.last_value))
        for row in rows
    )


def dropped_count(session: Session, run_id: str) -> int:
    """Return how many logged values of a run the database did not store."""
    return session.scalar(select(MetricLogRow.dropped_count).where(MetricLogRow.run_id == run_id)) or 0


def series_names(session: Session, run_id: str) -> frozenset[str]:
    """Return the names of a run's metrics that have values by node or by rank."""
    query = select(MetricChunkRow.name).where(MetricChunkRow.run_id == run_id, MetricChunkRow.breakdowns.is_not(None))
    return frozenset(session.scalars(query.distinct()))


def read(
    session: Session,
    run_id: str,
    *,
    name: str | None,
    first_step: int,
    last_step: int | None,
    has_breakdowns: bool = False,
) -> Mapping[str, tuple[Point, ...]]:
    """Return points of a run's metrics by name, ordered by step, that overlap the given steps.

    `name` None means all metrics. With `has_breakdowns`, the result omits points without values by node or rank.
    """
    query = chunk_query(run_id, name, has_breakdowns=has_breakdowns)
    query = query.where((MetricChunkRow.number + 1) * MetricChunkRow.width * POINTS_PER_CHUNK > first_step)
    if last_step is not None:
        query = query.where(MetricChunkRow.number * MetricChunkRow.width * POINTS_PER_CHUNK <= last_step)
    found: defaultdict[str, list[Point]] = defaultdict(list)
    for each, width, packed, nodes, breakdowns in session.execute(query):
        found[each] += (
            point
            for point in unpack(packed, width, nodes, breakdowns)
            if point.last_step >= first_step and (last_step is None or point.step <= last_step)
            if point.breakdown is not None or not has_breakdowns
        )
    return {
        each: tuple(sorted(points, key=lambda point: point.step)) for each, points in sorted(found.items()) if points
    }


def chunk_query(
    run_id: str, name: str | None, *, has_breakdowns: bool
) -> Select[str, int, bytes, tuple[str, ...], bytes | None]:
    """Return a query for name, steps per point, packed points, ids of the extreme nodes, and breakdowns.

    `name` None means all metrics. With `has_breakdowns`, only chunks with values by node or rank; otherwise the last
    column is null.
    """
    breakdowns = MetricChunkRow.breakdowns if has_breakdowns else cast(null(), LargeBinary)
    query = select(MetricChunkRow.name, MetricChunkRow.width, MetricChunkRow.points, MetricChunkRow.nodes, breakdowns)
    query = query.where(MetricChunkRow.run_id == run_id)
    if name is not None:
        query = query.where(MetricChunkRow.name == name)
    return query.where(MetricChunkRow.breakdowns.is_not(None)) if has_breakdowns else query


def pack(points: Sequence[Point], width: int) -> tuple[bytes, tuple[str, ...]]:
    """Encode points as bytes. Also return the ids of the nodes with each point's minimum and maximum."""
    nodes = (
        tuple(getattr(point, field) for field in _NODES for point in points)
        if any(point.least_on for point in points)
        else ()
    )
    if width == 1 and not nodes:
        values = ([point.step for point in points], [point.at for point in points], [point.last for point in points])
        return struct.pack(
            f"<{len(points)}q{2 * len(points)}d", *(value for column in values for value in column)
        ), nodes
    ints = [getattr(point, field) for field in _INTS for point in points]
    floats = [getattr(point, field) for field in _FLOATS for point in points]
    return struct.pack(f"<{len(ints)}q{len(floats)}d", *ints, *floats), nodes


def unpack(packed: bytes, width: int, nodes: Sequence[str] = (), breakdowns: bytes | None = None) -> tuple[Point, ...]:
    """Decode points that `pack` encoded, with their values by node or rank (`breakdowns.encoded`), if given."""
    points = _unpacked(packed, width, nodes)
    if breakdowns is None:
        return points
    found = decoded(breakdowns, packed, len(points))
    return tuple(replace(point, breakdown=each) for point, each in zip(points, found, strict=True))


def _unpacked(packed: bytes, width: int, nodes: Sequence[str]) -> tuple[Point, ...]:
    if width == 1 and not nodes:
        n = len(packed) // 24
        row = struct.unpack(f"<{n}q{2 * n}d", packed)
        return tuple(
            metrics.logged(step, at, value)
            for step, at, value in zip(row[:n], row[n : 2 * n], row[2 * n :], strict=True)
        )
    fields: tuple[str, ...] = (*_INTS, *_FLOATS)
    n = len(packed) // (8 * len(fields))
    row = struct.unpack(f"<{len(_INTS) * n}q{len(_FLOATS) * n}d", packed)
    if nodes:
        fields, row = (*fields, *_NODES), (*row, *nodes)
    return tuple(Point(**{field: row[index * n + i] for index, field in enumerate(fields)}) for i in range(n))


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
