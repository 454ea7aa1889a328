import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from worker.node.unix_socket import listen_private, make_socket_folder


@pytest.fixture
def open_umask() -> Iterator[int]:
    mask = 0o002  # with this umask, the kernel would let the group write to a new socket file
    before = os.umask(mask)
    yield mask
    os.umask(before)


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_only_its_owner_may_open_it_whatever_the_umask(tmp_path: Path, open_umask: int) -> None:
    with listen_private(tmp_path / "a"):
        mode = (tmp_path / "a").stat().st_mode
        assert stat.S_ISSOCK(mode)
        assert stat.S_IMODE(mode) == 0o600
    assert current_umask() == open_umask


def test_a_path_longer_than_an_address_and_one_that_was_left(tmp_path: Path) -> None:
    directory = tmp_path / ("d" * 120)
    directory.mkdir()
    path = directory / "socket"
    listen_private(path).close()
    assert path.exists()
    with listen_private(path) as listener, socket.socket(socket.AF_UNIX) as caller:
        caller.setblocking(False)
        handle = os.open(directory, os.O_PATH)
        try:
            caller.connect(f"/proc/self/fd/{handle}/socket")
        finally:
            os.close(handle)
        accepted, _ = listener.accept()
        accepted.close()


def test_a_directory_that_is_not_there_leaves_nothing_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError):
        listen_private(tmp_path / "none" / "socket")
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.security
@pytest.mark.parametrize("mode", [0o777, 0o720])
def test_a_folder_that_others_may_write_to_is_not_adopted(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "node"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(PermissionError, match="trusts its own folder alone"):
        make_socket_folder(folder)


@pytest.mark.security
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_of_another_user_is_not_adopted(tmp_path: Path) -> None:
    folder = tmp_path / "node"
    folder.mkdir(mode=0o700)
    os.chown(folder, 61_260, 61_260)
    with pytest.raises(PermissionError, match="it is of uid 61260"):
        make_socket_folder(folder)


@pytest.mark.security
def test_a_link_is_not_adopted(tmp_path: Path) -> None:
    folder = tmp_path / "node"
    folder.symlink_to(tmp_path)
    with pytest.raises(NotADirectoryError):
        make_socket_folder(folder)


def test_a_folder_is_made_once_and_for_its_owner_alone(tmp_path: Path) -> None:
    for _ in range(2):
        make_socket_folder(tmp_path / "node")
        assert stat.S_IMODE((tmp_path / "node").stat().st_mode) == 0o700
