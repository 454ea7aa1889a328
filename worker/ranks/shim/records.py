"""Stores records of ranks on disk: one small JSON file per rank, which describes its process and its end.

    <state>/ranks/<run>.<generation>.<rank>.json

The shim writes a record before it reports anything about the rank, and starts no rank whose record the disk refuses.
The shim reports the end of a rank even if the disk refuses the write, and then retries the write.

Invariant: a record's file is either complete or absent. Readers skip only files that no shim has written.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

import msgspec

from everstep.protocol.ids import RunId
from worker.ranks.shim.messages import RankRecord

RECORD_RETRY_SECONDS = 1.0
"""Seconds between two attempts to write records of ended ranks that the disk has refused."""
log = logging.getLogger(__name__)
_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(RankRecord)


class RankRecords:
    """Writes and reads one file per rank of this node, with the pid of its process and finally its exit code."""

    def __init__(self, state_dir: Path) -> None:
        self._directory = state_dir / "ranks"
        self._owed: dict[Path, RankRecord] = {}

    def write(self, record: RankRecord) -> None:
        """Write a rank's record to disk, atomically replacing the rank's earlier record.

        The file is not fsynced, because a failure of the node also ends the rank. Raises OSError if the disk is full or
        refuses the write. The earlier record then remains.
        """
        path = self._path(record)
        fresh = path.with_suffix(".new")
        try:
            self._directory.mkdir(mode=0o700, exist_ok=True)
            fresh.write_bytes(_encoder.encode(record))
            os.replace(fresh, path)
        except OSError:
            with contextlib.suppress(OSError):
                fresh.unlink()
            raise

    def write_end(self, record: RankRecord) -> None:
        """Write the record of a rank that has ended.

        If the disk refuses the write, the record stays in memory, and `write_owed` writes it later.
        """
        try:
            self.write(record)
        except OSError as error:
            log.error(
                "the end of rank %s of generation %s cannot be written to disk yet: %s",
                record.rank,
                record.generation,
                error,
            )
            self._owed[self._path(record)] = record

    @property
    def is_owing(self) -> bool:
        """True if the disk has refused the records of some ended ranks, and `write_owed` has not written them yet."""
        return bool(self._owed)

    def write_owed(self) -> None:
        """Try again to write the records of ended ranks that the disk has refused.

        The shim calls this method every `RECORD_RETRY_SECONDS` and before it ends.
        """
        for path, record in list(self._owed.items()):
            with contextlib.suppress(OSError):
                self.write(record)
                del self._owed[path]

    def read(self) -> list[RankRecord]:
        """Return the records of all ranks on disk, sorted by run, generation and rank."""
        found = []
        for path in sorted(self._directory.glob("*.json")):
            try:
                found.append(_decoder.decode(path.read_bytes()))
            except (FileNotFoundError, msgspec.ValidationError, msgspec.DecodeError):
                continue  # Skip a file that was removed meanwhile, or that is no record.
        return sorted(found, key=lambda record: record.key)

    def forget(self, run: RunId) -> None:
        """Remove the records of this run's ended ranks. Files that cannot be removed remain."""
        self._owed = {path: record for path, record in self._owed.items() if record.run != run}
        for record in self.read():
            if record.run == run and record.end is not None:
                try:
                    self._path(record).unlink(missing_ok=True)
                except OSError as error:
                    log.warning("a record of a rank of an ended run cannot be removed: %s", error)

    def _path(self, record: RankRecord) -> Path:
        return self._directory / f"{record.run}.{record.generation}.{record.rank}.json"
