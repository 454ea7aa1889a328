"""A port that outlives the agent which listens at it: peers and ranks know it by number.

Invariant: a disk that takes or gives nothing costs that, and not the agent.
"""

from __future__ import annotations

import logging
from pathlib import Path

log = logging.getLogger(__name__)


class KeptPort:
    """The port that an agent listens at, kept on disk: who knows it finds the next agent of this node there.

    Args:
        file: that holds it.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._known: int | None = None
        """What it holds, once that was looked at."""

    def read(self) -> int:
        """Return the port of the agent before this one; 0 where none is known."""
        if self._known is None:
            self._known = self._read()
        return self._known

    def _read(self) -> int:
        try:
            port = int(self._file.read_text())
            if port not in range(2**16):
                raise ValueError(f"{port} is none")
        except FileNotFoundError:
            return 0
        except (OSError, ValueError) as error:  # empty after a loss of power, or the disk is broken
            log.warning("the port of the agent before this one is not known: %s", error)
            return 0
        return port

    def keep(self, port: int) -> None:
        """Have the next agent know a port. Writes nothing where it is known already."""
        if self.read() == port:
            return
        scratch = self._file.with_suffix(".new")
        try:
            scratch.write_text(str(port))
            scratch.replace(self._file)
        except OSError as error:
            log.warning("port %d cannot be kept for the next agent of this node: %s", port, error)
        else:
            self._known = port
