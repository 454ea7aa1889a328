"""The init process of an instance: runs the user data, and at the end kills all processes of the instance.

    python -P -m infra.local_cloud.instance_init PARENT_PID INSTANCE_ID SCRIPT [NETWORK_NAMESPACE]

It is a subreaper, so it also finds daemons. On SIGTERM, which the kernel sends when the local cloud dies, it kills all
descendants, removes the folder for sockets and the cgroups of ranks, and exits. It keeps running after the user data
has ended, as a machine does. It uses the standard library only, has one thread, and blocks its signals and waits for
them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

from infra.local_cloud.network import enter
from infra.local_cloud.own_memory import make_own_memory
from infra.local_cloud.processes import PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG, kill_descendants

AWAITED = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD}


def memory_directory(instance_id: str) -> Path:
    """Return the folder for an instance's sockets, one per user."""
    return Path(f"/dev/shm/everstep-{os.getuid()}-{instance_id}")


def remove_memory(instance_id: str, outer: int | None = None) -> None:
    """Remove an instance's folder for sockets.

    `outer` is the result of `make_own_memory` in the instance, where the folder itself is a mount that cannot be
    removed.
    """
    folder = memory_directory(instance_id)
    remove_tree(folder)
    if outer is not None:
        with contextlib.suppress(OSError):
            os.rmdir(folder.name, dir_fd=outer)


def remove_tree(folder: Path) -> None:
    """Remove a folder that an instance's programs have filled, as far as possible."""
    # `shutil.rmtree` recurses, and raises in a deeply nested folder. `rm` has no limit of depth.
    subprocess.run(["rm", "-rf", "--", folder], stderr=subprocess.DEVNULL, check=False)


def remove_cgroups(instance_id: str) -> None:
    """Remove the cgroups of an instance's ended ranks."""
    own = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    for root, controllers in (
        ("/sys/fs/cgroup", ""),
        ("/sys/fs/cgroup/unified", ""),
        ("/sys/fs/cgroup/freezer", "freezer"),
    ):
        folder = Path(root, own.get(controllers, "/").lstrip("/"), memory_directory(instance_id).name)
        for cgroup in (*folder.glob("*/"), folder):
            # rmdir fails if the cgroup does not exist, or if a killed process in it has not exited yet. In the second
            # case, the cgroup stays. If the instance boots again, this function tries again when that boot ends.
            with contextlib.suppress(OSError):
                cgroup.rmdir()


def main(arguments: list[str]) -> int:
    """Run the instance until SIGTERM. Raises OSError if the kernel refuses to make this process a subreaper."""
    parent_pid, instance_id, script = int(arguments[0]), arguments[1], arguments[2]
    for namespace in arguments[3:]:
        enter(Path(namespace))
    signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED)
    outer = make_own_memory(memory_directory(instance_id))
    libc = ctypes.CDLL(None, use_errno=True)
    for option, value in ((PR_SET_CHILD_SUBREAPER, 1), (PR_SET_PDEATHSIG, signal.SIGTERM)):
        if libc.prctl(option, int(value), 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), f"prctl({option})")
    if os.getppid() != parent_pid:
        remove_memory(instance_id, outer)
        return 1  # The local cloud died before the prctl call, so the kernel will send no signal.
    user_data_pid = os.posix_spawn(script, [script], os.environ, setsigmask=[], setsigdef=AWAITED)
    while signal.sigwait(AWAITED) == signal.SIGCHLD:
        _reap(user_data_pid, exit_file(Path(script)))
    kill_descendants(os.getpid())
    # The instance ends while the user data script may still run, so this call stores no exit code for the script.
    _reap(user_data_pid, exit_code_file=None)
    remove_memory(instance_id, outer)
    remove_cgroups(instance_id)
    return 0


def exit_file(script: Path) -> Path:
    """Return the file with the user data's exit code. It exists only if the user data ended before the instance."""
    return script.with_name("user-data.exit")


def _reap(user_data_pid: int, exit_code_file: Path | None) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        if pid == user_data_pid and exit_code_file is not None:
            code = os.waitstatus_to_exitcode(status)
            print(f"user data ended with code {code}", flush=True)
            exit_code_file.write_text(str(code))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
