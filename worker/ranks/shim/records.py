"""A rank's record on disk: who it is, and how it ended. One small JSON file each.

    <state>/ranks/<run>.<generation>.<rank>.json

Written by the shim, before it says anything about the rank; and by the supervisor for ranks whose shim is dead. A rank
whose start the disk does not take is not started. An end has happened whether the disk takes it or not: it is owed to
the disk, and tried again.

Invariant: a file is a whole record or is not there; readers skip nothing silently but files that no shim wrote.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

import msgspec

from everstep.protocol.ids import RunId
from worker.ranks.shim.messages import RankRecord

RETRY_SECONDS = 1.0
"""Between two attempts to write what is owed."""
log = logging.getLogger(__name__)
_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(RankRecord)


class RankRecords:
    """The records of one node."""

    def __init__(self, state_dir: Path) -> None:
        self._directory = state_dir / "ranks"
        self._owed: dict[Path, RankRecord] = {}

    def write(self, record: RankRecord) -> None:
        """Put a record in place of the rank's earlier one, atomically.

        It survives this process, not the node: a rank does not either.

        Args:
            record: whole.

        Raises:
            OSError: the disk is full, or takes nothing; the earlier record stays.
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
        """Write the record of a rank that has ended; where the disk does not take it, it is owed."""
        try:
            self.write(record)
        except OSError as error:
            log.error(
                "the end of rank %s of generation %s cannot be recorded yet: %s", record.rank, record.generation, error
            )
            self._owed[self._path(record)] = record

    @property
    def is_owing(self) -> bool:
        """Whether `write_owed` has work."""
        return bool(self._owed)

    def write_owed(self) -> None:
        """Try again to write the ends that the disk did not take; its owner calls this every `RETRY_SECONDS`, and when it ends."""
        for path, record in list(self._owed.items()):
            with contextlib.suppress(OSError):
                self.write(record)
                del self._owed[path]

    def read(self) -> list[RankRecord]:
        """Return all records, in the order of run, generation and rank."""
        found = []
        for path in sorted(self._directory.glob("*.json")):
            try:
                found.append(_decoder.decode(path.read_bytes()))
            except (FileNotFoundError, msgspec.ValidationError, msgspec.DecodeError):
                continue  # forgotten meanwhile, or a file that is not ours
        return sorted(found, key=lambda record: (record.run, record.generation, record.rank))

    def forget(self, run: RunId) -> None:
        """Remove the records of this run's ended ranks; one that the disk does not let go of stays."""
        self._owed = {path: record for path, record in self._owed.items() if record.run != run}
        for record in self.read():
            if record.run == run and record.end is not None:
                try:
                    self._path(record).unlink(missing_ok=True)
                except OSError as error:
                    log.warning("a record of a rank of an ended run cannot be removed: %s", error)

    def _path(self, record: RankRecord) -> Path:
        return self._directory / f"{record.run}.{record.generation}.{record.rank}.json"
