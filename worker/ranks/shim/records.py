"""Stores records of ranks on disk: one small JSON file per rank, which describes its process and its end.

    <state>/ranks/<run>.<generation>.<rank>.json

The shim starts no rank whose record the disk refuses. It reports the end of a rank in any case, and retries the write.
Invariant: a record's file is either complete or absent.
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
"""Seconds between two attempts to write records that the disk has refused."""
log = logging.getLogger(__name__)
_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(RankRecord)


class RankRecords:
    """Writes and reads one file per rank of this node."""

    def __init__(self, state_dir: Path) -> None:
        self._directory = state_dir / "ranks"
        self._owed: dict[Path, RankRecord] = {}

    def write(self, record: RankRecord) -> None:
        """Replace a rank's record atomically. Raises OSError if the disk refuses; the earlier record remains."""
        path = self._path(record)
        fresh = path.with_suffix(".new")
        try:
            self._directory.mkdir(mode=0o700, exist_ok=True)
            # No fsync, because a failure of the node also ends the rank.
            fresh.write_bytes(_encoder.encode(record))
            os.replace(fresh, path)
        except OSError:
            with contextlib.suppress(OSError):
                fresh.unlink()
            raise

    def write_end(self, record: RankRecord) -> None:
        """Write the record of an ended rank now or, if the disk refuses, by `write_owed`."""
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
        """True while the disk has refused records of ended ranks."""
        return bool(self._owed)

    def write_owed(self) -> None:
        """Try again to write the records that the disk has refused."""
        for path, record in list(self._owed.items()):
            with contextlib.suppress(OSError):
                self.write(record)
                del self._owed[path]

    def read(self) -> list[RankRecord]:
        """Return the records on disk, sorted by run, generation and rank."""
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
