"""`python -P -m infra.local_cloud.guardian_process STATE_DIR RUN`: ends a cluster whose maker has died.

It does what `LocalCluster.down` does: it ends processes, network namespaces, and what instances have mounted on tmpfs.
A cluster that another command has started in the same folder has another run's name, and the guardian leaves it alone.

Invariant: the guardian is no part of the cluster. It runs in a session of its own, and imports only the standard
library while it waits.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Final

COMMAND_PATIENCE_SECONDS: Final = 60.0
"""Time for a command that works on the cluster when its maker dies."""
RETRY_DOWN_SECONDS: Final = 0.2


def main(arguments: list[str]) -> int:
    """Wait for the maker, then end its cluster if it died. Return 1 if the cluster could not be ended."""
    if sys.stdin.buffer.read(1):
        return 0
    from infra.local_cloud.errors import PreflightFailed
    from infra.local_cloud.up import LocalCluster

    deadline = time.monotonic() + COMMAND_PATIENCE_SECONDS
    while True:
        try:
            LocalCluster(Path(arguments[0])).down(of_run=arguments[1])
        except PreflightFailed:  # another command works on the cluster
            if time.monotonic() > deadline:
                return 1
            threading.Event().wait(RETRY_DOWN_SECONDS)
        else:
            return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
