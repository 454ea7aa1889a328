"""Manages one cgroup per generation, to kill all processes of the generation's ranks and to prove their end.

    <own cgroup>/everstep-<uid>-<node>/<run>.<generation>

cgroup v2 is used if it is mounted and writable (root, or `Delegate=yes` in a systemd unit), otherwise the freezer of
cgroup v1. Limits need cgroup v2 with the controllers `memory` and `pids`. Invariant: this module kills processes only
in cgroups of ranks that it has created, and removes no other cgroups.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from everstep.protocol.ids import Generation, RunId

_SWAP = "memory.swap.max"
_JOIN_ATTEMPTS = 3
"""Maximum attempts to join a cgroup. Another process may remove the cgroup while it is still empty."""


@dataclass(frozen=True, slots=True)
class JobLimits:
    """Limits for all ranks of a job on this node together; None leaves the node's own limits."""

    memory_bytes: int | None = None
    """Maximum bytes of the ranks' memory and of the files that they fill in memory."""
    task_count: int | None = None

    def files(self) -> dict[str, dict[str, str]]:
        """Return the content of the files that set the limits, by controller and file name."""
        memory = {"memory.max": str(self.memory_bytes), _SWAP: "0"}
        tasks = {"pids.max": str(self.task_count)}
        return {
            **({} if self.memory_bytes is None else {"memory": memory}),
            **({} if self.task_count is None else {"pids": tasks}),
        }


NO_LIMITS = JobLimits()


def write_existing(path: Path, content: str) -> None:
    """Write to a file of the kernel that must exist already."""
    with open(os.open(path, os.O_WRONLY), "w") as file:
        file.write(content)


class RankCgroups:
    """The cgroups of one node's ranks, below `folder`. Tests replace `write`."""

    def __init__(self, folder: Path, write: Callable[[Path, str], None] = write_existing) -> None:
        self.folder = folder
        self._write = write
        self._files: dict[str, str] = {}

    def impose(self, limits: JobLimits) -> str:
        """Limit later cgroups, and return why the kernel cannot. The process itself may move to another cgroup."""
        wanted, parent = limits.files(), self.folder.parent
        if not wanted:
            return ""
        try:
            missing = wanted.keys() - set((parent / "cgroup.controllers").read_text().split())
            if missing:
                return f"{parent} has no controller {' and '.join(sorted(missing))}"
            words = " ".join(f"+{controller}" for controller in wanted)
            try:
                self._write(parent / "cgroup.subtree_control", words)
            except OSError as error:
                if error.errno != errno.EBUSY:
                    raise
                self._leave(parent)
                self._write(parent / "cgroup.subtree_control", words)
            self._write(self.folder / "cgroup.subtree_control", words)
        except FileNotFoundError:
            return "only cgroup v2 can limit ranks, and it is not available here"
        except OSError as error:
            if error.errno == errno.EBUSY:
                return f"{parent} contains processes besides the shim: run ranks in a slice (--ranks-slice)"
            return f"{error.filename or parent}: {error.strerror}"
        self._files = {
            name: content
            for files in wanted.values()
            for name, content in files.items()
            if name != _SWAP or (self.folder / name).exists()  # The file is missing if the kernel does not limit swap.
        }
        return ""

    def _leave(self, parent: Path) -> None:
        """Move the shim out of the parent: a cgroup that passes controllers on must contain no process."""
        own = parent / f"{self.folder.name}-shim"
        own.mkdir(exist_ok=True)
        self._write(own / "cgroup.procs", str(os.getpid()))

    def join(self, run: RunId, generation: Generation, pid: int) -> str:
        """Move a process without children into the cgroup of its generation, and return its path. Raises OSError."""
        path = self.folder / f"{run}.{generation}"
        for attempt in range(_JOIN_ATTEMPTS):
            path.mkdir(parents=True, exist_ok=True)
            try:
                for name, content in self._files.items():
                    self._write(path / name, content)
                self._write(path / "cgroup.procs", str(pid))
            except FileNotFoundError:
                if attempt == _JOIN_ATTEMPTS - 1:
                    raise
            else:
                break
        return str(path)

    def close(self) -> None:
        """Remove all empty cgroups of this node's generations, and then the node's cgroup folder if it is empty."""
        with contextlib.suppress(FileNotFoundError):
            for child in self.folder.iterdir():
                if child.is_dir():
                    remove(str(child))
        remove(str(self.folder))


def find(name: str, proc: Path = Path("/proc")) -> tuple[RankCgroups | None, str]:
    """Return (cgroups below a folder `name` that this process can use or None, its path or the reason for None)."""
    refusals = []
    for version, parent in own_cgroups(proc):
        folder = parent / name
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            refusals.append(f"cgroup v{version}: {error.strerror}")
            continue
        if os.access(folder / "cgroup.procs", os.W_OK):
            return RankCgroups(folder), str(folder)
        remove(str(folder))
        refusals.append(f"cgroup v{version}: {folder}/cgroup.procs cannot be written")
    return None, "; ".join(refusals) or "no cgroup is mounted here"


def pids(path: str) -> set[int]:
    """Return the pids in a cgroup, without zombies; empty if the cgroup was removed."""
    try:
        return {int(line) for line in Path(path, "cgroup.procs").read_text().split()}
    except (FileNotFoundError, OSError) as error:
        # The cgroup was removed during the read.
        if isinstance(error, FileNotFoundError) or error.errno == errno.ENODEV:
            return set()
        raise


def kill(path: str) -> None:
    """Send SIGKILL to all processes in a cgroup, without a wait. Repeat the call until `pids` is empty."""
    folder = Path(path)
    try:
        (folder / "cgroup.kill").write_text("1") if (folder / "cgroup.kill").exists() else _kill_frozen(folder)
    except FileNotFoundError:
        return  # The cgroup was removed. The kernel removes only empty cgroups, so no process is left.
    except OSError as error:
        if error.errno != errno.ENODEV:
            raise


def remove(path: str) -> bool:
    """Remove a cgroup if it is empty. Return whether the cgroup no longer exists."""
    try:
        os.rmdir(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _kill_frozen(folder: Path) -> None:
    """Kill all processes of a cgroup on cgroup v1 and on kernels before 5.14. A freezer prevents forks meanwhile."""
    state = folder / "freezer.state"
    freezes = state.exists()
    if freezes:
        state.write_text("FROZEN")
    try:
        for pid in pids(str(folder)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    finally:
        if freezes:
            state.write_text("THAWED")


def own_cgroups(proc: Path) -> list[tuple[int, Path]]:
    """Return this process's cgroups that can have children, as (version, path): v2 before v1's freezer."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
        mounts = [line.split() for line in (proc / "self" / "mounts").read_text().splitlines()]
    except FileNotFoundError:
        return []
    own = {controllers: path for _, controllers, path in (line.split(":", 2) for line in lines)}
    unified = next((Path(fields[1]) for fields in mounts if fields[2] == "cgroup2"), None)
    freezer = next(
        (Path(fields[1]) for fields in mounts if fields[2] == "cgroup" and "freezer" in fields[3].split(",")), None
    )
    found = [(2, unified, own.get("")), (1, freezer, own.get("freezer"))]
    # A path with ".." is a cgroup outside this cgroup namespace.
    return [
        (version, mount / path.lstrip("/"))
        for version, mount, path in found
        if mount is not None and path is not None and ".." not in path
    ]
