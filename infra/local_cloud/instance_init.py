"""Process 1 of an instance: runs the user data, and ends everything that ever came from it.

    python -P -m infra.local_cloud.instance_init PARENT_PID INSTANCE_ID SCRIPT [NETWORK_NAMESPACE]

It is a subreaper, so that daemons of other sessions stay below it; it gets SIGTERM when the local cloud dies; on
SIGTERM it kills all below it, removes the instance's directory on tmpfs (an instance's memory goes with it) and its
ranks' cgroups, and exits. It lives on when the user data has
ended: a machine does.
Standard library only; one thread, no handlers: it waits for its signals. With a network namespace, all of the instance
lives in that.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import sys
from pathlib import Path

from infra.local_cloud.network import enter
from infra.local_cloud.processes import PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG, kill_descendants

MNT_DETACH = 2
AWAITED = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD}


def memory_directory(instance_id: str) -> Path:
    """Return where an instance of this user keeps its slots on tmpfs."""
    return Path(f"/dev/shm/everstep-{os.getuid()}-{instance_id}")


def remove_memory(instance_id: str) -> None:
    """Remove what an instance kept on tmpfs, and the tmpfs that its agent may have mounted there."""
    directory = memory_directory(instance_id)
    ctypes.CDLL(None).umount2(os.fsencode(directory), MNT_DETACH)  # most often there is none, and that is all right
    shutil.rmtree(directory, ignore_errors=True)


def remove_cgroups(instance_id: str) -> None:
    """Remove the cgroups that an instance's agent made for its ranks; their processes have ended."""
    own = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    for root, controllers in (
        ("/sys/fs/cgroup", ""),
        ("/sys/fs/cgroup/unified", ""),
        ("/sys/fs/cgroup/freezer", "freezer"),
    ):
        folder = Path(root, own.get(controllers, "/").lstrip("/"), memory_directory(instance_id).name)
        for cgroup in (*folder.glob("*/"), folder):
            with contextlib.suppress(
                OSError
            ):  # not there, or what is killed has not quite gone: the next instance of this name tidies up
                cgroup.rmdir()


def main(arguments: list[str]) -> int:
    """Run until SIGTERM; `arguments` are those of the command line."""
    parent_pid, instance_id, script = int(arguments[0]), arguments[1], arguments[2]
    for namespace in arguments[3:]:
        enter(Path(namespace))
    signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED)
    libc = ctypes.CDLL(None, use_errno=True)
    for option, value in ((PR_SET_CHILD_SUBREAPER, 1), (PR_SET_PDEATHSIG, signal.SIGTERM)):
        if libc.prctl(option, int(value), 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), f"prctl({option})")
    if os.getppid() != parent_pid:
        return 1  # the local cloud died before it could be followed
    user_data_pid = os.posix_spawn(script, [script], os.environ, setsigmask=[], setsigdef=AWAITED)
    while signal.sigwait(AWAITED) == signal.SIGCHLD:
        _reap(user_data_pid, exit_file(Path(script)))
    kill_descendants(os.getpid())
    _reap(user_data_pid, told_in=None)  # it ends with its machine, and not on one that is there
    remove_memory(instance_id)
    remove_cgroups(instance_id)
    return 0


def exit_file(script: Path) -> Path:
    """Return where the exit code of a user data script is written that has ended before its machine."""
    return script.with_name("user-data.exit")


def _reap(user_data_pid: int, told_in: Path | None) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        if pid == user_data_pid and told_in is not None:
            code = os.waitstatus_to_exitcode(status)
            print(f"user data ended with code {code}", flush=True)
            told_in.write_text(str(code))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
