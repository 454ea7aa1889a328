"""`python -P -m worker.beside CGROUP PROGRAM ARGUMENT …`: becomes a program, in a rank's cgroup and gone with the agent that started it.

Invariant: nothing but the program's own words comes from here, but where it cannot be run: exit code 127, as a shell says it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

NO_CGROUP = "-"
_PR_SET_PDEATHSIG = 1
_CANNOT_RUN = 127


def main(words: list[str]) -> NoReturn:
    """Become the program.

    Args:
        words: the cgroup, or `-`; the program and its arguments.
    """
    cgroup, *argv = words
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before that held
        os._exit(_CANNOT_RUN)
    try:
        if cgroup != NO_CGROUP:
            Path(cgroup, "cgroup.procs").write_text("0")
        os.execvp(argv[0], argv)
    except OSError as error:
        sys.stderr.write(f"{argv[0]}: {error.strerror}\n")
        sys.stderr.flush()
        os._exit(_CANNOT_RUN)


if __name__ == "__main__":
    main(sys.argv[1:])
