"""Journal of a node's log lines: the ranks' output with timestamps, in files (chunks) that are later uploaded.

    rank=<r>.stdout, .stderr ──▶ lines ──▶ gen=<g>/node=<node>/<first>-<ms>.jsonl ──▶ object store
      written by the rank                    written here, once, in order               (`worker.logs.uploads`)

A *stream* is the file with a rank's stdout or stderr. The newest chunk records the position up to which each stream was
read, from which a restarted agent continues. A program such as tqdm ends each *state* of a moving line with a carriage
return. The journal stores the newest state, at most one in `STATE_SECONDS`.

Invariant: only one thread at a time uses a journal. A returned line is stored in a file. If a write to the disk fails,
the journal does not change, and the lines are read again later.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import InitVar, dataclass
from pathlib import Path
from typing import Final, NamedTuple

from everstep.protocol.ids import NO_RANK, NodeId, Rank
from everstep.protocol.log_chunks import (
    LINE_BYTES,
    ChunkHead,
    ChunkName,
    LogLine,
    decode_chunk,
    encode_head,
    encode_lines,
    held_characters,
    parse_name,
)

log = logging.getLogger(__name__)

CHUNK_MILLISECONDS: Final = 300_000
"""Age at which a chunk is complete. An incomplete chunk is uploaded again whenever it has grown."""
TAIL_BYTES: Final = 64 * 1024
"""Bytes at the end of a stream that stay on disk, because users see them if the rank fails."""
STATE_SECONDS: Final = 5.0
"""Minimum time between two stored states of a line that a rank overwrites, such as a progress bar."""
_PUNCH_HOLE: Final = 0x02 | 0x01
"""FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE of fallocate(2)."""

StreamKey = tuple[Rank, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalLimits:
    """Sizes at which a node's journal completes chunks, frees disk space, and stops reading output."""

    chunk_bytes: int = 256 * 1024
    """Size at which a chunk is complete."""
    read_bytes: int = 256 * 1024
    journal_bytes: int = 64 * 1024 * 1024
    """Maximum bytes of chunks that wait for their upload. Beyond this size, the journal reads no further output."""
    freed_bytes: int = 4 * 1024 * 1024
    """Bytes of a stream that the journal reads before it frees their disk space."""
    pass_characters: int = 1024 * 1024
    """Maximum characters that one pass over all streams stores, in equal shares, as `held_characters` counts them."""
    behind_bytes: int = 256 * 1024 * 1024
    """Maximum unread bytes of a stream. Beyond this size, the journal skips the oldest bytes and reports a gap."""


LIMITS: Final = JournalLimits()


@dataclass(frozen=True, slots=True)
class Unstored:
    """A chunk that the object store lacks, or has only with fewer lines."""

    name: ChunkName
    path: Path
    size: int
    is_complete: bool
    """True if no further log line will be added to this file."""


@dataclass(slots=True)
class _Chunk:
    name: ChunkName
    path: Path
    size: int
    stored: int = 0


@dataclass(eq=False, repr=False)
class LogJournal:
    """The log lines of one node in one generation.

    `folder` is created if missing, and the files of `streams` need not exist yet. `now` is Unix time in seconds.
    """

    folder: Path
    node_id: NodeId
    streams: InitVar[Mapping[StreamKey, Path]]
    now: Callable[[], float]
    limits: JournalLimits = LIMITS

    def __post_init__(self, streams: Mapping[StreamKey, Path]) -> None:
        self._streams = dict(streams)
        self._positions = dict.fromkeys(self._streams, 0)
        self._given_back = dict.fromkeys(self._streams, 0)
        self._states = dict.fromkeys(self._streams, (b"", -math.inf))
        """The last stored state of each stream's moving line, and the time of `now` at which it was stored."""
        self._chunks: list[_Chunk] = []
        self._last_ms = 0
        self.count = 0
        """Number of lines in the journal, which is also the number of the next line."""
        self.is_ended = False
        (self.folder / f"node={self.node_id}").mkdir(mode=0o700, parents=True, exist_ok=True)
        self._take_up()

    def read(self) -> list[LogLine]:
        """Append the complete lines that ranks have printed since the last call, and return them. Empty after `end`.

        The number of the first line is `count` before the call. Raises OSError; the next call reads these lines again.
        """
        return [] if self.is_ended else self._take(is_last=False)

    def has_news(self) -> bool:
        """Return whether some stream has unread output. Takes microseconds."""
        return any(_size(path) != self._positions[key] for key, path in self._streams.items())

    def ends(self) -> Mapping[StreamKey, int]:
        """Return the current length in bytes of each stream. Takes microseconds."""
        return {key: _size(path) for key, path in self._streams.items()}

    def is_read(self, ends: Mapping[StreamKey, int]) -> bool:
        """Return whether each stream was read up to a result of `ends`. False while its last line is incomplete."""
        return self.is_ended or all(self._positions[key] >= end for key, end in ends.items())

    def end(self) -> list[LogLine]:
        """Append all remaining lines and a line that marks the end, after all ranks have exited. Idempotent.

        Raises OSError. The next call continues where this call stopped.
        """
        if self.is_ended:
            return []
        lines: list[LogLine] = []
        while more := self._take(is_last=True):
            lines += more
        with self._unless_failed() as before:
            # The journal has no room for the unread output of these streams, so report it as lost.
            left = [(key, _size(path)) for key, path in self._streams.items() if _size(path) > self._positions[key]]
            last = [*(self._gap(key, size) for key, size in left), self._line(NO_RANK, "end", "", 0)]
            self._append(last, before)
        self.is_ended = True
        return lines + last

    def unstored(self) -> list[Unstored]:
        """Return the chunks that have grown since their last upload, oldest first."""
        newest = self._chunks[-1] if self._chunks else None
        return [
            Unstored(chunk.name, chunk.path, chunk.size, is_complete=self.is_ended or chunk is not newest)
            for chunk in self._chunks
            if chunk.size > chunk.stored
        ]

    def stored(self, chunk: Unstored) -> None:
        """Record the upload of a chunk, and delete the complete chunks that are uploaded."""
        for known in self._chunks:
            if known.name == chunk.name:
                known.stored = chunk.size
        # The newest chunk stays on disk, because it records where a later agent process continues to read.
        while len(self._chunks) > 1 and self._chunks[0].stored == self._chunks[0].size:
            self._chunks.pop(0).path.unlink(missing_ok=True)

    def _take_up(self) -> None:
        found = sorted(
            name
            for path in self.folder.glob("node=*/*.jsonl")
            if (name := parse_name(f"{path.parent.name}/{path.name}")) is not None
        )
        for name in found:
            path = self.folder / name.path
            data = path.read_bytes()
            head, lines, good = decode_chunk(data)
            if head is None:
                path.unlink()
                continue
            if good < len(data):
                os.truncate(path, good)
            self._chunks.append(_Chunk(name, path, good))
            self.count = head.first + len(lines)
            for key in self._streams:
                self._positions[key] = head.positions.get(f"{key[0]}.{key[1]}", 0)
            for line in lines:
                if (line.rank, line.stream) in self._positions:
                    self._positions[line.rank, line.stream] = line.end
                self._last_ms = max(self._last_ms, line.at_ms)
                self.is_ended = self.is_ended or line.stream == "end"

    @contextlib.contextmanager
    def _unless_failed(self) -> Iterator[Mapping[StreamKey, int]]:
        """Yield the positions up to which streams were read; restore them if the `with` block raises OSError."""
        before = dict(self._positions)
        try:
            yield before
        except OSError:
            self._positions = before
            raise

    def _take(self, *, is_last: bool) -> list[LogLine]:
        """Append the new lines of all streams to the journal, free the disk space of read output, and return them."""
        with self._unless_failed() as before:
            lines = list(self._new_lines(is_last=is_last))
            if lines:
                self._append(lines, before)
        for key, path in self._streams.items():
            self._give_back(key, path)
        return lines

    def _is_full(self) -> bool:
        return sum(chunk.size for chunk in self._chunks if chunk.stored < chunk.size) > self.limits.journal_bytes

    def _new_lines(self, *, is_last: bool) -> Iterator[LogLine]:
        waiting = sum(_size(path) > self._positions[key] for key, path in self._streams.items())
        share = self.limits.pass_characters // max(1, waiting)
        for (rank, stream), path in self._streams.items():
            key = (rank, stream)
            size = _size(path)
            if size < self._positions[key]:
                yield self._begun_anew(key)
            if size - self._positions[key] > self.limits.behind_bytes:
                yield self._gap(key, size - self.limits.behind_bytes // 2)
            if self._is_full() or size <= self._positions[key]:
                continue
            with path.open("rb") as file:
                file.seek(self._positions[key])
                data = file.read(self.limits.read_bytes)
            read = spent = 0
            for part in split_lines(data, is_last=is_last and len(data) < self.limits.read_bytes):
                read += part.size
                self._positions[key] += part.size
                end = self._positions[key]
                line = self._line(rank, stream, part.text, end, is_piece=part.is_piece, overwrites=part.overwrites)
                spent += held_characters([line])
                yield line
                if spent >= share:
                    break
            if spent >= share:
                continue
            state, overwritten = newest_state(data[read:])
            self._positions[key] += overwritten
            known, stored_at = self._states[key]
            if state not in (b"", known) and self.now() - stored_at >= STATE_SECONDS:
                self._states[key] = (state, self.now())
                text = state.decode(errors="replace").rstrip("\ufffd")  # the last character may be incomplete
                yield self._line(rank, stream, text, self._positions[key], overwrites=True)

    def _begun_anew(self, key: StreamKey) -> LogLine:
        """Read a stream again after a process has truncated it; return a line that reports the lost output."""
        self._positions[key], self._given_back[key] = 0, 0
        return self._line(
            *key,
            f"{key[1]} of rank {key[0]} was begun anew: what it had before, and was not read yet, is lost.",
            0,
            is_gap=True,
        )

    def _gap(self, key: StreamKey, upto: int) -> LogLine:
        """Skip unread bytes of a stream up to `upto`; return a log line that reports the gap."""
        lost, self._positions[key] = upto - self._positions[key], upto
        text = f"{lost} bytes of {key[1]} of rank {key[0]} were not kept: the node could not store them in time."
        return self._line(*key, text, upto, is_gap=True)

    def _line(
        self,
        rank: Rank,
        stream: str,
        text: str,
        end: int,
        *,
        is_piece: bool = False,
        is_gap: bool = False,
        overwrites: bool = False,
    ) -> LogLine:
        self._last_ms = max(self._last_ms, int(self.now() * 1000))
        return LogLine(
            at_ms=self._last_ms,
            rank=rank,
            stream=stream,  # type: ignore[arg-type]
            text=text,
            end=end,
            is_piece=is_piece,
            is_gap=is_gap,
            overwrites=overwrites,
        )

    def _append(self, lines: list[LogLine], before: Mapping[StreamKey, int]) -> None:
        newest = self._chunks[-1] if self._chunks else None
        if (
            newest is None
            or newest.size >= self.limits.chunk_bytes
            or lines[0].at_ms - newest.name.at_ms >= CHUNK_MILLISECONDS
        ):
            newest = self._begin_chunk(lines[0].at_ms, before)
        newest.size = _write(newest.path, newest.size, encode_lines(lines))
        self.count += len(lines)

    def _begin_chunk(self, at_ms: int, before: Mapping[StreamKey, int]) -> _Chunk:
        name = ChunkName(self.node_id, self.count, at_ms)
        head = ChunkHead(
            first=self.count, positions={f"{rank}.{stream}": position for (rank, stream), position in before.items()}
        )
        path = self.folder / name.path
        try:
            chunk = _Chunk(name, path, _write(path, 0, encode_head(head)))
        except OSError:
            with contextlib.suppress(OSError):
                path.unlink()
            raise
        self._chunks.append(chunk)
        return chunk

    def _give_back(self, key: StreamKey, path: Path) -> None:
        """Free the disk space of the read part of a stream, except for the last `TAIL_BYTES`."""
        upto = (self._positions[key] - TAIL_BYTES) // 4096 * 4096
        if upto - self._given_back[key] < self.limits.freed_bytes:
            return
        self._given_back[key] = upto
        with path.open("r+b") as file:
            if _libc.fallocate(file.fileno(), _PUNCH_HOLE, 0, upto) != 0:
                log.info(
                    "the disk space of %s that was already read cannot be freed: %s",
                    path,
                    os.strerror(ctypes.get_errno()),
                )


class LinePart(NamedTuple):
    """A line, or a part of a long line."""

    text: str
    """Text without line feed; for a line with carriage returns, the last state."""
    size: int
    """Number of bytes read, with line feed and overwritten states."""
    is_piece: bool
    """Whether the line continues."""
    overwrites: bool
    """Whether the line contained a carriage return other than in a CRLF at its end."""


def split_lines(data: bytes, *, is_last: bool, max_line_bytes: int = LINE_BYTES) -> Iterator[LinePart]:
    """Split bytes of a stream into lines, from the end of the last line on. Pure.

    With `is_last`, remaining bytes without a line feed also form a line. Otherwise the caller reads the bytes of an
    incomplete line again later.
    """
    begin = 0
    while begin < len(data):
        cut = data.find(b"\n", begin)
        line_end = cut if cut >= 0 else len(data)
        start, stop = _last_state(data, begin, line_end)
        if stop - start >= max_line_bytes:
            stop, is_piece = start + max_line_bytes, True
            while stop > start + max_line_bytes - 4 and data[stop - 1] & 0xC0 == 0x80:
                stop -= 1  # The cut must not be inside a UTF-8 character.
            if data[stop - 1] >= 0xC0:
                stop -= 1
            end = stop
        elif cut >= 0 or is_last:
            end, is_piece = min(line_end + 1, len(data)), False
        else:
            return
        yield LinePart(data[start:stop].decode(errors="replace"), end - begin, is_piece, start > begin)
        begin = end


def newest_state(data: bytes) -> tuple[bytes, int]:
    """Return the newest state of a line that a program still overwrites, and the number of overwritten bytes. Pure.

    `data` begins at the beginning of a line and has no line feed. The caller reads the other bytes again, because a
    line feed may follow them.
    """
    cut = data.rfind(b"\r")
    if cut < 0 or (cut == len(data) - 1 and b"\r" not in data[:cut]):  # possibly the first half of a CRLF
        return b"", 0
    start, stop = _last_state(data, 0, len(data))
    return data[start:stop].rstrip()[:LINE_BYTES], cut


def _last_state(data: bytes, begin: int, end: int) -> tuple[int, int]:
    """Return the begin and end of the text that is visible after a line without its line feed."""
    if data.find(b"\r", begin, end) < 0:
        return begin, end
    # The time is linear for every content, because ranks choose it.
    seen = data[begin:end].rstrip()  # blank states overwrite nothing
    return begin + seen.rfind(b"\r") + 1, begin + len(seen)


def _write(path: Path, size: int, data: bytes) -> int:
    """Write `data`, all or nothing, after the first `size` bytes of a file. Return the new length."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666), "wb", buffering=0) as file:
        # Bytes after `size` come from a failed write.
        file.truncate(size)
        file.seek(size)
        left = memoryview(data)
        try:
            while left:
                left = left[file.write(left) :]
        except OSError:
            with contextlib.suppress(OSError):  # If truncate fails, the next write cuts off the incomplete data.
                file.truncate(size)
            raise
    return size + len(data)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
