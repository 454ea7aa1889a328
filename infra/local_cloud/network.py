"""Creates the network of a local cloud: a namespace per instance, a bridge, and links that faults can cut or slow.

    this machine ── bridge ─┬─ port ══ eth0 in the namespace of an instance
    (AWS and control plane  ├─ port ══ eth0 in the namespace of another instance
     each with an address)  └─ …

All addresses stay in 127.0.0.0/8, so that checks for loopback keep working. Bridge and namespaces route them
(`route_localnet`), except 127.0.0.0/16, an instance's own loopback. An instance reaches only AWS, the control plane and
other instances. Device names begin with the network's name, so `remove` finds them after a crash.
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
"""Rate of an unlimited link, because every HTB class needs one."""
T = TypeVar("T")


def network_name(state_dir: Path) -> str:
    """Return the name prefix of a network's devices and namespaces. It depends only on the directory."""
    return f"ev{sha256(os.fsencode(state_dir)).hexdigest()[:6]}"


def namespace_path(network: str, instance_id: str) -> Path:
    """Return the path of an instance's network namespace."""
    return NAMESPACES / f"{network}-{instance_id}"


def obstacle() -> str | None:
    """Return why this machine cannot run such a network; None if it can."""
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
    """Remove a network, also after a crash, and return the number of its namespaces. Idempotent."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return 0  # Without root or `ip`, this user cannot have created a network.
    links = json.loads(_run("ip", "-json", "link", "show"))
    for link in sorted((str(link["ifname"]) for link in links), reverse=True):
        if link == name or link.startswith(f"{name}p"):
            subprocess.run(["ip", "link", "del", link], capture_output=True, check=False)
    inside = [path.name for path in NAMESPACES.glob(f"{name}-*")]
    for namespace in inside:
        subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)
    return len(inside)


def enter(namespace: Path) -> None:
    """Move the calling thread into a network namespace until the thread ends.

    Raises OSError if the namespace does not exist or the caller may not enter it.
    """
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
class NodeLink:
    """The link between an instance's namespace and the bridge."""

    port: str
    address: str
    cut_from: set[str] | None = field(default_factory=set)
    """Addresses from which a fault cuts the instance off, in both directions. None: all."""
    bits_per_second: int | None = None


class Network:
    """The bridge of a local cloud with the links of all instances. The owner calls `remove` at the end. Thread-safe."""

    def __init__(self, name: str, *, services: Collection[str]) -> None:
        self.name = name
        self._services = tuple(services)
        self._allowed: dict[str, int] = {}
        self._links: dict[str, NodeLink] = {}
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
        # Use a fixed MAC address. By default, a bridge uses the address of a port and changes it when that port is
        # removed, which breaks the ARP caches of all instances.
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
        """Allow instances to reach a service's port. Must be called before the first `attach`."""
        self._allowed[address] = port

    def namespace(self, instance_id: str) -> Path:
        """Return the path of an instance's network namespace."""
        return namespace_path(self.name, instance_id)

    @_locked
    def attach(self, instance_id: str, address: str) -> Path:
        """Create an instance's namespace and its link, in place of an earlier link. Return the namespace's path.

        Raises StartFailed if the kernel refused to create the namespace or the link.
        """
        self.detach(instance_id)
        self._made += 1
        port, namespace = f"{self.name}p{self._made}", self.namespace(instance_id)
        block = address.rsplit(".", 1)[0]
        if block not in self._blocks:
            # In the routing table `local`, this route takes precedence over the route of 127.0.0.0/8, because its
            # prefix is longer.
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
            # Remove the partly created link, because it would make the next attempt fail.
            _remove_line(port, namespace)
            raise
        self._links[instance_id] = NodeLink(port, address)
        return namespace

    @_locked
    def detach(self, instance_id: str) -> None:
        """Remove an instance's link and namespace. Idempotent."""
        link = self._links.pop(instance_id, None)
        if link:
            _remove_line(link.port, self.namespace(instance_id))

    @_locked
    def cut(self, instance_id: str, addresses: Iterable[str] | None) -> None:
        """Drop packets between an instance and some addresses (None: all; empty: repair), in place of earlier ones.

        Connections stay open. Raises FaultRefused if the instance does not run.
        """
        link = self._link(instance_id)
        link.cut_from = None if addresses is None else set(addresses)
        self._shape(instance_id, link)

    @_locked
    def slow(self, instance_id: str, bits_per_second: int | None) -> None:
        """Limit the bandwidth of an instance's link in each direction, or remove the limit (None).

        Raises FaultRefused if the instance does not run.
        """
        link = self._link(instance_id)
        link.bits_per_second = bits_per_second
        self._shape(instance_id, link)

    def links(self) -> dict[str, NodeLink]:
        """Return the links by instance id."""
        return dict(self._links)

    def counters(self, instance_id: str) -> dict[str, int]:
        """Return the kernel's counters of a link: `sent_bytes`, `received_bytes`, and the packets that a cut dropped.

        `dropped_to` and `dropped_from` are from the view of the instance. Raises FaultRefused if the instance does not
        run.
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

    def all_counters(self) -> dict[str, dict[str, int]]:
        """Return the counters of all links, without instances that end meanwhile."""
        found: dict[str, dict[str, int]] = {}
        for instance_id in self.links():
            try:
                found[instance_id] = self.counters(instance_id)
            except (FaultRefused, StartFailed):
                if instance_id in self._links:
                    raise
        return found

    def _link(self, instance_id: str) -> NodeLink:
        link = self._links.get(instance_id)
        if link is None:
            raise FaultRefused(f"{instance_id} is not running, so it has no link")
        return link

    def _shape(self, instance_id: str, link: NodeLink) -> None:
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
    """Call a function in a new thread inside a namespace."""

    def entered() -> T:
        enter(namespace)
        return work()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(entered).result()


def listening_socket(address: str, namespace: Path | None = None) -> socket.socket:
    """Return a socket that listens on a port chosen by the kernel, in a namespace or in this process's own (None).

    It stays in its namespace, even if a thread of another namespace accepts from it.
    """

    def listen() -> socket.socket:
        return socket.create_server((address, 0))

    return inside(namespace, listen) if namespace else listen()


def _remove_line(port: str, namespace: Path) -> None:
    for words in (("link", "del", port), ("netns", "del", namespace.name)):
        subprocess.run(["ip", *words], capture_output=True, check=False)


def _prepare_inside() -> None:
    Path("/proc/sys/net/ipv4/conf/all/route_localnet").write_text("1")
    _no_ipv6("eth0")  # IPv6 packets to link-local addresses would bypass the routes and the injected cuts.


def _no_ipv6(device: str) -> None:
    switch = Path(f"/proc/sys/net/ipv6/conf/{device}/disable_ipv6")
    if switch.exists():
        switch.write_text("1")


def _shaping(device: str, *, rate: str, dropped: Iterable[str]) -> list[str]:
    """Return lines for `tc` that limit a device's rate and drop what the filters match, but never ARP, as in a VPC."""
    return [
        f"qdisc add dev {device} root handle 1: htb default 10",
        f"class add dev {device} parent 1: classid 1:10 htb rate {rate} quantum 60000",
        f"class add dev {device} parent 1: classid 1:20 htb rate {rate} quantum 60000",
        # A queue with a limit of one byte is too small for any packet, so it drops all packets.
        f"qdisc add dev {device} parent 1:20 handle 20: bfifo limit 1",
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
