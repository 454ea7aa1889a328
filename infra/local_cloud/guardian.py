"""Starts the guardian process, which ends a cluster if the process that started the cluster (the maker) dies.

    maker ──pipe──▶ python -P -m infra.local_cloud.guardian_process STATE_DIR RUN

The maker holds the only write end of the pipe. A byte means that the maker has ended the cluster itself. An end of file
without a byte means that the maker died.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path


class Guardian:
    """Starts the guardian process and reports the end of the cluster to it.

    The maker, which is the process that started the cluster, owns this object.

    Args:
        state_dir: state directory of the cluster that the guardian ends if the maker dies.
        run: id of this start of the local cloud, which `up` writes to the state directory before it starts anything.
    """

    def __init__(self, state_dir: Path, run: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "infra.local_cloud.guardian_process", str(state_dir), run],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def dismiss(self) -> None:
        """Report to the guardian that this process has ended its cluster, and wait until the guardian exits."""
        with contextlib.suppress(BrokenPipeError):  # Another process has killed the guardian, so nobody reads the pipe.
            self._process.communicate(b".")
        self._process.wait()
