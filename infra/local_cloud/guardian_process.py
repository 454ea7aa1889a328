"""`python -P -m infra.local_cloud.guardian_process STATE_DIR RUN`: ends a cluster whose maker (starter) has died.

The guardian calls `LocalCluster.down`, which ends processes and removes network namespaces. If another
command has started a new cluster in the same directory, that cluster has another run id. The guardian then leaves the
new cluster running.

Invariant: the guardian is not part of the cluster. It runs in its own session, and imports only the standard library
while it waits.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Final

COMMAND_PATIENCE_SECONDS: Final = 60.0
"""Time to wait for another command that holds the cluster's lock when the cluster's maker (starter) dies."""
RETRY_DOWN_SECONDS: Final = 0.2


def main(arguments: list[str]) -> int:
    """Wait until the maker (starter) of the cluster ends the cluster or dies. If it dies, end the cluster.

    Return 1 if the cluster could not be ended.
    """
    if sys.stdin.buffer.read(1):
        return 0
    from infra.local_cloud.errors import PreflightFailed
    from infra.local_cloud.up import LocalCluster

    deadline = time.monotonic() + COMMAND_PATIENCE_SECONDS
    while True:
        try:
            LocalCluster(Path(arguments[0])).down(of_run=arguments[1])
        except PreflightFailed:  # Another `up` or `down` is in progress, so try again later.
            if time.monotonic() > deadline:
                return 1
            threading.Event().wait(RETRY_DOWN_SECONDS)
        else:
            return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
