"""Starts the guardian process, which ends a cluster if the process that started the cluster (the maker) dies.

The maker holds the only write end of a pipe to the guardian. A byte means that the maker has ended the cluster itself.
An end of file without a byte means that the maker died.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path


class Guardian:
    """Starts the guardian process and reports the end of the cluster to it. The maker owns this object.

    `run` is the id of this start of the local cloud, which `up` has written to the state directory before.
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
        """Report the end of the cluster to the guardian, and wait until the guardian exits."""
        with contextlib.suppress(BrokenPipeError):  # Another process has killed the guardian, so nobody reads the pipe.
            self._process.communicate(b".")
        self._process.wait()
