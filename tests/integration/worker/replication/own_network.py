"""Network namespaces for single tests: either a loopback with a chosen rate, or two nodes that two cables connect."""

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
"""Addresses of both cards of each node."""


class OwnLoopback:
    """The loopback of the calling thread's namespace."""

    def limit(self, bytes_per_second: int) -> None:
        """Limit the rate of the loopback until `unlimited` is called."""
        shape = ("tbf", "rate", f"{8 * bytes_per_second}bit", "burst", "128kb", "latency", "100ms")
        subprocess.run(["tc", "qdisc", "replace", "dev", "lo", "root", *shape], check=True)

    def unlimited(self) -> None:
        """Remove the limit."""
        subprocess.run(["tc", "qdisc", "del", "dev", "lo", "root"], check=True)


def may_have_one() -> bool:
    """Return whether this process may create a network namespace and can limit the rate of its loopback."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc"))):
        return False
    with ThreadPoolExecutor(1) as thread:  # only this thread enters the namespace, and the thread ends with the block
        return thread.submit(ctypes.CDLL(None).unshare, _CLONE_NEWNET).result() == 0


def in_own_network(body: Callable[[OwnLoopback], Awaitable[None]]) -> None:
    """Run a test's body on an event loop in a thread of its own, in a new network namespace.

    Sockets, threads and children of the body all belong to that namespace.

    Args:
        body: receives the namespace's loopback, which is up.
    """

    def run() -> None:
        _enter_own_network()

        async def main() -> None:
            await body(OwnLoopback())

        asyncio.run(main())

    with ThreadPoolExecutor(1) as thread:
        thread.submit(run).result()


def sent_bytes() -> dict[str, int]:
    """Return the bytes that each card of the calling thread's node has sent."""
    shown = subprocess.run(["ip", "-json", "-statistics", "link"], check=True, capture_output=True).stdout
    return {link["ifname"]: link["stats64"]["tx"]["bytes"] for link in json.loads(shown) if link["ifname"] in CARDS}


def readdress(card: str, address: str) -> None:
    """Replace all addresses of a card of the calling thread's node by one address, or by none."""
    subprocess.run(["ip", "address", "flush", "dev", card], check=True)
    if address:
        subprocess.run(["ip", "address", "add", f"{address}/24", "dev", card], check=True)


def on_two_nodes(*bodies: Callable[[], Awaitable[None]]) -> None:
    """Run two bodies on two nodes, each on an event loop in a thread of its own.

    One cable joins the two cards e0, and another joins the two cards e1. A card answers only for its own address, as
    in a VPC, so that packets that leave by the wrong card are lost.

    Args:
        bodies: one for the node with `ADDRESSES[0]`, one for the node with `ADDRESSES[1]`. Each has to end.
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
