"""A small network of this machine's own: one namespace per node, a bridge between them, every link shaped in both directions.

Invariant: everything made here bears the run's name and is gone when the context ends, however it ends.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from types import TracebackType

from benchmarks.errors import BenchmarkFailed

SUBNET = "10.77.0"
SEGMENT_BYTES = "16384"
"""What TCP hands to a link at once: below the shaper's burst, else it takes every packet apart, and the processor is what is measured."""
CONGESTION = "cubic"
"""What rules TCP, the kernel's own choice where nobody makes another, and that of EC2's images.

A machine may have made one: under BBR, which leaves
the link every ten seconds, one iteration in twenty took 20 to 90 ms longer, with checkpoints or without."""


def obstacle() -> str | None:
    """Return why this machine cannot have such a network, in one sentence; None when it can."""
    if os.geteuid() != 0:
        return "network namespaces need root: run it with sudo"
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"`{program}` is missing: install iproute2"
    name = f"ev{os.getpid()}x"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode:
        return "this machine does not allow network namespaces"
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return None


class Network:
    """Nodes 0 … n-1 at `address(i)`, each in the namespace `namespace(i)`."""

    def __init__(self, nodes: int, link_megabits: int) -> None:
        self._nodes = nodes
        self._rate = f"{link_megabits}mbit"
        self._name = f"ev{os.getpid()}"

    def namespace(self, node: int) -> str:
        """Return the name that `ip netns exec` takes."""
        return f"{self._name}n{node}"

    @staticmethod
    def address(node: int) -> str:
        """Return a node's address."""
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
            _run("tc", "-n", inside, "qdisc", "add", "dev", "eth0", *shape)  # what the node sends
            _run("tc", "qdisc", "add", "dev", port, *shape)  # what it receives

    def remove(self) -> None:
        """Take all of it away; what is not there is not missed."""
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
