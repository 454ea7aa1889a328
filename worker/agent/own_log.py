"""Holds the newest part of the agent's own log in memory, for the diagnosis of a failed node.

Invariant: the log contains the newest lines, with at most `LIMIT_BYTES` in total. Logging never raises an exception.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from pathlib import Path
from typing import Protocol

from everstep.protocol.plan import ObjectReference
from worker.errors import StorageError

log = logging.getLogger(__name__)
LIMIT_BYTES = 1024 * 1024


class ByteStore(Protocol):
    """The method of an object store that this module uses."""

    def put_bytes(self, reference: ObjectReference, data: bytes) -> object:
        """Store a small object, and replace an existing one. Raises StorageError."""


class OwnLog(logging.Handler):
    """Log handler that stores the newest lines of this process. The agent adds one handler to the root logger."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: deque[bytes] = deque()
        self._bytes = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Append one log line, and drop the oldest lines while all lines together exceed `LIMIT_BYTES`."""
        try:
            line = f"{self.format(record)}\n".encode(errors="backslashreplace")[:LIMIT_BYTES]
        except Exception:
            self.handleError(record)
            return
        self._lines.append(line)
        self._bytes += len(line)
        while self._bytes > LIMIT_BYTES:
            self._bytes -= len(self._lines.popleft())

    def text(self) -> bytes:
        """Return the log lines in memory as encoded text, oldest first."""
        self.acquire()
        try:
            return b"".join(self._lines)
        finally:
            self.release()

    def put(self, objects: ByteStore, place: ObjectReference, shim_log: Path) -> None:
        """Upload this log and the end of the shim's log, if any, below a prefix. Blocks. Raises StorageError."""
        objects.put_bytes(ObjectReference(bucket=place.bucket, key=f"{place.key}agent.log"), self.text())
        if shim_log.exists():
            with shim_log.open("rb") as file:
                file.seek(max(0, shim_log.stat().st_size - LIMIT_BYTES))
                objects.put_bytes(
                    ObjectReference(bucket=place.bucket, key=f"{place.key}shim.log"), file.read(LIMIT_BYTES)
                )


class Evidence:
    """Stores the logs of this agent and of the shim in S3 for the control plane."""

    def __init__(self, own_log: OwnLog, objects: ByteStore, state: Path) -> None:
        self.key = ""
        """Key prefix in S3 of the newest stored logs; empty before the first upload."""
        self._own_log = own_log
        self._objects = objects
        self._shim_log = state / "logs" / "shim.log"

    async def keep(self, place: ObjectReference) -> None:
        """Store the logs at `place`, unless they are already stored there."""
        if self.key == place.key:
            return
        try:
            await asyncio.to_thread(self._own_log.put, self._objects, place, self._shim_log)
        except (StorageError, OSError) as error:
            # The next request of the control plane starts another attempt.
            log.warning("the logs of this agent cannot be stored in S3 yet: %s", error)
        else:
            self.key = place.key
