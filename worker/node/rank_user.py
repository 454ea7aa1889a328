"""The users that ranks run as, where the agent is root: what of the agent's folders is open to them, and how a process becomes one.

By default each job on a node has a user of its own: `user_of` gives the jobs of a node the uids of a range by turns,
and they share a group. So no process of one job may read the environment, the memory or the files of another's.
`end_processes` ends all that is left of a job's user.

    <state>/rank_users     which job has which turn, newest last
    <state>, <slots>       root:ranks 0710     a way through that cannot be listed; what is the agent's own has mode 0600 or 0700 as ever
    source, inputs, packages                   root's, readable: nothing of a job can change them
    slots, page, socket    root:ranks 0660     of this node's ranks alone; who may write into a file cannot replace it
    outputs, home          ranks' own

A process that has become this user has no capability, and none of its children gets one by whatever it runs
(no_new_privs).

Invariant: no code of a job runs before `become` has returned; where it fails the process ends.
Source: capabilities(7), `Effect of user ID changes`; prctl(2); Yama, Documentation/admin-guide/LSM/Yama.rst.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import pwd
import re
import resource
import shutil
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
from worker.errors import UserRefused

NAME: Final = "everstep-ranks"
NUMBER: Final = 61_100
"""Gid where there is no user of that name, and the uid that signals processes of jobs; no program of a job ever has it.

Source: systemd, UIDS-GIDS: the numbers from 60,578 to 61,183 are neither people's nor dynamic.
"""
UID_COUNT: Final = 63
"""Uids after `NUMBER` that the jobs of a node have by turns."""
KEPT_TURNS: Final = 8
"""Jobs whose turn is kept: of those before, nothing is on this node."""
COMMON: Final = (Path("/tmp"), Path("/var/tmp"), Path("/dev/shm"), Path("/dev/mqueue"))
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
"""As each user it may signal that user's processes alone. Real and saved uid are others', so they cannot signal it.

Source: kill(2).
"""
TURNS: Final = "rank_users"
_LOOK_SECONDS = 0.02
_taking_turns = threading.Lock()
_killed = threading.Event()
"""Never set: to wait for what was killed, which gives no sign."""
_turns = msgspec.json.Decoder(list[tuple[str, int]])


@dataclass(frozen=True, slots=True)
class RankUser:
    """A user without rights of its own, or several users that jobs have by turns."""

    uid: int
    gid: int
    groups: tuple[int, ...] = ()
    """Supplementary ones: of devices, for instance."""
    name: str = NAME
    uid_count: int = 1
    """The uids from `uid` on that jobs have by turns; 1: all jobs have this user."""

    def covers(self, uid: int) -> bool:
        """Say whether this uid is one of these users'."""
        return self.uid <= uid < self.uid + self.uid_count

    def at_turn(self, turn: int) -> RankUser:
        """Return the user of one turn."""
        return replace(self, uid=self.uid + turn % self.uid_count, uid_count=1)

    def identity(self, home: Path) -> dict[str, str]:
        """Return what tells programs who they are; a user without an entry in passwd has no other way to be known."""
        return {"HOME": str(home), "USER": self.name, "LOGNAME": self.name}

    @property
    def options(self) -> dict[str, Any]:
        """What `subprocess` starts a program as this user with."""
        return {"user": self.uid, "group": self.gid, "extra_groups": self.groups}


def choose(setting: str | None, own_uid: int) -> RankUser | None:
    """Choose the user of a node's ranks.

    Args:
        setting: a name, `uid` or `uid:gid`: all jobs have that user. None: each job has a uid of its own, and the
            groups of `everstep-ranks` where there is such a user.
        own_uid: the agent's.

    Returns:
        The user or users, or None where ranks run as the agent's: because that was said, or because only root can
        become somebody else.

    Raises:
        UserRefused: there is no such user, or the agent may not become it, or it is as good as root.
    """
    if setting is not None and setting in (str(own_uid), _name_of(own_uid)):
        return None
    if own_uid != 0:
        if setting is None:
            return None
        raise UserRefused(f"only root can run ranks as {setting}; this agent has the uid {own_uid}")
    found = _by_turns() if setting is None else _numbered(setting) or _named(setting)
    if found is None:
        raise UserRefused(f"there is no user {setting}")
    if 0 in (found.uid, found.gid, *found.groups):
        raise UserRefused(f"{setting} is root, or in root's group")
    return found


def user_of(run: RunId, state: Path, user: RankUser | None) -> RankUser | None:
    """Return the user that the ranks of a run have on this node: the same at every call, also after a restart of the agent.

    A run that has no turn yet gets the next one, on disk before this returns. In any thread.

    Args:
        run: of the ranks.
        state: the agent's directory.
        user: the users of this node's ranks.

    Returns:
        Its user; None where ranks run as the agent's.

    Raises:
        OSError: the disk does not take a new turn.
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
            # Agents that share a machine, as in tests, begin apart.
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
    """End every process of these users. Blocks for some 50 ms.

    `kill(-1)` reaches all processes of a uid at once, and the kernel lets none of them fork after that. A list of /proc
    is not enough: it misses a process that forks and ends, over and over. A process of the job cannot signal the helper
    that sends the signals.

    Args:
        user: whose; never root's, nor this process's own. None: nobody.
        seconds: to wait until they are gone.

    Returns:
        What is still there; empty when nothing is.
    """
    if user is None or user.uid == 0 or user.covers(os.getuid()):
        return ""
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
        _killed.wait(_LOOK_SECONDS)


def end_memory(user: RankUser) -> None:
    """Remove the System V shared memory, semaphores and queues of these users: they outlive the processes that made them."""
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
    """Become this user, for good. In a single thread, before anything of a job runs.

    Locked memory stays unlimited, as it was for root: network cards and GPUs register what they read and write. Set-uid
    bits do nothing from now on. Yama, where it is, lets processes of the same user look at each other: py-spy beside a
    rank is one.

    Args:
        user: who.

    Raises:
        OSError: the kernel refuses; this process must not go on.
    """
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    os.setgroups(user.groups)
    os.setresgid(user.gid, user.gid, user.gid)
    os.setresuid(user.uid, user.uid, user.uid)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_NO_NEW_PRIVS)")
    libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(-1), 0, 0, 0)  # an error where there is no Yama


def allow_looks() -> None:
    """Let processes of the same user look into this one: itself through /proc, as CUDA does, and py-spy.

    The kernel keeps everybody out of a process that has changed its user and runs on, for it may know what its new user
    must not. Called when nothing of the kind is left in it.
    """
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)


def make_way(folder: Path, user: RankUser | None) -> None:
    """Make a folder that this user can go through, and neither list nor write to; without a user, this process's user alone. Idempotent.

    Args:
        folder: its parents are made, too.
        user: of the ranks.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if user is not None:
        os.chown(folder, -1, user.gid)
        folder.chmod(0o710)


def make_own(folder: Path, user: RankUser | None) -> None:
    """Make a folder that is this user's alone; its parent is nobody's to write to but root's. Idempotent."""
    folder.mkdir(mode=0o700, exist_ok=True)
    if user is not None:
        os.chown(folder, user.uid, user.gid, follow_symlinks=False)


def share(path: Path, user: RankUser | None) -> None:
    """Let this user read and write a file or a socket that stays root's. Idempotent."""
    if user is not None:
        os.chown(path, -1, user.gid, follow_symlinks=False)
        path.chmod(0o660)


def give(folder: Path, user: RankUser) -> None:
    """Make a tree that root has made, and nobody else has touched, this user's."""
    for _, _, files, at in os.fwalk(folder):
        os.chown(at, user.uid, user.gid)
        for name in files:
            os.chown(name, user.uid, user.gid, dir_fd=at, follow_symlinks=False)
    # fwalk names links to folders with the folders: they are read through, not owned


def take(folder: Path) -> None:
    """Make a tree that this user's programs have filled root's again, readable by all and writable by nobody else.

    What they have left is not trusted: no link is followed, and no right but reading and running is left on a file.
    """
    for _, folders, files, at in os.fwalk(folder):
        os.fchown(at, 0, 0)
        os.fchmod(at, 0o755)
        for name in [*files, *folders]:
            os.chown(name, 0, 0, dir_fd=at, follow_symlinks=False)
        for name in files:
            with contextlib.suppress(OSError):  # a link, or what cannot be opened
                descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)
                try:
                    os.fchmod(descriptor, 0o755 if os.fstat(descriptor).st_mode & 0o100 else 0o644)
                finally:
                    os.close(descriptor)


def clear(user: RankUser, folders: Iterable[Path] = COMMON) -> None:
    """Remove what these users' programs have left where everybody may write, and what they share in memory: the next job would find it.

    Args:
        user: whose; never root's, nor this process's own.
        folders: to look in.
    """
    if user.uid == 0 or user.covers(os.getuid()):
        return
    end_memory(user)
    for folder in folders:
        with contextlib.suppress(OSError), os.scandir(folder) as found:
            for entry in [each for each in found if user.covers(each.stat(follow_symlinks=False).st_uid)]:
                with contextlib.suppress(OSError):
                    shutil.rmtree(entry.path) if entry.is_dir(follow_symlinks=False) else os.unlink(entry.path)


def closed_to(user: RankUser, paths: Iterable[Path]) -> str:
    """Try as this user whether it can use this Python and reach some paths.

    Args:
        user: who.
        paths: folders to go through, files to read.

    Returns:
        What it cannot; empty when it can.
    """
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
    """Run a few lines of Python as this user, with nothing but the standard library, and wait for the end.

    Args:
        user: who.
        code: Python.
        *words: its arguments.

    Returns:
        How it ended, and what it said.

    Raises:
        OSError: it cannot be run.
        SubprocessError: it has not ended after `TRY_SECONDS`.
    """
    command = [sys.executable, "-I", "-S", "-c", code, *words]
    return subprocess.run(
        command, cwd="/", env={}, capture_output=True, text=True, timeout=TRY_SECONDS, check=False, **user.options
    )


def _by_turns() -> RankUser:
    """Return the users that jobs have by turns, in the groups of the node's own user for ranks, where there is one."""
    for uid in range(NUMBER, NUMBER + UID_COUNT + 1):
        if _name_of(uid) not in (None, NAME):
            raise UserRefused(
                f"the uid {uid} is that of {_name_of(uid)} here, and jobs have those from {NUMBER} on by turns: "
                "name another user"
            )
    named = _named(NAME)
    group, groups = (NUMBER, ()) if named is None else (named.gid, named.groups)
    return RankUser(NUMBER + 1, group, groups, uid_count=UID_COUNT)


def _processes_of(user: RankUser) -> set[int]:
    """Return the pids of these users' processes, as far as a list of /proc has them.

    A process that waits to be reaped runs no more, and is not among them. One whose first thread alone has ended looks
    alike, and is.
    """
    found = set()
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, KeyError):
                lines = Path("/proc", name, "status").read_text(errors="replace").splitlines()
                facts = dict(line.split(":", 1) for line in lines if line.startswith(("State:", "Uid:", "Threads:")))
                if facts["State"].split()[0] in ("Z", "X") and int(facts["Threads"]) <= 1:
                    continue
                if any(user.covers(int(uid)) for uid in facts["Uid"].split()):
                    found.add(int(name))
    return found


def _named(name: str) -> RankUser | None:
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        return None
    groups = tuple(sorted(set(os.getgrouplist(name, entry.pw_gid)) - {entry.pw_gid}))
    return RankUser(entry.pw_uid, entry.pw_gid, groups, name)


def _numbered(setting: str) -> RankUser | None:
    found = re.fullmatch(r"(\d{1,9})(?::(\d{1,9}))?", setting, re.ASCII)
    return None if found is None else RankUser(int(found[1]), int(found[2] or found[1]))


def _name_of(uid: int) -> str | None:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return None
