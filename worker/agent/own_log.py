"""The agent's own log, as far as it fits memory: what a person who looks at a failed node reads first.

Invariant: it holds at most `LIMIT_BYTES`, the newest lines, and never fails whoever logs.
"""

from __future__ import annotations

import logging
from collections import deque
from pathlib import Path
from typing import Protocol

from everstep.protocol.plan import ObjectReference

LIMIT_BYTES = 1024 * 1024


class ByteStore(Protocol):
    """The part of an object store that is needed here."""

    def put_bytes(self, reference: ObjectReference, data: bytes) -> object:
        """Store a small object.

        Args:
            reference: where.
            data: all of it.

        Returns:
            What is stored.

        Raises:
            StorageError: of the type that says what can be done about it.
        """


class OwnLog(logging.Handler):
    """Keeps the newest lines of everything that this process logs. One per agent; give it to the root logger."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: deque[bytes] = deque()
        self._bytes = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one line. Called by `logging`, under this handler's lock, from any thread."""
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
        """Return what is kept, oldest line first."""
        self.acquire()
        try:
            return b"".join(self._lines)
        finally:
            self.release()

    def put(self, objects: ByteStore, place: ObjectReference, shim_log: Path) -> None:
        """Store this log and the shim's. Blocks; called in a thread.

        Args:
            objects: where to.
            place: the key ends with a slash.
            shim_log: the shim's; one that is not there is left out.

        Raises:
            StorageError: of the type that says what can be done about it.
        """
        objects.put_bytes(ObjectReference(bucket=place.bucket, key=f"{place.key}agent.log"), self.text())
        if shim_log.exists():
            with shim_log.open("rb") as file:
                file.seek(max(0, shim_log.stat().st_size - LIMIT_BYTES))
                objects.put_bytes(
                    ObjectReference(bucket=place.bucket, key=f"{place.key}shim.log"), file.read(LIMIT_BYTES)
                )
