"""A new control-plane process takes over from a dead process with the same state directory.

The tests use real processes and the kernel's locks.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from control_plane.replica import ServerReplica, is_predecessor

HOLDER = """
import sys
from pathlib import Path
from control_plane.replica import ServerReplica
with ServerReplica(Path(sys.argv[1])) as replica:
    print(replica.owner, flush=True)
    sys.stdin.read()
"""


def living(directory: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def owner_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_who_was_killed_is_succeeded_in_its_place(tmp_path):
    with living(tmp_path) as first:
        dead = owner_of(first)
        first.kill()
        first.wait()
    with ServerReplica(tmp_path) as successor:
        assert is_predecessor(successor.owner, dead)
        assert not is_predecessor(dead, dead)


def test_who_lives_keeps_its_place(tmp_path):
    with living(tmp_path) as first:
        try:
            with ServerReplica(tmp_path) as second:
                assert not is_predecessor(second.owner, owner_of(first))
        finally:
            first.kill()


def test_a_copy_of_the_state_directory_is_another_place(tmp_path):
    (tmp_path / "a").mkdir()
    with ServerReplica(tmp_path / "a") as original:
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        with ServerReplica(tmp_path / "b") as copy:
            assert not is_predecessor(copy.owner, original.owner)


def test_a_closed_replica_is_succeeded_by_the_next(tmp_path):
    with ServerReplica(tmp_path) as first:
        pass
    with ServerReplica(tmp_path) as second:
        assert is_predecessor(second.owner, first.owner)
        with ServerReplica(tmp_path) as beside:
            assert not is_predecessor(beside.owner, first.owner)
