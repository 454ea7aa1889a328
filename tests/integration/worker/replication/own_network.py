"""Networks of a test's own, in namespaces that single threads have entered: a loopback whose speed it can choose, and
two nodes with two cables.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_CLONE_NEWNET = 0x40000000
_SECONDS = 20
CARDS = ("e0", "e1")
ADDRESSES = ("10.77.0.10", "10.77.0.11"), ("10.77.0.20", "10.77.0.21")
"""Of both cards of either node."""


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
    """Run a test's body on a loop in a thread of its own, whose sockets, threads and children all belong to the new
    namespace.

    Args:
        body: is given the namespace's loopback, up.
    """

    def run() -> None:
        _enter_own_network()

        async def main() -> None:
            await body(OwnLoopback())

        asyncio.run(main())

    with ThreadPoolExecutor(1) as thread:
        thread.submit(run).result()


def sent_bytes() -> dict[str, int]:
    """Return what each card of the calling thread's node has sent."""
    shown = subprocess.run(["ip", "-json", "-statistics", "link"], check=True, capture_output=True).stdout
    return {link["ifname"]: link["stats64"]["tx"]["bytes"] for link in json.loads(shown) if link["ifname"] in CARDS}


def readdress(card: str, address: str) -> None:
    """Give a card of the calling thread's node one address instead of any that it has, or none."""
    subprocess.run(["ip", "address", "flush", "dev", card], check=True)
    if address:
        subprocess.run(["ip", "address", "add", f"{address}/24", "dev", card], check=True)


def on_two_nodes(*bodies: Callable[[], Awaitable[None]]) -> None:
    """Run two bodies, each on a loop in a thread of its own, on nodes whose cards lie in one network: a cable each
    joins e0 to e0 and e1 to e1.

    A card answers for its own address alone, as in a VPC, so that what leaves by the wrong one arrives nowhere.

    Args:
        bodies: of the node with `ADDRESSES[0]` and of that with `ADDRESSES[1]`; both have to end.
    """
    threads, there, joined = [0, 0], threading.Barrier(2), threading.Barrier(2)

    def run(number: int) -> None:
        _enter_own_network()
        Path("/proc/sys/net/ipv4/conf/all/arp_ignore").write_text("1")
        threads[number] = threading.get_native_id()
        there.wait(_SECONDS)
        for card in CARDS if number else ():
            other = f"/proc/{os.getpid()}/task/{threads[0]}/ns/net"
            subprocess.run(
                ["ip", "link", "add", card, "type", "veth", "peer", "name", card, "netns", other], check=True
            )
        joined.wait(_SECONDS)
        for card, address in zip(CARDS, ADDRESSES[number], strict=True):
            readdress(card, address)
            subprocess.run(["ip", "link", "set", card, "up"], check=True)

        async def main() -> None:
            await bodies[number]()

        asyncio.run(main())

    with ThreadPoolExecutor(2) as pool:
        for running in [pool.submit(run, number) for number in range(2)]:
            running.result()


def _enter_own_network() -> None:
    assert ctypes.CDLL(None).unshare(_CLONE_NEWNET) == 0
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
