"""Tests the tmpfs that an agent mounts for its node. Some tests need the permission to mount."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from worker.shm import tmpfs as own

MIB = 1024 * 1024


@pytest.fixture
def folder(tmpfs: Path) -> Iterator[Path]:
    folder = tmpfs / "node"
    yield folder
    if folder.is_mount():
        assert ctypes.CDLL(None).umount2(os.fsencode(folder), 2) == 0


def may_mount(folder: Path) -> bool:
    probe = folder.with_name("probe")
    is_mounted = own.mount(probe, MIB)
    if is_mounted:
        ctypes.CDLL(None).umount2(os.fsencode(probe), 2)
    probe.rmdir()
    return is_mounted


def test_it_has_the_size_that_was_asked_for_and_the_next_agent_finds_it(folder: Path) -> None:
    if not may_mount(folder):
        pytest.skip("no right to mount")
    assert own.mount(folder, 8 * MIB)
    assert folder.is_mount()
    assert folder.stat().st_mode & 0o777 == 0o700
    facts = os.statvfs(folder)
    assert facts.f_blocks * facts.f_frsize == 8 * MIB
    (folder / "slot").write_bytes(b"x" * 5 * MIB)
    with pytest.raises(OSError, match="No space left"):
        (folder / "other").write_bytes(b"x" * 5 * MIB)
    assert own.mount(folder, 8 * MIB)
    assert (folder / "slot").read_bytes() == b"x" * 5 * MIB, "mounted once: what lies on it stays in sight"


def test_huge_pages_refused_are_done_without(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def refuse(folder: Path, options: str) -> bool:
        asked.append(options)
        return "huge" not in options

    monkeypatch.setattr(own, "try_mount", refuse)
    assert own.mount(folder, MIB)
    assert asked == [f"size={MIB},mode=0700,huge=within_size", f"size={MIB},mode=0700"]


def test_without_the_right_to_mount_the_folder_serves_as_it_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own, "try_mount", lambda *_: False)
    assert not own.mount(folder, MIB)
    (folder / "slot").touch()
    assert not own.mount(folder, MIB)


def test_what_lies_in_a_plain_folder_is_not_hidden(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own, "try_mount", lambda *_: pytest.fail("mounted over slots"))
    folder.mkdir()
    (folder / "slot").touch()
    assert not own.mount(folder, MIB)


@pytest.mark.security
@pytest.mark.parametrize("mode", [0o777, 0o720])
def test_a_folder_that_others_may_write_to_is_not_adopted(folder: Path, mode: int) -> None:
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(PermissionError, match="trusts its own folder alone"):
        own.mount(folder, MIB)
    assert not folder.is_mount()


@pytest.mark.security
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_of_another_user_is_not_adopted(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    os.chown(folder, 61_260, 61_260)
    with pytest.raises(PermissionError, match="it is of uid 61260"):
        own.mount(folder, MIB)


@pytest.mark.security
def test_a_link_is_not_adopted(folder: Path, tmp_path: Path) -> None:
    folder.symlink_to(tmp_path)
    with pytest.raises(NotADirectoryError):
        own.mount(folder, MIB)
    folder.unlink()
