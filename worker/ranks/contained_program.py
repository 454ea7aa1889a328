"""`python -P -s -m worker.ranks.contained_program CGROUP USER PROGRAM ARGUMENT …`: runs a program for a job, and ends all that the program has started.

    agent ── this process: in the rank's cgroup, as the job's user, a subreaper ── the program ── whatever the program starts

The kernel makes orphans below a subreaper its children, whichever session and group they are in. So when the program
ends, everything that it has left is below this process, which kills it and then ends as the program did. The kernel
kills this process, and the program, when the agent dies.

Invariant: this process prints nothing but why a program cannot be run: exit code 127, as shells do. HOME is the ranks'
already, and no code of theirs (their user site) runs before this process is theirs.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

from worker.node import rank_user
from worker.ranks.shim import processes

NONE = "-"
CONFINED = "="
"""In the place of a user: this process's own, whose programs gain no rights by whatever they run."""
END_SECONDS = 5.0
"""For what was killed to be gone.

Where the agent is not root, a child may be another user's by now (`sudo`), and cannot be killed.
"""
_LOOK_SECONDS = 0.05
_PR_SET_NO_NEW_PRIVS = 38
_CANNOT_RUN = 127


def main(words: list[str]) -> NoReturn:
    """Run the program to its end, and end like it.

    Args:
        words: the cgroup, or `-`; the user (`written`), `=` or `-`; the program and its arguments.
    """
    cgroup, user, *argv = words
    parent = os.getppid()
    try:
        if cgroup != NONE:
            Path(cgroup, "cgroup.procs").write_text("0")
        if user == CONFINED:
            ctypes.CDLL(None).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        elif user != NONE:
            rank_user.become(_read(user))
        _die_with(parent)  # the kernel forgets it when the user changes
        processes.become_subreaper()
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
        here = os.getpid()
        program = os.fork()
        if program == 0:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
            _die_with(here)
            os.execvp(argv[0], argv)
    except OSError as error:
        sys.stderr.write(f"{argv[0]}: {error.strerror}\n")
        sys.stderr.flush()
        os._exit(_CANNOT_RUN)
    code = _wait(program)
    _end_rest()
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if code != -signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(here, -code)
    os._exit(code & 0xFF)


def written(user: rank_user.RankUser | None) -> str:
    """Return a user as a word: its numbers."""
    return NONE if user is None else ",".join(map(str, (user.uid, user.gid, *user.groups)))


def _read(word: str) -> rank_user.RankUser:
    uid, gid, *groups = map(int, word.split(","))
    return rank_user.RankUser(uid, gid, tuple(groups))


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends; end here if that has happened."""
    processes.die_with_parent()
    if os.getppid() != parent:
        os._exit(_CANNOT_RUN)


def _wait(program: int) -> int:
    """Reap children until the program has ended; return its exit code, or minus the signal's number."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == program:
            return os.waitstatus_to_exitcode(status)


def _end_rest() -> None:
    """Kill and reap all that is below this process."""
    deadline = time.monotonic() + END_SECONDS
    while time.monotonic() < deadline:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        for child in processes.children(os.getpid()):
            processes.kill_tree(child)
        signal.sigtimedwait([signal.SIGCHLD], _LOOK_SECONDS)


if __name__ == "__main__":
    main(sys.argv[1:])
