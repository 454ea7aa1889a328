"""`python -P -s -m worker.beside CGROUP USER PROGRAM ARGUMENT …`: becomes a program, in a rank's cgroup, as its user, and gone with its agent.

Invariant: nothing but the program's own words comes from here, but where it cannot be run: exit code 127, as a shell says it. HOME is the ranks'
already: no code of theirs (their user site) runs before this process is theirs.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

from worker import rank_user

NONE = "-"
_PR_SET_PDEATHSIG = 1
_CANNOT_RUN = 127


def main(words: list[str]) -> NoReturn:
    """Become the program.

    Args:
        words: the cgroup, or `-`; the user (`written`), or `-`; the program and its arguments.
    """
    cgroup, user, *argv = words
    parent = os.getppid()
    try:
        if cgroup != NONE:
            Path(cgroup, "cgroup.procs").write_text("0")
        if user != NONE:
            rank_user.become(_read(user))
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # the kernel forgets it when the user changes
        if os.getppid() != parent:  # it was gone before that held
            os._exit(_CANNOT_RUN)
        os.execvp(argv[0], argv)
    except OSError as error:
        sys.stderr.write(f"{argv[0]}: {error.strerror}\n")
        sys.stderr.flush()
        os._exit(_CANNOT_RUN)


def written(user: rank_user.RankUser | None) -> str:
    """Return a user as a word: its numbers."""
    return NONE if user is None else ",".join(map(str, (user.uid, user.gid, *user.groups)))


def _read(word: str) -> rank_user.RankUser:
    uid, gid, *groups = map(int, word.split(","))
    return rank_user.RankUser(uid, gid, tuple(groups))


if __name__ == "__main__":
    main(sys.argv[1:])
