"""Walks and removes file trees that a job's programs have filled.

Such a tree may be nested deeper than Python recurses, its paths may be longer than the kernel accepts, and a process
may change it meanwhile. Invariant: no link is followed, and at most three file descriptors are open.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

_FOLDER: Final = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def folders_of(
    folder: Path, *, is_forced: bool = False, leave: Callable[[str, int], None] | None = None
) -> Iterator[tuple[int, list[str], list[str]]]:
    """Yield a folder and all folders below it, parents first: a descriptor, the folders in it, its other entries.

    The descriptor is valid until the next iteration. Links, vanished folders and folders that cannot be opened are
    skipped. `is_forced` gives this process's user all rights to each folder first. `leave` is called with the name of
    each folder and a descriptor of its parent, after all folders below it. Raises OSError if a process moves a folder
    away.
    """
    above: list[tuple[str, tuple[int, int], list[str]]] = []
    pending = [folder.name]
    at = os.open(folder.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        while pending or above:
            if not pending:
                name, parent, pending = above.pop()
                upper = os.open("..", os.O_PATH | _FOLDER, dir_fd=at)
                os.close(at)
                at = upper
                if _identity(at) != parent:
                    raise OSError(errno.ESTALE, "a process has moved a folder", name)
                if leave is not None:
                    leave(name, at)
                continue
            name = pending.pop()
            try:
                inner, entries = _open(name, at, is_forced=is_forced)
            except OSError:
                if leave is not None:
                    leave(name, at)
                continue
            above.append((name, _identity(at), pending))
            os.close(at)
            at, (pending, others) = inner, entries
            yield at, list(pending), others
    finally:
        os.close(at)


def remove_tree(path: Path, *, ignore_errors: bool = False) -> None:
    """Remove a file, a link, or a folder with all its content, even if folders in it are read-only.

    Missing entries are no errors. Raises OSError, the first error, after all other entries are removed.
    """
    errors: list[OSError] = []

    def remove(call: Callable[..., None], name: str | Path, at: int | None = None) -> None:
        try:
            call(name, dir_fd=at)
        except FileNotFoundError:
            pass
        except OSError as error:
            errors.append(error)

    try:
        if stat.S_ISDIR(path.lstat().st_mode):
            for at, _, others in folders_of(path, is_forced=True, leave=lambda name, at: remove(os.rmdir, name, at)):
                for name in others:
                    remove(os.unlink, name, at)
        else:
            remove(os.unlink, path)
    except FileNotFoundError:
        pass
    except OSError as error:
        errors.append(error)
    if errors and not ignore_errors:
        raise errors[0]


def _open(name: str, at: int, *, is_forced: bool) -> tuple[int, tuple[list[str], list[str]]]:
    """Return a descriptor of a folder, the names of the folders in it, and the names of its other entries."""
    if is_forced:
        _permit(name, at)
    inner = os.open(name, os.O_RDONLY | _FOLDER, dir_fd=at)
    try:
        os.stat(".", dir_fd=inner)  # The walk could not return from a folder that it may not search.
        folders: list[str] = []
        others: list[str] = []
        with os.scandir(inner) as found:
            for entry in found:
                (folders if entry.is_dir(follow_symlinks=False) else others).append(entry.name)
    except BaseException:
        os.close(inner)
        raise
    return inner, (folders, others)


def _permit(name: str, at: int) -> None:
    """Give this process's user all rights to a folder. Errors appear at its opening."""
    with contextlib.suppress(OSError):
        folder = os.open(name, os.O_PATH | _FOLDER, dir_fd=at)
        try:
            if (mode := stat.S_IMODE(os.fstat(folder).st_mode)) & 0o700 != 0o700:
                os.chmod(f"/proc/self/fd/{folder}", mode | 0o700)  # fchmod(2) refuses such a descriptor.
        finally:
            os.close(folder)


def _identity(folder: int) -> tuple[int, int]:
    status = os.fstat(folder)
    return status.st_dev, status.st_ino
