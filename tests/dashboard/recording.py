"""A recording: the rows and logs that a real control plane stored about one incident, as a reviewable file.

    recordings/<story>.json     written by `tests/dashboard/record.py`: one incident with one fleet and one job

Rows have the columns of the tables (`control_plane/db/models.py`), without tokens and leases. Of the job loop's memory,
a row has only the part that the API reads. Plans and manifests are written as JSON. A value of a metric is
`[step, Unix seconds, value]`. If several nodes measured it, `count, least, most, node of the least, node of the most`
follow.

Invariant: loading restores exactly the rows that the control plane had stored, with the columns that migrations have
    added since. A recording that does not fit the tables is rejected as a whole.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from heapq import merge
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

import msgspec
from sqlalchemy import Column, DefaultClause, Table, insert, select

from control_plane.cloud.objects import ServiceStore
from control_plane.core import metrics
from control_plane.db.metrics import pack, unpack
from control_plane.db.models import Base, StoredValue, UtcDateTime
from control_plane.db.session import Database
from everstep.protocol.codec import decode, encode
from everstep.protocol.manifest import CheckpointManifest, decode_manifest, encode_manifest
from everstep.protocol.plan import GenerationPlan, ObjectReference

FOLDER: Final = Path(__file__).parent / "recordings"
KEPT: Final = (
    "fleet",
    "node",
    "notice",
    "implication",
    "job",
    "job_span",
    "generation",
    "revision",
    "shard",
    "replica",
    "checkpoint",
    "incident",
    "metric_log",
    "metric",
    "metric_chunk",
    "event",
)
LEFT_OUT: Final = frozenset({"lease_owner", "lease_counter", "request_digest"})
"""Columns that a recording leaves out: the leases of the loops, and the digest of the client's request."""
_REMEMBERED: Final = ("capacity_wait", "incident", "member_count", "reason", "spans", "state_since")
"""The fields of the job loop's memory that a recording contains."""

Row = dict[str, Any]


class Strike(msgspec.Struct, frozen=True, kw_only=True):
    """One `everstep local fault` command that caused a part of the incident."""

    command: str
    did: str
    """Output of the fault command, which describes the fault's effect."""


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """The rows and log objects that a real control plane had stored when one incident (story) was recorded."""

    story: str
    ended_at: datetime
    """Time at which the recorder read the rows from the database."""
    strikes: tuple[Strike, ...]
    tables: dict[str, list[Row]]
    objects: dict[str, str]
    """Text of each stored object with log lines, by its key."""

    @property
    def job(self) -> Row:
        """The row of the job that the incident hit."""
        (job,) = self.tables["job"]
        return job


class RecordingStale(Exception):
    """A recording does not fit the present tables or messages.

    The error names the difference and the command that records the incident again.
    """


_FILE: Final = msgspec.json.Decoder(Recording)
_PLAN: Final = msgspec.json.Decoder(GenerationPlan)
_MANIFEST: Final = msgspec.json.Decoder(CheckpointManifest)


def read(path: Path) -> Recording:
    """Return the recording in a file.

    Raises:
        RecordingStale: the file does not have the present format.
    """
    try:
        return _FILE.decode(path.read_bytes())
    except msgspec.DecodeError as error:
        raise stale(path.stem, str(error)) from error


def every(folder: Path = FOLDER) -> tuple[Recording, ...]:
    """Return all recordings, in the order of their file names."""
    return tuple(read(path) for path in sorted(folder.glob("*.json")))


def write(recording: Recording, path: Path) -> None:
    """Write a recording with one value per line, so that a review shows each difference."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(recording, order="sorted"), indent=1) + b"\n")


def stale(story: str, why: str) -> RecordingStale:
    """Return an error that names the reason and the command that records the incident again."""
    return RecordingStale(
        f"the recording of {story} does not fit this version: {why}; record it anew: python -m "
        f"tests.dashboard.record {story}"
    )


# Reading a recording from a database


def rows_of(database: Database) -> dict[str, list[Row]]:
    """Read the recorded tables of a database in one transaction."""
    with database.read() as session:
        tables = {
            name: session.execute(select(*_columns(_table(name))).order_by(*_table(name).primary_key)).mappings().all()
            for name in KEPT
        }
    spelled = {
        name: [{key: _spelled(name, key, value) for key, value in row.items()} for row in rows]
        for name, rows in tables.items()
    }
    spelled["metric_chunk"] = _joined(tables["metric_chunk"])
    return {name: [_plain(row) for row in rows] for name, rows in spelled.items()}


def _spelled(table: str, column: str, value: Any) -> Any:
    match table, column:
        case "generation", "plan":
            return decode(value, GenerationPlan)
        case "checkpoint", "manifest":
            return None if value is None else decode_manifest(value)
        case "job", "memo":
            return {name: value[name] for name in _REMEMBERED if value.get(name) is not None}
    return value


def _joined(chunks: Sequence[Mapping[Any, Any]]) -> list[Row]:
    """Return the stored chunks of each metric as a single row with all values."""
    found: defaultdict[tuple[str, str], list[tuple[Any, ...]]] = defaultdict(list)
    for chunk in chunks:
        assert chunk["width"] == 1, "a story is not so long that its values are folded"
        for point in unpack(chunk["points"], 1, chunk["nodes"]):
            assert math.isfinite(point.last), "JSON has no such number"
            spread = (
                (point.count, point.minimum, point.maximum, point.least_on, point.most_on) if point.least_on else ()
            )
            found[chunk["run_id"], chunk["name"]].append((point.step, point.at, point.last, *spread))
    return [{"run_id": run_id, "name": name, "points": sorted(points)} for (run_id, name), points in found.items()]


def _plain(row: Mapping[str, Any]) -> Row:
    plain: Row = msgspec.json.decode(msgspec.json.encode(row))
    return plain


# Loading recordings into a database


def load(recordings: Iterable[Recording], database: Database, objects: ServiceStore) -> None:
    """Store recordings in an empty database, and their logs in an object store.

    Args:
        recordings: recordings of different fleets and jobs. Their events get new numbers in order of time.
        database: an empty database with the newest schema.
        objects: an object store with the buckets of the recordings.

    Raises:
        RecordingStale: a recording does not fit the tables. Nothing was stored.
    """
    recordings = tuple(recordings)
    stored = [_stored(recording) for recording in recordings]
    rows: dict[str, list[Row]] = {name: [row for tables in stored for row in tables[name]] for name in KEPT}
    # Merge events in order of time, because the database numbers them in the order of their storage.
    rows["event"] = list(merge(*(tables["event"] for tables in stored), key=itemgetter("at")))
    with database.write() as session:
        for table in Base.metadata.sorted_tables:
            if rows.get(table.name):
                session.execute(insert(table), rows[table.name])
    for recording in recordings:
        (bucket,) = {recording.job["spec"]["log_uri"].removeprefix("s3://").partition("/")[0]}
        for key, text in recording.objects.items():
            objects.put(ObjectReference(bucket=bucket, key=key), text.encode())


def _stored(recording: Recording) -> dict[str, list[Row]]:
    """Return a recording's rows in the form of the tables."""
    if set(recording.tables) != set(KEPT):
        raise stale(recording.story, f"it has the tables {', '.join(sorted(recording.tables))}")
    found: dict[str, list[Row]] = {}
    for name, rows in recording.tables.items():
        columns = {column.name: column for column in _columns(_table(name))}
        try:
            split = [chunk for row in rows for chunk in _chunks(row)] if name == "metric_chunk" else rows
            split = [{**_added(columns, row), **row} for row in split]
            for row in split:
                if row.keys() != columns.keys():
                    raise stale(
                        recording.story,
                        f"the table {name} has other columns ({', '.join(sorted(row.keys() ^ columns.keys()))})",
                    )
            packed = [{key: _packed(name, columns[key], value) for key, value in row.items()} for row in split]
        except (msgspec.MsgspecError, KeyError, ValueError, TypeError) as error:
            raise stale(recording.story, f"{name}: {error}") from error
        empty = {column.name: _EMPTY.get(column.name) for column in _table(name).columns if column.name in LEFT_OUT}
        found[name] = [
            {**{key: value for key, value in row.items() if (name, key) != ("event", "id")}, **empty} for row in packed
        ]
    return found


def _added(columns: Mapping[str, Column[Any]], row: Row) -> Row:
    """Return the columns that migrations have added since the recording, with the value that a migration gives them.

    This value is the column's default in the database, or null if the column has no default.
    """
    added = {name: column for name, column in columns.items() if name not in row}
    defaults = {name: column.server_default for name, column in added.items()}
    values = {name: default.arg for name, default in defaults.items() if isinstance(default, DefaultClause)}
    values |= {
        name: json.loads(str(text)) for name, text in values.items() if isinstance(added[name].type, StoredValue)
    }
    return {name: values.get(name) for name, column in added.items() if column.nullable or name in values}


_EMPTY: Final[Mapping[str, Any]] = {"lease_counter": 0}


def _packed(table: str, column: Column[Any], value: Any) -> Any:
    match table, column.name:
        case "generation", "plan":
            return encode(_PLAN.decode(msgspec.json.encode(value)))
        case "checkpoint", "manifest":
            return None if value is None else encode_manifest(_MANIFEST.decode(msgspec.json.encode(value)))
    if value is not None and isinstance(column.type, UtcDateTime):
        return datetime.fromisoformat(value)
    return value


def _chunks(row: Row) -> list[Row]:
    """Return a metric's values as chunks, in the form of the database."""
    by_number: defaultdict[int, list[Any]] = defaultdict(list)
    for point in row["points"]:
        by_number[metrics.chunk_of(point[0], 1)].append(point)
    found = []
    for number, points in sorted(by_number.items()):
        packed, nodes = pack([_point(*point) for point in points], 1)
        found.append({**row, "width": 1, "number": number, "points": packed, "nodes": nodes})
    return found


def _point(step: int, at: float, value: float, count: int = 1, *spread: Any) -> metrics.Point:
    point = metrics.logged(step, at, value)
    if not spread:
        return point
    least, most, least_on, most_on = spread
    return replace(
        point, count=count, finite_count=count, minimum=least, maximum=most, least_on=least_on, most_on=most_on
    )


def _table(name: str) -> Table:
    return Base.metadata.tables[name]


def _columns(table: Table) -> list[Column[Any]]:
    return [column for column in table.columns if column.name not in LEFT_OUT]
