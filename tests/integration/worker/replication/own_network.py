"""A loopback of a test's own, whose speed it can choose: a network namespace that one thread has entered."""

from __future__ import annotations

import asyncio
import ctypes
import os
import shutil
import subprocess
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

_CLONE_NEWNET = 0x40000000


class OwnLoopback:
    """The loopback of the calling thread's namespace."""

    def limit(self, bytes_per_second: int) -> None:
        """Let it carry no more than this, from now on."""
        shape = ("tbf", "rate", f"{8 * bytes_per_second}bit", "burst", "128kb", "latency", "100ms")
        subprocess.run(["tc", "qdisc", "replace", "dev", "lo", "root", *shape], check=True)

    def unlimited(self) -> None:
        """Let it carry what it can."""
        subprocess.run(["tc", "qdisc", "del", "dev", "lo", "root"], check=True)


def may_have_one() -> bool:
    """Say whether this process has the right to a namespace, and the programs to shape it."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc"))):
        return False
    with ThreadPoolExecutor(1) as thread:  # only the thread enters it, and ends
        return thread.submit(ctypes.CDLL(None).unshare, _CLONE_NEWNET).result() == 0


def in_own_network(body: Callable[[OwnLoopback], Awaitable[None]]) -> None:
    """Run a test's body on a loop in a thread of its own, whose sockets, threads and children all belong to the new namespace.

    Args:
        body: is given the namespace's loopback, up.
    """

    def run() -> None:
        assert ctypes.CDLL(None).unshare(_CLONE_NEWNET) == 0
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)

        async def main() -> None:
            await body(OwnLoopback())

        asyncio.run(main())

    with ThreadPoolExecutor(1) as thread:
        thread.submit(run).result()
