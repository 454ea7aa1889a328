"""A rank's record on disk: who it is, and how it ended. One small JSON file each.

    <state>/ranks/<run>.<generation>.<rank>.json

Written by the shim, before it says anything about the rank; and by the supervisor for ranks whose shim is dead.

Invariant: a file is a whole record or is not there; readers skip nothing silently but files that no shim wrote.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from everstep.protocol.ids import RunId
from worker.shim.messages import RankRecord

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(RankRecord)


class RankRecords:
    """The records of one node."""

    def __init__(self, state_dir: Path) -> None:
        self._directory = state_dir / "ranks"

    def write(self, record: RankRecord) -> None:
        """Put a record in place of the rank's earlier one, atomically. It survives this process, not the node: a rank does not either."""
        self._directory.mkdir(mode=0o700, exist_ok=True)
        path = self._path(record)
        fresh = path.with_suffix(".new")
        fresh.write_bytes(_encoder.encode(record))
        os.replace(fresh, path)

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
        """Remove the records of this run's ended ranks."""
        for record in self.read():
            if record.run == run and record.end is not None:
                self._path(record).unlink(missing_ok=True)

    def _path(self, record: RankRecord) -> Path:
        return self._directory / f"{record.run}.{record.generation}.{record.rank}.json"
