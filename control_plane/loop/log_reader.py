"""Reads a job's log from the log chunks in the object store. Lines of a generation are merged by time.

    cursor = (generation, {node: number of its next line}, nodes whose missing lines were reported)

Each node numbers its lines, so a cursor stays valid while further chunks arrive. Lines that a node uploads late appear
late, out of the order of time. The last chunk of a node marks the end of its lines. For a node that can no longer mark
the end, the reader returns a *gap*, which states where the stored lines end.

Invariant: a reader that continues from a cursor, in either direction, returns each line once. Only one thread at a time
may use a reader.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from itertools import zip_longest
from operator import itemgetter
from typing import Final

from sqlalchemy.orm import Session

from control_plane.cloud.errors import NotFound, ObjectTooLarge
from control_plane.cloud.objects import ServiceStore
from control_plane.core.states import ENDED_JOBS
from control_plane.db import jobs, nodes
from control_plane.db.jobs import SavedJob
from everstep.protocol.ids import NO_RANK, NodeId, Rank
from everstep.protocol.log_chunks import (
    FLUSH_SECONDS,
    MAX_CHUNK_BYTES,
    ChunkName,
    LogLine,
    TailName,
    decode_chunk,
    parse_name,
    parse_tail,
)
from everstep.protocol.plan import ObjectReference

SCAN_LINES: Final = 100_000
"""Limit of lines examined for one page. A filter that matches few lines therefore yields short pages."""
PAGE_CHARACTERS: Final = 1 << 20
"""Characters from which on a page takes no further line. JSON encodes one as up to six bytes."""
SCAN_GENERATIONS: Final = 100
CACHED_BYTES: Final = 8 * 1024 * 1024
"""Size limit of the cache of decoded log chunks, in bytes as S3 stores them."""
PATIENCE: Final = timedelta(seconds=30)
"""Time after a generation's end for which the reader waits until a live node has uploaded its last chunk."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """A position between two lines of a job's log."""

    generation: int
    """0 means before the first generation."""
    positions: Mapping[NodeId, int] = field(default_factory=dict)
    reported_gaps: frozenset[NodeId] = frozenset()
    """Nodes whose gap the reader has already returned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEvent:
    """One line of the log, or a gap: a message in place of lines that are missing."""

    at_ms: int
    generation: int
    node_id: NodeId
    rank: Rank | None
    """None means that the line is about the whole node."""
    kind: str
    """`stdout`, `stderr` or `gap`."""
    text: str
    overwrites: bool = False
    """Whether the line replaces the previous line of the rank's stream, if that line also has this value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFilter:
    """Selects lines of a log. A gap need not contain `text`, but must fulfil all other conditions."""

    rank: Rank | None = None
    generation: int | None = None
    start_ms: int | None = None
    end_ms: int | None = None
    """Unix milliseconds. Lines at this time are not selected."""
    text: str = ""

    def has(self, event: LogEvent, ranks: Mapping[NodeId, tuple[Rank, ...]]) -> bool:
        """Return whether the filter selects an event."""
        if (self.start_ms is not None and event.at_ms < self.start_ms) or (
            self.end_ms is not None and event.at_ms >= self.end_ms
        ):
            return False
        if (
            self.rank is not None
            and event.rank != self.rank
            and not (event.rank is None and self.rank in ranks.get(event.node_id, (self.rank,)))
        ):
            return False
        return event.kind == "gap" or self.text in event.text


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationFacts:
    """Facts about one generation from the database."""

    number: int
    ranks: Mapping[NodeId, tuple[Rank, ...]]
    """Empty if retention has removed the generation's plan."""
    over_since: datetime | None
    """Time at which the generation ended. None for the newest generation of an unfinished job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """One page of a job's log: lines and gaps, with the cursors from which a client can continue to read."""

    events: tuple[LogEvent, ...]
    """Events, oldest first."""
    first: Cursor
    last: Cursor
    is_over: bool = False
    """Whether the log is complete and this page ends with its last line."""


@dataclass(frozen=True, slots=True)
class _Stored:
    name: ChunkName | TailName
    reference: ObjectReference
    etag: str


@dataclass(slots=True)
class _OfNode:
    """The stored chunks (S3 objects) that contain one node's lines of one generation."""

    chunks: list[_Stored] = field(default_factory=list)
    tails: list[_Stored] = field(default_factory=list)
    """Copies of this node's lines that its holders uploaded, in order of their lines."""


@dataclass(frozen=True, slots=True)
class _Extent:
    """Cached facts about a log chunk, valid while its ETag stays the same."""

    etag: str
    end: int
    """Number of the line after the chunk's last line."""
    last_at_ms: int | None
    """None if the chunk has no lines."""
    is_last: bool


class _Stopped(Exception):
    """Raised to abort a read in progress, because `is_stopped` returned True."""


class _Found:
    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.events: list[LogEvent] = []
        self._characters = 0

    @property
    def is_full(self) -> bool:
        return len(self.events) >= self._limit or self._characters >= PAGE_CHARACTERS

    def add(self, event: LogEvent) -> None:
        self.events.append(event)
        self._characters += len(event.text)


class LogReader:
    """Reads one run's log. Only one thread at a time may use a reader.

    `generations` are oldest first, and `alive` are the ids of the nodes whose instances have not ended. The reader
    calls `is_stopped` before each request to S3, and aborts if it returns True.
    """

    def __init__(
        self,
        objects: ServiceStore,
        place: ObjectReference,
        generations: Iterable[GenerationFacts],
        alive: frozenset[str],
        has_ended: bool,
        now: Callable[[], datetime],
        is_stopped: Callable[[], bool] = lambda: False,
        *,
        cache_limit_bytes: int = CACHED_BYTES,
    ) -> None:
        self._cache_limit_bytes = cache_limit_bytes
        self._objects = objects
        self._place = place
        self._now = now
        self._is_stopped = is_stopped
        self._facts: dict[int, GenerationFacts] = {}
        self._extents: dict[str, _Extent] = {}
        self._cache: OrderedDict[tuple[str, str], tuple[list[LogLine], int]] = OrderedDict()
        """Lines and stored size by object key and ETag, least recently used first."""
        self._cached_bytes = 0
        self.update(generations, alive, has_ended)

    def update(self, generations: Iterable[GenerationFacts], alive: frozenset[str], has_ended: bool) -> None:
        """Replace the facts about generations, nodes and the job by newer facts from the database."""
        self._facts = {facts.number: facts for facts in generations}
        self._alive = alive
        self._has_ended = has_ended

    def head(self, wanted: LogFilter) -> Cursor:
        """Return the cursor at the start of the log, or of the generation that `wanted` selects."""
        return Cursor(wanted.generation or min(self._facts, default=0))

    def tail(self, wanted: LogFilter) -> Cursor:
        """Return the cursor at the current end of the log, or of the generation that `wanted` selects."""
        number = wanted.generation or max(self._facts, default=0)
        return self._end_of(number) if number in self._facts else Cursor(number)

    def forward(self, cursor: Cursor, wanted: LogFilter, limit: int) -> Page:
        """Return up to `limit` log events, of about `PAGE_CHARACTERS` at most, that follow the position `cursor`."""
        found = _Found(limit)
        at, scanned = cursor, 0
        for _ in range(SCAN_GENERATIONS):
            facts = self._facts.get(at.generation)
            if facts is not None:
                positions, reported_gaps = dict(at.positions), set(at.reported_gaps)
                chunks = self._chunks(at.generation)
                nodes = {*chunks, *facts.ranks}
                streams = [
                    self._after(node, chunks.get(node, _OfNode()), positions.get(node, 0), wanted.start_ms)
                    for node in nodes
                ]
                for event, number in heapq.merge(*streams, key=_by_time):
                    if (
                        found.is_full
                        or scanned >= SCAN_LINES
                        or (wanted.end_ms is not None and event.at_ms >= wanted.end_ms)
                    ):
                        return Page(
                            events=tuple(found.events),
                            first=cursor,
                            last=Cursor(at.generation, positions, frozenset(reported_gaps)),
                        )
                    scanned += 1
                    positions[event.node_id] = number + 1
                    if event.kind != "end" and wanted.has(event, facts.ranks):
                        found.add(event)
                is_settled, gaps = self._settle(facts, chunks)
                for gap in gaps:
                    if gap.node_id not in reported_gaps:
                        reported_gaps.add(gap.node_id)
                        if wanted.has(gap, facts.ranks):
                            found.add(gap)
                at = Cursor(at.generation, positions, frozenset(reported_gaps))
                if not is_settled:
                    return Page(events=tuple(found.events), first=cursor, last=at)
            following = min((number for number in self._facts if number > at.generation), default=None)
            if following is None or wanted.generation is not None:
                last = self._facts.get(wanted.generation or 0) or self._facts.get(max(self._facts, default=0))
                # A job without a generation has no lines. Its log is complete once the job has ended.
                is_over = last.over_since is not None if last is not None else self._has_ended
                return Page(events=tuple(found.events), first=cursor, last=at, is_over=is_over)
            at = Cursor(following)
            if found.is_full:
                break
        return Page(events=tuple(found.events), first=cursor, last=at)

    def backward(self, cursor: Cursor, wanted: LogFilter, limit: int) -> Page:
        """Return the last `limit` log events before the position `cursor`, oldest first. Limited as `forward`."""
        found = _Found(limit)
        at, scanned = cursor, 0
        for _ in range(SCAN_GENERATIONS):
            facts = self._facts.get(at.generation)
            if facts is not None:
                positions, reported_gaps = dict(at.positions), set(at.reported_gaps)
                chunks = self._chunks(at.generation)
                for gap in reversed(self._settle(facts, chunks)[1]):
                    if gap.node_id in reported_gaps:
                        reported_gaps.discard(gap.node_id)
                        if wanted.has(gap, facts.ranks):
                            found.add(gap)
                streams = [
                    self._before(node, of_node, positions.get(node, 0), wanted.end_ms)
                    for node, of_node in chunks.items()
                ]
                for event, number in heapq.merge(*streams, key=_by_time, reverse=True):
                    if (
                        found.is_full
                        or scanned >= SCAN_LINES
                        or (wanted.start_ms is not None and event.at_ms < wanted.start_ms)
                    ):
                        at = Cursor(at.generation, positions, frozenset(reported_gaps))
                        return Page(events=tuple(reversed(found.events)), first=at, last=cursor)
                    scanned += 1
                    positions[event.node_id] = number
                    if event.kind != "end" and wanted.has(event, facts.ranks):
                        found.add(event)
                at = Cursor(
                    at.generation,
                    {node: number for node, number in positions.items() if number},
                    frozenset(reported_gaps),
                )
            before = max((number for number in self._facts if number < at.generation), default=None)
            if before is None or wanted.generation is not None or found.is_full:
                break
            at = self._end_of(before)
        return Page(events=tuple(reversed(found.events)), first=at, last=cursor)

    def _go_on(self) -> None:
        if self._is_stopped():
            raise _Stopped

    def _end_of(self, generation: int) -> Cursor:
        chunks = self._chunks(generation)
        positions = {node: self._end(of_node).end for node, of_node in chunks.items()}
        return Cursor(
            generation, positions, frozenset(gap.node_id for gap in self._settle(self._facts[generation], chunks)[1])
        )

    def _chunks(self, generation: int) -> dict[NodeId, _OfNode]:
        prefix = ObjectReference(bucket=self._place.bucket, key=f"{self._place.key}gen={generation}/")
        chunks, tails = list[tuple[ChunkName, _Stored]](), list[tuple[TailName, _Stored]]()
        self._go_on()
        for info in self._objects.list(prefix):
            path = info.reference.key[len(prefix.key) :]
            if (name := parse_name(path)) is not None:
                chunks.append((name, _Stored(name, info.reference, info.etag)))
            elif (tail := parse_tail(path)) is not None and not self._is_awaited(
                self._facts.get(generation), tail.node_id
            ):
                tails.append((tail, _Stored(tail, info.reference, info.etag)))
        found: dict[NodeId, _OfNode] = {}
        for name, stored in sorted(chunks, key=itemgetter(0)):
            found.setdefault(name.node_id, _OfNode()).chunks.append(stored)
        for tail, stored in sorted(tails, key=itemgetter(0)):
            found.setdefault(tail.node_id, _OfNode()).tails.append(stored)
        return found

    def _is_awaited(self, facts: GenerationFacts | None, node: NodeId) -> bool:
        """Return whether a node may still upload lines of a generation itself. The reader then ignores its tails."""
        over_since = None if facts is None else facts.over_since
        return over_since is None or (node in self._alive and self._now() - over_since < PATIENCE)

    def _lines(self, chunk: _Stored) -> list[LogLine]:
        key = (chunk.reference.key, chunk.etag)
        if key in self._cache:
            self._cache.move_to_end(key)
            return self._cache[key][0]
        self._go_on()
        try:
            data = self._objects.get(chunk.reference, limit_bytes=MAX_CHUNK_BYTES)
        except (NotFound, ObjectTooLarge):  # an agent may store any bytes
            data = b""
        lines = decode_chunk(data)[1]
        last = lines[-1] if lines else None
        end, at_ms = chunk.name.first + len(lines), None if last is None else last.at_ms
        self._extents[chunk.reference.key] = _Extent(chunk.etag, end, at_ms, last is not None and last.stream == "end")
        self._cache[key] = lines, len(data)
        self._cached_bytes += len(data)
        while self._cached_bytes > self._cache_limit_bytes:
            self._cached_bytes -= self._cache.popitem(last=False)[1][1]
        return lines

    def _extent(self, chunk: _Stored) -> _Extent:
        known = self._extents.get(chunk.reference.key)
        if known is None or known.etag != chunk.etag:
            self._lines(chunk)
            known = self._extents[chunk.reference.key]
        return known

    def _beyond(self, of_node: _OfNode) -> list[tuple[_Stored, LogLine, int]]:
        """Return the lines of tails after the last chunk that a node uploaded itself. A gap replaces lost lines."""
        own = self._extent(of_node.chunks[-1]) if of_node.chunks else None
        if own is not None and own.is_last:
            return []
        end, found = 0 if own is None else own.end, list[tuple[_Stored, LogLine, int]]()
        for tail in of_node.tails:
            lines = self._lines(tail)
            if lines and tail.name.first > end:
                lost = tail.name.first - end
                text = (
                    f"{lost} line{'s' if lost > 1 else ''} of node {tail.name.node_id} were lost with it: its peers "
                    "keep only the newest."
                )
                gap = LogLine(at_ms=lines[0].at_ms, rank=NO_RANK, stream="stderr", text=text, end=0, is_gap=True)
                found.append((tail, gap, tail.name.first - 1))
                end = tail.name.first
            found += [(tail, line, number) for number, line in enumerate(lines, tail.name.first) if number >= end]
            end = max(end, tail.name.first + len(lines))
        return found

    def _end(self, of_node: _OfNode) -> _Extent:
        """Return the end of a node's lines in S3, including those in tails."""
        own = self._extent(of_node.chunks[-1]) if of_node.chunks else _Extent("", 0, None, is_last=False)
        beyond = self._beyond(of_node)
        return replace(own, end=beyond[-1][2] + 1, last_at_ms=beyond[-1][1].at_ms) if beyond else own

    def _after(
        self, node: NodeId, of_node: _OfNode, position: int, start_ms: int | None
    ) -> Iterator[tuple[LogEvent, int]]:
        chunks = of_node.chunks
        for chunk, later in zip_longest(chunks, (chunk.name for chunk in chunks[1:])):
            if later is not None and (later.first <= position or (start_ms is not None and later.at_ms < start_ms)):
                continue
            known = self._extents.get(chunk.reference.key)
            if known is not None and known.etag == chunk.etag and known.end <= position:
                continue
            for number, line in enumerate(self._lines(chunk), chunk.name.first):
                if number >= position:
                    yield _event(line, node, chunk.reference), number
        for stored, line, number in self._beyond(of_node):
            if number >= position:
                yield _event(line, node, stored.reference), number

    def _before(
        self, node: NodeId, of_node: _OfNode, position: int, end_ms: int | None
    ) -> Iterator[tuple[LogEvent, int]]:
        for stored, line, number in reversed(self._beyond(of_node)):
            if number < position:
                yield _event(line, node, stored.reference), number
        for chunk in reversed(of_node.chunks):
            if chunk.name.first >= position or (end_ms is not None and chunk.name.at_ms >= end_ms):
                continue
            for number, line in reversed(list(enumerate(self._lines(chunk), chunk.name.first))):
                if number < position:
                    yield _event(line, node, chunk.reference), number

    def _settle(self, facts: GenerationFacts, chunks: Mapping[NodeId, _OfNode]) -> tuple[bool, list[LogEvent]]:
        """Return whether a generation's log is final, and a gap for each node whose last lines are missing."""
        if facts.over_since is None:
            return False, []
        is_settled, gaps = True, []
        over_ms = int(facts.over_since.timestamp() * 1000)
        for node in sorted({*chunks, *facts.ranks}):
            last = self._end(chunks[node]) if node in chunks else None
            if last is not None and last.is_last:
                continue
            if self._is_awaited(facts, node):
                is_settled = False
                continue
            ranks = ", ".join(str(rank) for rank in facts.ranks.get(node, ()))
            who = f"rank {ranks}" if "," not in ranks else f"ranks {ranks}"
            why = "has not uploaded it yet" if node in self._alive else "ended before the upload"
            last_at_ms = None if last is None else last.last_at_ms
            since = "from the beginning" if last_at_ms is None else f"after {_clock(last_at_ms)}"
            text = (
                f"Output of {who} {since} is missing, because {node} {why}. "
                f"Nodes upload their output every {FLUSH_SECONDS:g} s."
            )
            at_ms = max(last_at_ms or 0, 0) or over_ms
            gaps.append(LogEvent(at_ms=at_ms, generation=facts.number, node_id=node, rank=None, kind="gap", text=text))
        return is_settled, gaps


def facts_of(session: Session, job: SavedJob) -> tuple[tuple[GenerationFacts, ...], frozenset[str], bool]:
    """Read what a `LogReader` needs: the job's generations, the ids of its live nodes, and whether it has ended."""
    ranks = {
        record.number: {node.node_id: node.ranks for node in record.plan.nodes}
        for record in jobs.planned(session, job.run_id)
    }
    lineage = jobs.lineage(session, job.run_id)
    has_ended = job.state in ENDED_JOBS
    ended_at = job.ended_at if has_ended else None
    following = [*(entry.planned_at for entry in lineage), ended_at][1:] if lineage else []
    found = tuple(
        GenerationFacts(number=entry.number, ranks=ranks.get(entry.number, {}), over_since=over)
        for entry, over in zip(lineage, following, strict=True)
    )
    return found, frozenset(node.id for node in nodes.of_fleet(session, job.fleet_name)), has_ended


def of_line(line: LogLine, node: NodeId, generation: int) -> LogEvent:
    """Convert a stored log line to the log event that the API returns."""
    return LogEvent(
        at_ms=line.at_ms,
        generation=generation,
        node_id=node,
        rank=None if line.rank == NO_RANK else line.rank,
        kind="gap" if line.is_gap else line.stream,
        text=line.text,
        overwrites=line.overwrites,
    )


def advanced(cursor: Cursor, node: NodeId, position: int) -> Cursor:
    """Return a copy of the cursor, with the number of the next line of one node changed to `position`."""
    return replace(cursor, positions={**cursor.positions, node: position})


def _event(line: LogLine, node: NodeId, reference: ObjectReference) -> LogEvent:
    return of_line(line, node, int(reference.key.rpartition("/gen=")[2].partition("/")[0]))


def _by_time(found: tuple[LogEvent, int]) -> tuple[int, str, int]:
    return found[0].at_ms, found[0].node_id, found[1]


def _clock(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%H:%M:%S.%f")[:-3]
