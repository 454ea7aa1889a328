"""Tests where an agent may create cgroups for ranks, and how it ends all processes of a cgroup.

The tests use real cgroups if this machine permits it.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.protocol.ids import Generation, RunId
from worker.ranks.shim import cgroups

RUN = RunId("run1")


def proc(tmp_path: Path, cgroup: str, mounts: str) -> Path:
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text(cgroup)
    (tmp_path / "self" / "mounts").write_text(mounts)
    return tmp_path


def mounted(tmp_path: Path, *names: str) -> Path:
    for name in names:
        (tmp_path / name).mkdir()
    return tmp_path


def test_v2_is_asked_before_v1_and_the_path_is_ones_own(tmp_path: Path) -> None:
    mounts = f"cgroup {tmp_path}/freezer cgroup rw,freezer 0 0\ncgroup2 {tmp_path}/unified cgroup2 rw 0 0\n"
    found = cgroups.own_cgroups(proc(tmp_path, "6:freezer:/b\n4:memory:/c\n0::/a/unit\n", mounts))
    assert found == [(2, tmp_path / "unified/a/unit"), (1, tmp_path / "freezer/b")]


def test_a_cgroup_outside_of_the_namespace_is_not_used(tmp_path: Path) -> None:
    assert cgroups.own_cgroups(proc(tmp_path, "0::/../other\n", f"cgroup2 {tmp_path} cgroup2 rw 0 0\n")) == []


def test_what_cannot_be_made_is_said_and_left_alone(tmp_path: Path) -> None:
    made = proc(
        tmp_path,
        "0::/\n6:freezer:/none\n",
        f"cgroup2 {tmp_path} cgroup2 rw 0 0\ncgroup {tmp_path} cgroup rw,freezer 0 0\n",
    )
    found, words = cgroups.find("node", made)
    assert found is None
    assert words == f"cgroup v2: {tmp_path}/node/cgroup.procs cannot be written; cgroup v1: No such file or directory"
    assert not (tmp_path / "node").exists()


def test_without_cgroups_nothing_is_found(tmp_path: Path) -> None:
    assert cgroups.find("node", tmp_path) == (None, "no cgroup is mounted here")


class Kernel:
    """A fake of a cgroup v2 in a folder. It follows the rules of the kernel on which the agent depends."""

    def __init__(self, folder: Path, controllers: str = "cpu memory pids", other: str = "") -> None:
        self.parent = folder / "scope"
        self.node = self.parent / "node"
        self.node.mkdir(parents=True)
        self._create(self.parent)
        self._create(self.node)
        (self.parent / "cgroup.controllers").write_text(controllers)
        (self.parent / "cgroup.procs").write_text(f"{os.getpid()} {other}")

    @staticmethod
    def _create(folder: Path) -> None:
        for name in ("cgroup.procs", "cgroup.subtree_control"):
            (folder / name).touch()

    def write(self, path: Path, content: str) -> None:
        parent = path.parent
        if path.name == "cgroup.subtree_control" and (parent / "cgroup.procs").read_text().split():
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))
        if path.name == "cgroup.procs":
            left = set((self.parent / "cgroup.procs").read_text().split()) - {content}
            (self.parent / "cgroup.procs").write_text(" ".join(left))
        path.write_text(content)

    def make_cgroup(self, name: str, files: tuple[str, ...] = ("memory.max", "memory.swap.max", "pids.max")) -> Path:
        """Create a cgroup as the kernel does, with the files of its parent's controllers."""
        folder = self.node / name
        folder.mkdir(exist_ok=True)
        for file in (*files, "cgroup.procs"):
            (folder / file).touch()
        return folder


LIMITS = cgroups.JobLimits(memory_bytes=1 << 30, task_count=500)


def test_each_generation_has_the_limits_and_the_shim_is_in_none_of_their_cgroups(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path)
    (kernel.node / "memory.swap.max").touch()
    made = cgroups.RankCgroups(kernel.node, kernel.write)
    assert made.impose(LIMITS) == ""
    assert (kernel.parent / "node-shim" / "cgroup.procs").read_text() == str(os.getpid())
    for folder in (kernel.parent, kernel.node):
        assert (folder / "cgroup.subtree_control").read_text() == "+memory +pids"
    folder = kernel.make_cgroup("run1.3")
    made.join(RUN, Generation(3), 77)
    found = {name: (folder / name).read_text() for name in ("memory.max", "memory.swap.max", "pids.max")}
    assert found == {"memory.max": str(1 << 30), "memory.swap.max": "0", "pids.max": "500"}
    assert (folder / "cgroup.procs").read_text() == "77"


def test_a_kernel_without_accounting_of_swap_limits_the_rest(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path)
    made = cgroups.RankCgroups(kernel.node, kernel.write)
    assert made.impose(LIMITS) == ""
    folder = kernel.make_cgroup("run1.1", ("memory.max", "pids.max"))
    made.join(RUN, Generation(1), 77)
    assert sorted(path.name for path in folder.iterdir()) == ["cgroup.procs", "memory.max", "pids.max"]


def test_limits_that_cannot_apply_are_refused_with_the_reason(tmp_path: Path) -> None:
    without = Kernel(tmp_path / "without", controllers="cpu pids")
    assert cgroups.RankCgroups(without.node).impose(LIMITS) == f"{without.parent} has no controller memory"
    busy = Kernel(tmp_path / "busy", other="4711")
    reason = f"{busy.parent} contains processes besides the shim: run ranks in a slice (--ranks-slice)"
    assert cgroups.RankCgroups(busy.node, busy.write).impose(LIMITS) == reason
    (tmp_path / "v1" / "node").mkdir(parents=True)
    reason = "only cgroup v2 can limit ranks, and it is not available here"
    assert cgroups.RankCgroups(tmp_path / "v1" / "node").impose(LIMITS) == reason


def test_without_limits_nothing_is_changed(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path)
    assert cgroups.RankCgroups(kernel.node, kernel.write).impose(cgroups.JobLimits()) == ""
    assert (kernel.parent / "cgroup.procs").read_text().split() == [str(os.getpid())]
    folder = kernel.make_cgroup("run1.1")
    cgroups.RankCgroups(kernel.node, kernel.write).join(RUN, Generation(1), 77)
    assert (folder / "memory.max").read_text() == ""


@pytest.fixture(params=[2, 1], ids=["v2", "v1"])
def place(request: pytest.FixtureRequest) -> Iterator[cgroups.RankCgroups]:
    parent = dict(cgroups.own_cgroups(Path("/proc"))).get(request.param)
    if parent is None or not os.access(parent, os.W_OK):
        pytest.skip(f"cgroup v{request.param} cannot be written here")
    made = cgroups.RankCgroups(parent / f"everstep-test-{os.getpid()}")
    yield made
    made.close()
    assert not made.folder.exists()


@pytest.mark.integration
def test_whoever_was_started_in_a_cgroup_is_killed_with_it(place: cgroups.RankCgroups) -> None:
    """A kill of the cgroup also ends a child in another session and a stopped process."""
    script = (
        "import os\nif os.fork() == 0: os.setsid()\nos.write(1, b'%d\\n' % os.getpid())\nimport signal; signal.pause()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", f"input()\n{script}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as rank:
        path = place.join(RUN, Generation(3), rank.pid)
        assert rank.stdin is not None
        assert rank.stdout is not None
        rank.stdin.write("\n")
        rank.stdin.flush()
        living = {int(rank.stdout.readline()), int(rank.stdout.readline())}
        assert cgroups.pids(path) == living
        assert not cgroups.remove(path), "what lives is not removed"
        os.kill(rank.pid, signal.SIGSTOP)
        while cgroups.pids(path):
            cgroups.kill(path)
        assert cgroups.remove(path)
    assert rank.returncode == -signal.SIGKILL
    assert cgroups.pids(path) == set()
    cgroups.kill(path)  # kill again: a removed cgroup has no process to kill


@pytest.mark.integration
def test_a_cgroup_that_somebody_tidied_up_is_made_again(place: cgroups.RankCgroups) -> None:
    with subprocess.Popen(["sleep", "60"]) as rank:
        path = place.join(RUN, Generation(1), rank.pid)
        os.kill(rank.pid, signal.SIGKILL)
        rank.wait()
    assert cgroups.remove(path)
    with subprocess.Popen(["sleep", "60"]) as rank:
        assert place.join(RUN, Generation(1), rank.pid) == path
        assert cgroups.pids(path) == {rank.pid}
        os.kill(rank.pid, signal.SIGKILL)


@pytest.mark.integration
def test_the_kernel_enforces_the_limit_of_processes() -> None:
    """The test runs in a process of its own, because `impose` moves its process to another cgroup."""
    parent = dict(cgroups.own_cgroups(Path("/proc"))).get(2)
    controllers = parent / "cgroup.controllers" if parent is not None else None
    if controllers is None or "pids" not in controllers.read_text().split() or not os.access(controllers, os.W_OK):
        pytest.skip("this machine's cgroup v2 has no controller pids that this process may use")
    script = """
import os, subprocess, sys
from pathlib import Path
from worker.ranks.shim import cgroups
parent = dict(cgroups.own_cgroups(Path("/proc")))[2]
made = cgroups.RankCgroups(parent / f"everstep-test-{os.getpid()}")
made.folder.mkdir()
print(made.impose(cgroups.JobLimits(task_count=5)), flush=True)
rank = subprocess.Popen([sys.executable, "-c", "import os; input(); [os.fork() for _ in range(3)]"], stdin=-1, stderr=-1)
path = made.join("run", 1, rank.pid)
print(b"BlockingIOError" in rank.communicate(b"\\n")[1], flush=True)
while cgroups.pids(path):
    cgroups.kill(path)
made.close()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    reason, is_refused = done.stdout.splitlines()
    if reason:
        pytest.skip(reason)
    assert is_refused == "True"
