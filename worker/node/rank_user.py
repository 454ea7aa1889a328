"""Manages the ranks' own Linux users, used if the agent is root: their access to folders, and the change of user.

By default, each job on a node has its own user: `user_of` assigns the uids of a range to the node's jobs in turn. All
users share one group. No process of a job can read the environment, memory or files of another job.

    <state>/rank_users       the turn of each job, newest last
    <state>, <slots>         root:ranks 0710; ranks pass through but cannot list; the agent's own files are 0600 or 0700
    inputs, packages         owned by root, readable; no job can change them
    slots, page, socket      root:ranks 0660, for this node's ranks; a rank can write the file but not replace it
    source, outputs, home    owned by the ranks' user; each generation has a new copy of the source

After the change of user, a process has no capabilities, and its children cannot gain any by exec (no_new_privs).

Invariant: no code of a job runs before `become` has returned; if `become` fails, the process ends. Source:
capabilities(7), `Effect of user ID changes`; prctl(2); Yama, Documentation/admin-guide/LSM/Yama.rst.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import pwd
import re
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import msgspec

from everstep.protocol.ids import RunId
from worker.core.task_limit import MAX_TASKS
from worker.errors import UserRefused
from worker.node.file_trees import folders_of, remove_tree

NAME: Final = "everstep-ranks"
NUMBER: Final = 61_100
"""Default gid of ranks, and uid of the program that kills jobs' processes. No job's program has this uid.

Source: systemd, UIDS-GIDS: numbers from 60,578 to 61,183 are assigned neither to human users nor dynamically.
"""
UID_COUNT: Final = 63
"""Number of uids for jobs, from `NUMBER` + 1 on."""
KEPT_TURNS: Final = 8
"""Number of jobs whose assigned uid is stored. No files of older jobs remain."""
IN_MEMORY: Final = (Path("/dev/shm"), Path("/dev/mqueue"))
COMMON: Final = (Path("/tmp"), Path("/var/tmp"), *IN_MEMORY)
TRY_SECONDS: Final = 30.0
_PR_SET_DUMPABLE = 4
_PR_SET_NO_NEW_PRIVS = 38
_PR_SET_PTRACER = 0x59616D61
_CLOSED = (
    "import os, sys; print(*(path for path in sys.argv[1:] if not os.access(path, os.X_OK if "
    "os.path.isdir(path) else os.R_OK)), sep=', ', end='')"
)


_END = """
import contextlib, os, signal, sys
own, first, count = map(int, sys.argv[1:])
os.setgroups([])
os.setresgid(own, own, own)
for uid in range(first, first + count):
    os.setresuid(own, uid, 0)
    facts = dict(line.split(":", 1) for line in open("/proc/self/status"))
    if int(facts["CapEff"], 16):
        sys.exit(f"as uid {uid} this process keeps capabilities, so that it would signal other users' processes")
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    os.seteuid(0)
"""
"""Python program that kills all processes of the given users.

With a user's effective uid, the program can signal only this user's processes. Its real and saved uids stay different,
so the user's processes cannot signal the program. Source: kill(2).
"""
TURNS: Final = "rank_users"
_KILLED_CHECK_SECONDS = 0.02
_taking_turns = threading.Lock()
_killed = threading.Event()
"""Never set: a thread waits on it to pause between two checks for killed processes."""
_turns = msgspec.json.Decoder(list[tuple[str, int]])


@dataclass(frozen=True, slots=True)
class RankUser:
    """A user without privileges, or a range of users of which each job receives one."""

    uid: int
    gid: int
    groups: tuple[int, ...] = ()
    """Ids of supplementary groups, for example of a group with access to devices."""
    name: str = NAME
    uid_count: int = 1
    """Number of consecutive uids from `uid` on; with 1, all jobs share this user."""
    max_tasks: int = MAX_TASKS
    """Maximum number of processes and threads of each uid, which the kernel enforces."""

    def covers(self, uid: int) -> bool:
        """Return whether `uid` belongs to this user or to this range of users."""
        return self.uid <= uid < self.uid + self.uid_count

    def at_turn(self, turn: int) -> RankUser:
        """Return the user for the job with the number `turn` on this node, from 0. Turns repeat after the last uid."""
        return replace(self, uid=self.uid + turn % self.uid_count, uid_count=1)

    def identity(self, home: Path) -> dict[str, str]:
        """Return environment variables with the user's home and name. The user need not exist in passwd."""
        return {"HOME": str(home), "USER": self.name, "LOGNAME": self.name}

    @property
    def options(self) -> dict[str, Any]:
        """Arguments for `subprocess` that start a program as the user of a job's ranks."""
        return {"user": self.uid, "group": self.gid, "extra_groups": self.groups}


def choose(setting: str | None, own_uid: int) -> RankUser | None:
    """Choose the user of a node's ranks: a name, `uid` or `uid:gid`. With None, each job has its own uid.

    Return None if ranks run as the agent's user, because of the setting or because the agent is not root. Raises
    UserRefused if the user does not exist, the agent may not become it, or it has root's rights.
    """
    if setting is not None and setting in (str(own_uid), user_name_of(own_uid)):
        return None
    if own_uid != 0:
        if setting is None:
            return None
        raise UserRefused(f"only root can run ranks as {setting}; this agent has the uid {own_uid}")
    found = _by_turns() if setting is None else _numbered(setting) or find_user(setting)
    if found is None:
        raise UserRefused(f"the user {setting} does not exist on this node")
    if 0 in (found.uid, found.gid, *found.groups):
        raise UserRefused(f"{setting} is root, or in root's group")
    return found


def user_of(run: RunId, state: Path, user: RankUser | None) -> RankUser | None:
    """Return the user of a run's ranks on this node; None if ranks run as the agent's user. Called in any thread.

    A new run receives the next uid of the range, and this assignment is on disk before the call returns. Raises OSError
    if the disk refuses to store it.
    """
    if user is None or user.uid_count == 1:
        return user
    path = state / TURNS
    with _taking_turns:
        try:
            turns = _turns.decode(path.read_bytes())
        except (FileNotFoundError, msgspec.DecodeError):
            turns = []
        known = dict(turns)
        if run not in known:
            # Each agent begins at a different uid of the range, because several agents share a machine in tests.
            last = turns[-1][1] if turns else int.from_bytes(hashlib.sha256(os.fsencode(state)).digest()[:4], "big")
            known[run] = (last + 1) % user.uid_count
            scratch = path.with_suffix(".new")
            with open(scratch, "wb") as file:
                file.write(msgspec.json.encode([*turns, (run, known[run])][-KEPT_TURNS:]))
                file.flush()
                os.fsync(file.fileno())
            scratch.replace(path)
    return user.at_turn(known[run])


def end_processes(user: RankUser | None, *, seconds: float) -> str:
    """Kill every process of a job's user, or of a range of users, and wait for their end. Usually takes 50 ms.

    Return the processes that still exist after `seconds`, as text. For None, root or this process's own user, nothing
    is killed.
    """
    if user is None or user.uid == 0 or user.covers(os.getuid()):
        return ""
    # `kill(-1)` signals all processes of a uid together. A kill of each process in /proc would miss a process that
    # forks and exits repeatedly.
    words = [sys.executable, "-I", "-S", "-c", _END, str(NUMBER), str(user.uid), str(user.uid_count)]
    deadline = time.monotonic() + seconds
    while True:
        try:
            done = subprocess.run(
                words, cwd="/", env={}, capture_output=True, text=True, timeout=TRY_SECONDS, check=False
            )
        except (OSError, subprocess.SubprocessError) as error:
            problem = str(error)
        else:
            problem = done.stderr.strip() or f"exit code {done.returncode}" if done.returncode else ""
        left = _processes_of(user)
        if not left and not problem:
            return ""
        if time.monotonic() > deadline:
            return (
                f"processes of {user.name}: {', '.join(map(str, sorted(left)))}"
                if left
                else f"processes of {user.name}, perhaps: {problem}"
            )
        _killed.wait(_KILLED_CHECK_SECONDS)


def end_memory(user: RankUser) -> None:
    """Remove the System V shared memory, semaphores and queues of a job's user, which outlive processes."""
    libc = ctypes.CDLL(None)
    removals: dict[str, Callable[[int], object]] = {
        "shm": lambda number: libc.shmctl(number, 0, None),
        "sem": lambda number: libc.semctl(number, 0, 0),
        "msg": lambda number: libc.msgctl(number, 0, None),
    }
    for name, remove in removals.items():
        with contextlib.suppress(OSError):
            titles, *rows = (line.split() for line in Path("/proc/sysvipc", name).read_text().splitlines())
            for row in rows:
                if user.covers(int(row[titles.index("uid")])) or user.covers(int(row[titles.index("cuid")])):
                    remove(int(row[1]))


def become(user: RankUser) -> None:
    """Change this process to `user` permanently. Call it in a single thread, before any code of a job runs.

    Set-uid bits have no effect afterwards. The kernel refuses processes and threads of the user above `user.max_tasks`.
    Raises OSError if the kernel refuses. The caller must then end this process.
    """
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NPROC, (user.max_tasks, user.max_tasks))
    # Network cards and GPUs register memory.
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    os.setgroups(user.groups)
    os.setresgid(user.gid, user.gid, user.gid)
    os.setresuid(user.uid, user.uid, user.uid)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_NO_NEW_PRIVS)")
    # Let any process trace this one. On a kernel without the security module Yama, the call fails and has no effect.
    libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(-1), 0, 0, 0)


def allow_looks() -> None:
    """Allow processes of the same user to inspect this process through /proc, as CUDA and py-spy do.

    The caller must have removed secrets of the earlier user from memory.
    """
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)


def create_traversable_dir(folder: Path, user: RankUser | None) -> None:
    """Create a folder, and its parents, through which only `user` and this process's user can pass. Idempotent."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if user is not None:
        os.chown(folder, -1, user.gid)
        folder.chmod(0o710)


def make_own(folder: Path, user: RankUser | None) -> None:
    """Create a folder that belongs to `user`, inside a folder that only root can write. Idempotent."""
    folder.mkdir(mode=0o700, exist_ok=True)
    if user is not None:
        os.chown(folder, user.uid, user.gid, follow_symlinks=False)


def share(path: Path, user: RankUser | None) -> None:
    """Allow `user` to read and write a file or socket that root continues to own. Idempotent."""
    if user is not None:
        os.chown(path, -1, user.gid, follow_symlinks=False)
        path.chmod(0o660)


def give(folder: Path, user: RankUser) -> None:
    """Make `user` the owner of a file tree that root has created and no other process can have changed."""
    for at, _, files in folders_of(folder):
        os.chown(at, user.uid, user.gid)
        for name in files:
            os.chown(name, user.uid, user.gid, dir_fd=at, follow_symlinks=False)


def take(folder: Path) -> None:
    """Make root the owner of a tree that a job's programs have filled. All users can read the tree.

    The content is not trusted: no link is followed, and files have only the rights to read and execute afterwards.
    """
    for at, folders, files in folders_of(folder):
        os.fchown(at, 0, 0)
        os.fchmod(at, 0o755)
        for name in [*files, *folders]:
            os.chown(name, 0, 0, dir_fd=at, follow_symlinks=False)
        for name in files:
            # The entry may be a link, or a file that this process cannot open.
            with contextlib.suppress(OSError):
                descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)
                try:
                    os.fchmod(descriptor, 0o755 if os.fstat(descriptor).st_mode & 0o100 else 0o644)
                finally:
                    os.close(descriptor)


def clear(user: RankUser, folders: Iterable[Path] = COMMON) -> None:
    """Remove the shared memory of a job's user, and the user's files in world-writable folders, after its job.

    For root or this process's own user, nothing is removed. Sub-folders are not searched.
    """
    if user.uid == 0 or user.covers(os.getuid()):
        return
    end_memory(user)
    for folder in folders:
        with contextlib.suppress(OSError), os.scandir(folder) as found:
            for entry in list(found):
                with contextlib.suppress(FileNotFoundError):
                    if user.covers(entry.stat(follow_symlinks=False).st_uid):
                        remove_tree(Path(entry.path), ignore_errors=True)


def clear_own_memory(sockets: Path) -> None:
    """Remove the shared memory that ranks left on an instance of a local cluster, where they have the agent's user."""
    # If the folder is no mount, other programs of this user may use the same /dev/shm (`infra.local_cloud.own_memory`).
    if sockets.is_mount():
        end_memory(RankUser(os.getuid(), os.getgid()))
        for path in list(sockets.parent.iterdir()):
            if path != sockets:
                remove_tree(path, ignore_errors=True)


def closed_to(user: RankUser, paths: Iterable[Path]) -> str:
    """Return the given paths that `user` cannot use, as text, or this Python interpreter. Empty if none."""
    try:
        done = run_as(user, _CLOSED, *map(str, paths))
    except (OSError, subprocess.SubprocessError) as error:
        return f"{sys.executable} ({error})"
    return (
        done.stdout
        if done.returncode == 0
        else f"{sys.executable} ({(done.stderr.strip().splitlines() or ['it does not start'])[-1]})"
    )


def run_as(user: RankUser, code: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python code as `user` with the standard library only, and wait for its end. `words` are its `sys.argv[1:]`.

    Raises OSError if the program cannot be started, and SubprocessError if it has not ended after `TRY_SECONDS`.
    """
    command = [sys.executable, "-I", "-S", "-c", code, *words]
    return subprocess.run(
        command, cwd="/", env={}, capture_output=True, text=True, timeout=TRY_SECONDS, check=False, **user.options
    )


def _by_turns() -> RankUser:
    """Return a range of uids, one per job, with the groups of the user `everstep-ranks` if this user exists."""
    for uid in range(NUMBER, NUMBER + UID_COUNT + 1):
        if user_name_of(uid) not in (None, NAME):
            raise UserRefused(
                f"the uid {uid} belongs to {user_name_of(uid)} on this node, but jobs use the uids from {NUMBER} on: "
                "name another user"
            )
    named = find_user(NAME)
    group, groups = (NUMBER, ()) if named is None else (named.gid, named.groups)
    return RankUser(NUMBER + 1, group, groups, uid_count=UID_COUNT)


def _processes_of(user: RankUser) -> set[int]:
    """Return the pids of all processes of a job's user or of a range of users, without zombies."""
    found = set()
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, KeyError):
                lines = Path("/proc", name, "status").read_text(errors="replace").splitlines()
                facts = dict(line.split(":", 1) for line in lines if line.startswith(("State:", "Uid:", "Threads:")))
                # A process whose first thread has ended while other threads run looks like a zombie, but is included.
                if facts["State"].split()[0] in ("Z", "X") and int(facts["Threads"]) <= 1:
                    continue
                if any(user.covers(int(uid)) for uid in facts["Uid"].split()):
                    found.add(int(name))
    return found


def find_user(name: str) -> RankUser | None:
    """Return the user with this name, or None if this node has no such user."""
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        return None
    groups = tuple(sorted(set(os.getgrouplist(name, entry.pw_gid)) - {entry.pw_gid}))
    return RankUser(entry.pw_uid, entry.pw_gid, groups, name)


def _numbered(setting: str) -> RankUser | None:
    found = re.fullmatch(r"(\d{1,9})(?::(\d{1,9}))?", setting, re.ASCII)
    return None if found is None else RankUser(int(found[1]), int(found[2] or found[1]))


def user_name_of(uid: int) -> str | None:
    """Return the name of the user with this uid, or None if this node has no such user."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return None
