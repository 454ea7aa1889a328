"""`python -P -m infra.local_cloud.guardian_process STATE_DIR RUN`: ends a cluster whose maker has died.

A newer cluster in the same directory has another run id and keeps running. The guardian is not part of the cluster: it
runs in its own session, and imports only the standard library while it waits.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Final

COMMAND_PATIENCE_SECONDS: Final = 60.0
"""Longest wait for another command that holds the cluster's lock when the maker dies."""
RETRY_DOWN_SECONDS: Final = 0.2


def main(arguments: list[str]) -> int:
    """Wait until the maker ends the cluster or dies, and then end the cluster. Return 1 if that failed."""
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
