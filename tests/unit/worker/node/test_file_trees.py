"""Trees that a job's programs filled are removed whatever their depth, names, modes and links."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from worker.node.file_trees import folders_of, remove_tree
from worker.node.rank_user import RankUser, clear

DEPTH = 3_000
"""More folders than Python recurses into, with a path longer than the kernel accepts."""


def nest(folder: Path, depth: int = DEPTH) -> None:
    """Create a chain of folders with a file at its end."""
    folder.mkdir()
    at = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("ab", dir_fd=at)
        inner = os.open("ab", os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = inner
    os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=at))
    os.close(at)


@pytest.mark.security
def test_a_tree_deeper_than_python_recurses_is_walked_and_removed(tmp_path: Path) -> None:
    nest(tmp_path / "tree")
    before = set(os.listdir("/proc/self/fd"))
    files = [name for _, _, names in folders_of(tmp_path / "tree") for name in names]
    assert files == ["file"]
    remove_tree(tmp_path / "tree")
    assert list(tmp_path.iterdir()) == []
    assert set(os.listdir("/proc/self/fd")) <= before  # files of earlier tests may be closed meanwhile


@pytest.mark.security
def test_links_are_removed_and_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (outside / "inner").mkdir(parents=True)
    (outside / "inner" / "file").touch()
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "link").symlink_to(outside)
    (tmp_path / "top").symlink_to(outside)
    assert [names for _, *names in folders_of(tree)] == [[[], ["link"]]]
    assert list(folders_of(tmp_path / "top")) == []
    remove_tree(tree)
    remove_tree(tmp_path / "top")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "inner", "outside"]


def test_read_only_folders_single_files_and_missing_paths_are_removed(tmp_path: Path) -> None:
    inner = tmp_path / "tree" / "closed" / "inner"
    inner.mkdir(parents=True)
    (inner / "file").touch()
    for folder in (inner, inner.parent):
        folder.chmod(0)
    (tmp_path / "file").touch()
    for name in ("tree", "file", "missing", "missing/inner"):
        remove_tree(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_an_entry_that_stays_is_an_error_after_all_others_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / "tree" / name).mkdir(parents=True)
        (tmp_path / "tree" / name / "file").touch()
    rmdir = os.rmdir

    def refuse(name: str, *, dir_fd: int | None = None) -> None:
        if name == "b":
            raise PermissionError(13, "Permission denied", name)
        rmdir(name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "rmdir", refuse)
    with pytest.raises(PermissionError):
        remove_tree(tmp_path / "tree")
    remove_tree(tmp_path / "tree", ignore_errors=True)
    assert [path.name for path in (tmp_path / "tree").rglob("*")] == ["b"]


@pytest.mark.security
def test_a_folder_that_is_moved_away_does_not_lead_the_removal_out_of_its_tree(tmp_path: Path) -> None:
    (tmp_path / "tree" / "moved").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    walk = folders_of(tmp_path / "tree", leave=lambda name, at: os.rmdir(name, dir_fd=at))
    next(walk)
    next(walk)
    (tmp_path / "tree" / "moved").rename(tmp_path / "other" / "moved")
    with pytest.raises(OSError, match="moved a folder"):
        next(walk)
    assert (tmp_path / "other" / "moved").is_dir()


@pytest.mark.security
def test_a_deep_tree_of_a_rank_in_a_common_folder_is_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nest(tmp_path / "hostile")
    uid = (tmp_path / "hostile").stat().st_uid
    monkeypatch.setattr("worker.node.rank_user.end_memory", lambda user: None)
    monkeypatch.setattr(os, "getuid", lambda: -1)
    monkeypatch.setattr(RankUser, "covers", lambda user, number: number == uid)
    clear(RankUser(uid or 1, 1), [tmp_path])
    assert list(tmp_path.iterdir()) == []
