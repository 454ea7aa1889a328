"""A network of the local cloud's own: one namespace per instance, a bridge between them, links that can be cut and slowed.

    this machine ── bridge ─┬─ port ══ eth0 of an instance's namespace
    (AWS and control plane  ├─ port ══ eth0 of another
     each with an address)  └─ …

Addresses stay those of 127.0.0.0/8, so that what may speak to this machine only goes on to refuse everything else: the
bridge and the namespaces route them (`route_localnet`), and an instance keeps 127.0.0.0/16 for itself. An instance
reaches the ports of AWS and of the control plane and its peers; it has no route to anything else, this machine's other
services included.

Invariant: whatever is made here bears the network's name and goes with `remove`, by whom and whenever that is called.
Nothing is pretended: a cut link drops packets in the kernel, which counts them.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import wraps
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, TypeVar

from infra.local_cloud.errors import FaultRefused, StartFailed

NAMESPACES: Final = Path("/run/netns")
CLONE_NEWNET: Final = 0x40000000
UNLIMITED: Final = "32gbit"
"""HTB has no class without a rate."""
T = TypeVar("T")


def network_name(state_dir: Path) -> str:
    """Return the name of everything that the network of a state directory makes: the same at every call, so that a crash leaves nothing unknown."""
    return f"ev{sha256(os.fsencode(state_dir)).hexdigest()[:6]}"


def namespace_path(network: str, instance_id: str) -> Path:
    """Return where an instance's namespace in the network of that name can be opened."""
    return NAMESPACES / f"{network}-{instance_id}"


def obstacle() -> str | None:
    """Return why this machine cannot have such a network, in one sentence; None when it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"`{program}` is missing: install iproute2"
    name = f"evprobe{os.getpid()}"
    try:
        _run("ip", "netns", "add", name)
        _run("ip", "-n", name, "link", "set", "lo", "up")
        _tc(_shaping("lo", rate="1mbit", dropped=("match u32 0 0",)), "-n", name)
    except StartFailed as error:
        return f"this machine does not allow it: {error}"
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return None


def remove(name: str) -> int:
    """Take away all that a network of this name has made, and return how many namespaces that were.

    Idempotent; also for what a crash has left.
    """
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return 0  # whoever may not make one has none
    links = json.loads(_run("ip", "-json", "link", "show"))
    for link in sorted((str(link["ifname"]) for link in links), reverse=True):
        if link == name or link.startswith(f"{name}p"):
            subprocess.run(["ip", "link", "del", link], capture_output=True, check=False)
    inside = [path.name for path in NAMESPACES.glob(f"{name}-*")]
    for namespace in inside:
        subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)
    return len(inside)


def enter(namespace: Path) -> None:
    """Move the calling thread into a namespace, for good."""
    descriptor = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(descriptor, CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns({namespace})")
    finally:
        os.close(descriptor)


def _locked(method: Callable[..., T]) -> Callable[..., T]:
    @wraps(method)
    def locked(self: Network, *arguments: Any) -> T:
        with self._lock:
            return method(self, *arguments)

    return locked


@dataclass(slots=True)
class Link:
    """An instance's line to the bridge."""

    port: str
    address: str
    cut_from: set[str] | None = field(default_factory=set)
    """Addresses that nothing passes to or from; None: all."""
    bits_per_second: int | None = None


class Network:
    """The bridge and what hangs on it. One owner, which calls `remove` at the end. Thread-safe.

    Args:
        name: from `network_name`.
        services: addresses of AWS and of the control plane, on this machine.
    """

    def __init__(self, name: str, *, services: Collection[str]) -> None:
        self.name = name
        self._services = tuple(services)
        self._allowed: dict[str, int] = {}
        self._links: dict[str, Link] = {}
        self._blocks: set[str] = set()
        self._made = 0
        self._lock = threading.RLock()
        remove(name)
        try:
            self._build()
        except BaseException:
            remove(name)
            raise

    def _build(self) -> None:
        # An address of its own: without one it takes a port's, and changes it when that port goes, under everybody who
        # has learned it.
        mac = ":".join(("02", *(sha256(self.name.encode()).hexdigest()[i : i + 2] for i in range(0, 10, 2))))
        _ip(
            "",
            [
                f"link add {self.name} address {mac} type bridge",
                *(f"address add {address}/32 dev {self.name}" for address in self._services),
            ],
        )
        Path(f"/proc/sys/net/ipv4/conf/{self.name}/route_localnet").write_text("1")
        _no_ipv6(self.name)
        _ip("", [f"link set {self.name} up"])

    def allow(self, address: str, port: int) -> None:
        """Name the port of a service that instances may reach; before the first instance is attached."""
        self._allowed[address] = port

    def namespace(self, instance_id: str) -> Path:
        """Return where an instance's namespace can be opened."""
        return namespace_path(self.name, instance_id)

    @_locked
    def attach(self, instance_id: str, address: str) -> Path:
        """Make an instance's namespace and its line to the bridge.

        Args:
            instance_id: whose.
            address: its own, unique in this network.

        Returns:
            The namespace.

        Raises:
            StartFailed: the kernel refused.
        """
        self.detach(instance_id)
        self._made += 1
        port, namespace = f"{self.name}p{self._made}", self.namespace(instance_id)
        block = address.rsplit(".", 1)[0]
        if block not in self._blocks:
            # In the table `local`, where 127.0.0.0/8 stands: the longer prefix is asked first there.
            _ip("", [f"route replace unicast {block}.0/24 dev {self.name} src {self._services[0]} table local"])
            self._blocks.add(block)
        try:
            _run("ip", "netns", "add", namespace.name)
            _ip(
                "",
                [
                    f"link add {port} type veth peer name eth0 netns {namespace.name}",
                    f"link set {port} master {self.name} up",
                ],
            )
            inside(namespace, _prepare_inside)
            _ip(
                namespace.name,
                [
                    "link set lo up",
                    "address del 127.0.0.1/8 dev lo",
                    "address add 127.0.0.1/16 dev lo",
                    f"address add {address}/32 dev eth0",
                    "link set eth0 up",
                    f"route add 127.0.0.0/8 dev eth0 src {address}",
                    *(
                        f"rule add pref 50 to {service} ipproto tcp dport {number} lookup main"
                        for service, number in self._allowed.items()
                    ),
                    *(f"rule add pref 60 to {service} prohibit" for service in self._services),
                ],
            )
            _no_ipv6(port)
        except BaseException:
            _remove_line(port, namespace)  # else the next attempt would find it in its way
            raise
        self._links[instance_id] = Link(port, address)
        return namespace

    @_locked
    def detach(self, instance_id: str) -> None:
        """Take an instance's line and namespace away. Idempotent."""
        link = self._links.pop(instance_id, None)
        if link:
            _remove_line(link.port, self.namespace(instance_id))

    @_locked
    def cut(self, instance_id: str, addresses: Iterable[str] | None) -> None:
        """Let nothing pass between an instance and these addresses, in both directions; what waits for an answer waits.

        Args:
            instance_id: whose line.
            addresses: instead of those that were cut before; None for all, empty to mend it.

        Raises:
            FaultRefused: the instance does not run.
        """
        link = self._link(instance_id)
        link.cut_from = None if addresses is None else set(addresses)
        self._shape(instance_id, link)

    @_locked
    def slow(self, instance_id: str, bits_per_second: int | None) -> None:
        """Let an instance's line carry no more than this, in each direction; None for what it can.

        Args:
            instance_id: whose line.
            bits_per_second: the limit.

        Raises:
            FaultRefused: the instance does not run.
        """
        link = self._link(instance_id)
        link.bits_per_second = bits_per_second
        self._shape(instance_id, link)

    def links(self) -> dict[str, Link]:
        """Return every instance's line."""
        return dict(self._links)

    def counters(self, instance_id: str) -> dict[str, int]:
        """Return what the kernel counts on an instance's line.

        Args:
            instance_id: whose line.

        Returns:
            `sent_bytes` and `received_bytes` by the instance; `dropped_to` and `dropped_from` it, packets that a cut
            has swallowed.

        Raises:
            FaultRefused: the instance does not run.
        """
        link = self._link(instance_id)
        (seen,) = json.loads(_run("ip", "-json", "-statistics", "link", "show", link.port))
        counters = seen["stats64"]
        return {
            "sent_bytes": int(counters["rx"]["bytes"]),
            "received_bytes": int(counters["tx"]["bytes"]),
            "dropped_to": _dropped(_run("tc", "-json", "-s", "qdisc", "show", "dev", link.port)),
            "dropped_from": _dropped(
                _run("tc", "-n", self.namespace(instance_id).name, "-json", "-s", "qdisc", "show", "dev", "eth0")
            ),
        }

    def _link(self, instance_id: str) -> Link:
        link = self._links.get(instance_id)
        if link is None:
            raise FaultRefused(f"{instance_id} does not run: it has no line")
        return link

    def _shape(self, instance_id: str, link: Link) -> None:
        rate = f"{link.bits_per_second}bit" if link.bits_per_second else UNLIMITED
        for device, direction, arguments in (
            (link.port, "src", ()),
            ("eth0", "dst", ("-n", self.namespace(instance_id).name)),
        ):
            subprocess.run(["tc", *arguments, "qdisc", "del", "dev", device, "root"], capture_output=True, check=False)
            dropped = (
                ["match u32 0 0"]
                if link.cut_from is None
                else [f"match ip {direction} {address}/32" for address in sorted(link.cut_from)]
            )
            if dropped or link.bits_per_second:
                _tc(_shaping(device, rate=rate, dropped=dropped), *arguments)


def inside(namespace: Path, work: Callable[[], T]) -> T:
    """Do something in a namespace: in a thread that enters it and ends."""

    def entered() -> T:
        enter(namespace)
        return work()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(entered).result()


def listening_socket(address: str, namespace: Path | None = None) -> socket.socket:
    """Return a socket that listens at an address, on a port of the kernel's choice.

    Args:
        address: to listen at.
        namespace: where; None for this process's.

    Returns:
        The socket. It belongs to its namespace for good, whoever accepts from it.
    """

    def listen() -> socket.socket:
        return socket.create_server((address, 0))

    return inside(namespace, listen) if namespace else listen()


def _remove_line(port: str, namespace: Path) -> None:
    for words in (("link", "del", port), ("netns", "del", namespace.name)):
        subprocess.run(["ip", *words], capture_output=True, check=False)


def _prepare_inside() -> None:
    Path("/proc/sys/net/ipv4/conf/all/route_localnet").write_text("1")
    _no_ipv6("eth0")  # else every instance and this machine could meet at link-local addresses


def _no_ipv6(device: str) -> None:
    switch = Path(f"/proc/sys/net/ipv6/conf/{device}/disable_ipv6")
    if switch.exists():
        switch.write_text("1")


def _shaping(device: str, *, rate: str, dropped: Iterable[str]) -> list[str]:
    """Return the lines for `tc` that limit what a device sends and drop what matches; ARP passes, as in a VPC, where nobody sees it fail."""
    return [
        f"qdisc add dev {device} root handle 1: htb default 10",
        f"class add dev {device} parent 1: classid 1:10 htb rate {rate} quantum 60000",
        f"class add dev {device} parent 1: classid 1:20 htb rate {rate} quantum 60000",
        f"qdisc add dev {device} parent 1:20 handle 20: bfifo limit 1",  # a queue that no packet fits into
        *(f"filter add dev {device} parent 1: protocol ip u32 {match} flowid 1:20" for match in dropped),
    ]


def _dropped(shown: str) -> int:
    queues: list[dict[str, Any]] = json.loads(shown)
    return sum(int(queue.get("drops", 0)) for queue in queues if queue.get("handle") == "20:")


def _ip(namespace: str, lines: Iterable[str]) -> None:
    _run("ip", *(("-n", namespace) if namespace else ()), "-batch", "-", lines=lines)


def _tc(lines: Iterable[str], *arguments: str) -> None:
    _run("tc", *arguments, "-batch", "-", lines=lines)


def _run(*command: str, lines: Iterable[str] = ()) -> str:
    done = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True, check=False)
    if done.returncode:
        raise StartFailed(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
