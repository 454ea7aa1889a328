"""Cgroups for ranks: one per generation, so that whatever a rank has started, in whichever session, can be ended and proven gone.

    <own cgroup>/everstep-<uid>-<node>/<run>.<generation>

A child may leave its parent, its session and its process group; it leaves its cgroup only by being written into
another. cgroup v2 is used where it is mounted and may be written to (root, or `Delegate=yes` in a systemd unit), else
the freezer of cgroup v1. No controller is asked for: what ranks may use is not limited here, and memory counts where it
counted before.

Invariant: only folders that this module has made are killed or removed, and the caller is in none of them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from pathlib import Path

from everstep.protocol.ids import Generation, RunId

_JOIN_ATTEMPTS = 3
"""Somebody may tidy up an empty cgroup between its making and its first member."""


class RankCgroups:
    """Where one node's ranks are kept.

    Made by the shim; the agent reaches the cgroups by the paths in the ranks' records.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def join(self, run: RunId, generation: Generation, pid: int) -> str:
        """Put a process that has no children yet into its generation's cgroup.

        Args:
            run: of the rank.
            generation: of the rank.
            pid: the rank, still at its gate.

        Returns:
            The cgroup's path.

        Raises:
            OSError: the kernel refuses.
        """
        path = self.folder / f"{run}.{generation}"
        for attempt in range(_JOIN_ATTEMPTS):
            path.mkdir(parents=True, exist_ok=True)
            try:
                (path / "cgroup.procs").write_text(str(pid))
            except FileNotFoundError:
                if attempt == _JOIN_ATTEMPTS - 1:
                    raise
            else:
                break
        return str(path)

    def close(self) -> None:
        """Remove what is empty: all of it, once every rank is gone."""
        with contextlib.suppress(FileNotFoundError):
            for child in self.folder.iterdir():
                if child.is_dir():
                    remove(str(child))
        remove(str(self.folder))


def find(name: str, proc: Path = Path("/proc")) -> tuple[RankCgroups | None, str]:
    """Find where this process may keep cgroups of its own.

    Args:
        name: of the node's folder; no other node on this machine has it.
        proc: where procfs is mounted.

    Returns:
        (the place, or None; where it is, or why there is none, for the log).
    """
    refusals = []
    for version, parent in _own_cgroups(proc):
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
    """Return the processes in a cgroup; none when it has been removed.

    A process that waits to be reaped is not listed.
    """
    try:
        return {int(line) for line in Path(path, "cgroup.procs").read_text().split()}
    except (FileNotFoundError, OSError) as error:
        if isinstance(error, FileNotFoundError) or error.errno == errno.ENODEV:  # removed while it was read
            return set()
        raise


def kill(path: str) -> None:
    """Kill all that is in a cgroup.

    Returns at once: who needs proof looks at `pids` until there are none, and kills again meanwhile.
    """
    folder = Path(path)
    try:
        (folder / "cgroup.kill").write_text("1") if (folder / "cgroup.kill").exists() else _kill_frozen(folder)
    except FileNotFoundError:
        return  # removed: nothing is left to kill
    except OSError as error:
        if error.errno != errno.ENODEV:
            raise


def remove(path: str) -> bool:
    """Remove a cgroup if nothing is in it; say whether it is gone."""
    try:
        os.rmdir(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _kill_frozen(folder: Path) -> None:
    """Kill on v1, and on kernels before 5.14: what is frozen cannot fork away meanwhile, and dies when it thaws."""
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


def _own_cgroups(proc: Path) -> list[tuple[int, Path]]:
    """Return this process's own cgroups that could have children: v2, then v1's freezer."""
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
    # ".." in a path: the process's own cgroup lies outside of what this namespace shows.
    return [
        (version, mount / path.lstrip("/"))
        for version, mount, path in found
        if mount is not None and path is not None and ".." not in path
    ]
