import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from worker.node.unix_socket import listen_private


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
