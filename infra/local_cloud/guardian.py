"""Ends a cluster whose maker has died: whoever enters a `LocalCluster` promises to end it, and a process that is killed cannot.

    maker ──pipe──▶ python -P -m infra.local_cloud.guardian STATE_DIR RUN

The pipe's other end is the maker's alone. A byte on it: the maker has ended the cluster itself. Its end without one: the kernel has closed it,
however the maker died; then the guardian does what `LocalCluster.down` does: processes, network namespaces and what instances have mounted on
tmpfs go. A cluster that somebody else has started in the same folder since then has another run's name, and is left alone.

Invariant: it is no part of the cluster, in a session of its own, and has nothing imported but the standard library while it waits.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Final

PATIENCE_SECONDS: Final = 60.0
"""A command that is at work in the cluster when its maker dies may take so long to end."""
LOOK_SECONDS: Final = 0.2
_ENDED = b"."


class Guardian:
    """The process, seen from the maker. Started when made; the maker keeps it until it has ended the cluster.

    Args:
        state_dir: of the cluster.
        run: what its maker's `up` writes down there before it starts anything.
    """

    def __init__(self, state_dir: Path, run: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "infra.local_cloud.guardian", str(state_dir), run],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def dismiss(self) -> None:
        """Tell it that the cluster has ended, and wait for its own end."""
        with contextlib.suppress(BrokenPipeError):  # somebody has killed it
            self._process.communicate(_ENDED)
        self._process.wait()


def main(arguments: list[str]) -> int:
    """Wait for the maker; `arguments` are those of the command line. Return 1 if the cluster could not be ended."""
    if sys.stdin.buffer.read(1):
        return 0
    from infra.local_cloud.errors import PreflightFailed
    from infra.local_cloud.up import LocalCluster

    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            LocalCluster(Path(arguments[0])).down(of_run=arguments[1])
        except PreflightFailed:  # an `up` or a `down` of somebody else's is at work
            if time.monotonic() > deadline:
                return 1
            threading.Event().wait(LOOK_SECONDS)
        else:
            return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
