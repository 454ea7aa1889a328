"""Runs a program and ends its descendants: `python -P -s -m worker.ranks.contained_program CGROUP USER PROGRAM …`.

    agent ── this process: in the rank's cgroup, as the job's user, a subreaper ── the program ── its descendants

The process ends with the program's exit code or signal, and dies with the agent. Invariant: it prints nothing except
the reason why it cannot run a program; it then exits with code 127. No code from the job user's home runs before the
change to this user.
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

from worker.node import priority, rank_user
from worker.ranks.shim import processes

NONE = "-"
CONFINED = "="
"""Value of the argument USER: the program keeps this process's user and gains no rights by exec (`no_new_privs`)."""
END_SECONDS = 5.0
"""Maximum seconds to wait until killed processes have ended. Without root, a child of another user cannot be killed."""
_EXIT_POLL_SECONDS = 0.05
_PR_SET_NO_NEW_PRIVS = 38
_CANNOT_RUN = 127


def main(words: list[str]) -> NoReturn:
    """Run the program, kill the processes that it left, and end with its exit code or signal.

    `words` are the cgroup's path or `-`, the user's ids (`written`) or `CONFINED`, the program and its arguments.
    """
    cgroup, user, *argv = words
    parent = os.getppid()
    try:
        if cgroup != NONE:
            Path(cgroup, "cgroup.procs").write_text("0")
        priority.end_first_without_memory()
        if user == CONFINED:
            ctypes.CDLL(None).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        elif user != NONE:
            rank_user.become(read_user(user))
        _die_with(parent)  # Call this after `become`, because a change of user clears the parent-death signal.
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
    """Return a user's numeric ids as one command-line word; `-` for None."""
    return NONE if user is None else ",".join(map(str, (user.uid, user.gid, *user.groups)))


def read_user(word: str) -> rank_user.RankUser:
    """Return the user whose numeric ids `written` encoded."""
    uid, gid, *groups = map(int, word.split(","))
    return rank_user.RankUser(uid, gid, tuple(groups))


def _die_with(parent: int) -> None:
    """Ask the kernel to kill this process when its parent ends. Exit if `parent` has already ended."""
    processes.die_with_parent()
    if os.getppid() != parent:
        os._exit(_CANNOT_RUN)


def _wait(program: int) -> int:
    """Reap children until `program` has ended; return its exit code, or minus its signal's number."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == program:
            return os.waitstatus_to_exitcode(status)


def _end_rest() -> None:
    deadline = time.monotonic() + END_SECONDS
    while time.monotonic() < deadline:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        for child in processes.children(os.getpid()):
            processes.kill_tree(child)
        signal.sigtimedwait([signal.SIGCHLD], _EXIT_POLL_SECONDS)


if __name__ == "__main__":
    main(sys.argv[1:])
