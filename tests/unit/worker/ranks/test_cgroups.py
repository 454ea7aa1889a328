"""Tests where an agent may create cgroups for ranks, and how it ends all processes of a cgroup.

The tests use real cgroups if this machine permits it.
"""

from __future__ import annotations

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
