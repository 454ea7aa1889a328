"""Creates a virtual network: one namespace per node, a bridge, and links with a rate limit in both directions.

Names start with the run's name. Everything is removed when the context ends, also after an error.
"""

from __future__ import annotations

import os
import subprocess
from types import TracebackType

from benchmarks.errors import BenchmarkFailed

SUBNET = "10.77.0"
SEGMENT_BYTES = "16384"
"""Largest TCP segment, below the shaper's burst. Splitting larger ones would cost CPU time."""
CONGESTION = "cubic"
"""The default of the kernel and EC2's images. With BBR, one iteration in twenty took 20 to 90 ms longer, because it
leaves the link idle every ten seconds.
"""


class Network:
    """Virtual nodes 0 … n-1."""

    def __init__(self, nodes: int, link_megabits: int) -> None:
        self._nodes = nodes
        self._rate = f"{link_megabits}mbit"
        self._name = f"ev{os.getpid()}"

    def namespace(self, node: int) -> str:
        """Return a node's namespace for `ip netns exec`."""
        return f"{self._name}n{node}"

    @staticmethod
    def address(node: int) -> str:
        return f"{SUBNET}.{node + 1}"

    def __enter__(self) -> Network:
        try:
            self._build()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def _build(self) -> None:
        bridge = f"{self._name}b"
        _ip("link", "add", bridge, "type", "bridge")
        _ip("link", "set", bridge, "up")
        for node in range(self._nodes):
            inside, port = self.namespace(node), f"{self._name}v{node}"
            _ip("netns", "add", inside)
            _ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", inside)
            _ip("link", "set", port, "master", bridge, "up")
            _ip("-n", inside, "address", "add", f"{self.address(node)}/24", "dev", "eth0")
            _ip("-n", inside, "link", "set", "eth0", "up", "gso_max_size", SEGMENT_BYTES)
            _ip(
                "-n",
                inside,
                "route",
                "replace",
                f"{SUBNET}.0/24",
                "dev",
                "eth0",
                "src",
                self.address(node),
                "congctl",
                CONGESTION,
            )
            _ip("-n", inside, "link", "set", "lo", "up")
            shape = ("root", "tbf", "rate", self._rate, "burst", "32kb", "latency", "30ms")
            # The first command limits the rate at which the node sends, the second the rate at which it receives.
            _run("tc", "-n", inside, "qdisc", "add", "dev", "eth0", *shape)
            _run("tc", "qdisc", "add", "dev", port, *shape)

    def remove(self) -> None:
        """Remove the network. Missing parts are ignored."""
        for node in range(self._nodes):
            subprocess.run(["ip", "link", "del", f"{self._name}v{node}"], capture_output=True, check=False)
            subprocess.run(["ip", "netns", "del", self.namespace(node)], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", f"{self._name}b"], capture_output=True, check=False)


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchmarkFailed(f"{' '.join(command)}: {done.stderr.strip()}")
