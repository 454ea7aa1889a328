"""A mount namespace for one test, used by a single thread. In the namespace, every user can run this Python."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_CLONE_NEWNS = 0x20000


def may_have_one() -> bool:
    """Return whether this process may create a mount namespace."""
    if os.geteuid() != 0:
        return False
    with ThreadPoolExecutor(1) as thread:  # only this thread enters the namespace, and the thread ends with the block
        return thread.submit(ctypes.CDLL(None).unshare, _CLONE_NEWNS).result() == 0


def in_own_mounts(body: Callable[[Path, Path], Awaitable[None]], *opened: Path) -> None:
    """Run a test's body on an event loop in a new thread with a mount namespace of its own.

    Threads and processes that the body starts use the same namespace.

    Args:
        body: receives a folder on disk and a folder on tmpfs. All users can enter both; both are removed afterwards.
        opened: folders that every user can reach. If a folder above them is closed to other users, its other content is
            hidden.
    """

    def run() -> None:
        assert ctypes.CDLL(None).unshare(_CLONE_NEWNS) == 0
        _mount("--make-rprivate", "/")
        _open(opened)
        with _folder("/tmp") as disk, _folder("/dev/shm") as tmpfs:

            async def main() -> None:
                await body(disk, tmpfs)

            asyncio.run(main())

    with ThreadPoolExecutor(1) as thread:
        thread.submit(run).result()


def _open(folders: Iterable[Path]) -> None:
    for folder in folders:
        closed = next((above for above in reversed(folder.parents) if not above.stat().st_mode & 0o001), None)
        if closed is not None:
            held = tempfile.mkdtemp()
            _mount("--bind", str(folder), held)
            _mount("-t", "tmpfs", "-o", "mode=755", "opened", str(closed))
            folder.mkdir(parents=True)
            for above in itertools.takewhile(closed.__ne__, folder.parents):
                above.chmod(0o755)
            _mount("--move", held, str(folder))
            os.rmdir(held)


@contextlib.contextmanager
def _folder(where: str) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="everstep-test-", dir=where))
    folder.chmod(0o711)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def _mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True)
