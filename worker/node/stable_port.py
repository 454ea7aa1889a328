"""Stores the agent's port number on disk, so that peers and ranks reach the next agent process at the same port.

Invariant: a failing disk never ends the agent. An agent that cannot read the stored port uses a new port.
"""

from __future__ import annotations

import logging
from pathlib import Path

log = logging.getLogger(__name__)


class KeptPort:
    """Stores the port of this agent on disk for the next agent process of the node."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._known: int | None = None
        """The stored port; None until the file has been read."""

    def read(self) -> int:
        """Return the port of the node's previous agent process; 0 if the file does not exist or cannot be read."""
        if self._known is None:
            self._known = self._read()
        return self._known

    def _read(self) -> int:
        try:
            port = int(self._file.read_text())
            if port not in range(2**16):
                raise ValueError(f"{port} is not a port number")
        except FileNotFoundError:
            return 0
        except (OSError, ValueError) as error:  # The file may be empty after a power loss, or the disk may be broken.
            log.warning("the port of the earlier agent cannot be read: %s", error)
            return 0
        return port

    def keep(self, port: int) -> None:
        """Write the agent's port to disk for the node's next agent process, unless the file already contains it."""
        if self.read() == port:
            return
        scratch = self._file.with_suffix(".new")
        try:
            scratch.write_text(str(port))
            scratch.replace(self._file)
        except OSError as error:
            log.warning("port %d cannot be stored for the next agent of this node: %s", port, error)
        else:
            self._known = port
