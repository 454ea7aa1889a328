"""The agent removes lock files that killed ranks left in torch's build folders. It keeps lock files in use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from torch.utils.file_baton import FileBaton

from worker.node.rank_user import RankUser
from worker.ranks import build_locks
from worker.ranks.build_locks import remove_stale

USER = RankUser(65534, 65534)


@pytest.fixture(params=["HOME", "XDG_CACHE_HOME", "TORCH_EXTENSIONS_DIR"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[dict[str, str], Path]:
    """Return a rank's environment, and the folder of one extension."""
    folder = (
        tmp_path
        / {"HOME": ".cache/torch_extensions/py311_cpu", "XDG_CACHE_HOME": "torch_extensions/py311_cpu"}.get(
            request.param, ""
        )
        / "cpu_adam"
    )
    folder.mkdir(parents=True)
    return {"HOME": str(tmp_path / "elsewhere"), request.param: str(tmp_path)}, folder


def test_a_lock_that_nobody_holds_is_removed(place: tuple[dict[str, str], Path]) -> None:
    environment, folder = place
    baton = FileBaton(str(folder / "lock"))
    assert baton.try_acquire()
    (folder / "cpu_adam.so").touch()
    remove_stale(environment, None)
    assert (folder / "lock").exists(), "its holder builds"
    assert baton.fd is not None
    os.close(baton.fd)  # close the file, as the kernel does when it ends a killed process
    remove_stale(environment, None)
    assert [path.name for path in folder.iterdir()] == ["cpu_adam.so"]


def test_a_lock_that_another_node_may_hold_is_let_be(
    place: tuple[dict[str, str], Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The agent keeps a lock file in a folder that several nodes share.

    It cannot see whether a process on another node uses the lock.
    """
    environment, folder = place
    (folder / "lock").touch()
    monkeypatch.setattr(build_locks, "file_system_of", lambda _: "nfs4")
    caplog.set_level("INFO", build_locks.__name__)
    remove_stale(environment, None)
    assert (folder / "lock").exists()
    assert "nfs4" in caplog.text


def test_a_lock_below_a_home_behind_a_link_is_removed(tmp_path: Path) -> None:
    build = tmp_path / "disk" / ".cache" / "torch_extensions" / "py311_cpu" / "fused_adam"
    build.mkdir(parents=True)
    (build / "lock").touch()
    (tmp_path / "home").symlink_to("disk")
    remove_stale({"HOME": str(tmp_path / "home")}, None)
    assert not (build / "lock").exists()


def test_a_file_system_is_known_by_its_name(tmp_path: Path) -> None:
    assert build_locks.file_system_of(Path("/proc/self")) == "proc"
    assert build_locks.file_system_of(tmp_path) in build_locks.OWN_FILE_SYSTEMS


def test_where_nothing_was_ever_built_nothing_happens(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for named in (str(tmp_path), "/" + 300 * "a", str(tmp_path / "loop"), "a\0b"):
        remove_stale({"HOME": named}, None)
        remove_stale({"XDG_CACHE_HOME": named}, None)
        remove_stale({"TORCH_EXTENSIONS_DIR": named}, None)
    remove_stale({}, None)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_nothing_is_removed_but_from_the_ranks_own_folders(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The agent removes locks only in folders that belong to the ranks' user.

    A rank could replace such a folder by a link to a folder of another user. The agent must not follow the link.
    """
    name, lock = str(tmp_path), tmp_path / "private/py311_cpu/cpu_adam/lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache/torch_extensions").symlink_to(tmp_path / "private")
    remove_stale({"HOME": name}, USER)
    remove_stale({"TORCH_EXTENSIONS_DIR": str(lock.parent.parent)}, USER)
    assert lock.exists()
    assert caplog.text.count("cannot be removed") == 2
    os.chown(lock.parent, USER.uid, USER.gid)
    remove_stale({"HOME": name}, USER)
    assert lock.exists(), "by way of a link"
    remove_stale({"TORCH_EXTENSIONS_DIR": str(lock.parent.parent)}, USER)
    assert not lock.exists()
