"""Defines the faults: context managers that inject a fault into a local cluster, and remove it on exit.

A fault that did not take effect raises an error and never yields a measurement.
"""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.cluster_jobs import Bench, Json
from benchmarks.command import pause
from benchmarks.errors import BenchmarkFailed
from benchmarks.faults.lines import namespace
from everstep.protocol.errors import CorruptSlot, UnknownVersion
from everstep.protocol.slot import HEADER_BYTES, SlotState, unpack_header
from infra.local_cloud.fault_kinds import SlowNetwork
from infra.local_cloud.instance_init import memory_directory
from infra.local_cloud.network import inside
from infra.local_cloud.processes import Process, descendants, is_agent, memory_of

MIB = 1024**2
LINK_PART = 0.01
CARD_BYTES_PER_SECOND = 1.25e9
"""A usual network card: 10 Gbit/s. `slow_link` uses a hundredth of it, or of the link's rate if that is lower."""
RESET_EVERY_SECONDS = 0.1
SURE_SECONDS = 0.2
"""Seconds between stopping an agent and a check that its transfer is incomplete. Otherwise, the benchmark tries again.
"""
STRIKE_SECONDS = 30.0
"""Wait of a fault for a suitable moment, such as the middle of a transfer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The cluster, and the job that a fault disturbs."""

    bench: Bench
    nodes: tuple[str, ...]
    """Node ids by rank; before a job runs, of all nodes of the cluster."""
    link_bytes_per_second: float
    """Rate between two nodes without other traffic."""
    node_memory_bytes: int
    state_mib: int
    """Default per rank. A case can use another size."""
    coordinator: str = ""
    """Node id; empty before a job runs."""

    def of(self, seen: Json) -> Place:
        """Return a copy with the nodes and the coordinator of a job, as the API describes it."""
        return replace(self, nodes=tuple(seen["NodeIds"]), coordinator=seen["CoordinatorNodeId"])

    @property
    def member(self) -> str:
        """The node whose agent is not the coordinator."""
        return next(node for node in self.nodes if node != self.coordinator)

    def agent(self, node: str) -> Process:
        """Return the process of a node's agent."""
        (agent,) = [process for process in descendants(self.bench.cluster.instances()[node]) if is_agent(process.pid)]
        return agent

    def peer_port(self, node: str) -> int:
        """Return the port for other nodes, from the node's state directory."""
        (kept,) = (self.bench.cluster.nodes_directory / node).rglob("peer_port")
        return int(kept.read_text())


@dataclass(slots=True, kw_only=True)
class Struck:
    """An injected fault."""

    at: float
    """Monotonic start in seconds."""
    did: str = ""
    """Sentence about the effect, with numbers. Complete once the fault is removed."""


Strike = Callable[[Place], AbstractContextManager[Struck]]
"""Injects a fault on entry, removes it on exit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One fault."""

    name: str
    strike: Strike
    has_rate_limit: bool = True
    """False: agents send snapshots without a rate limit (`without_rate_limit`)."""


@contextmanager
def peer_stopped(place: Place) -> Iterator[Struck]:
    """SIGSTOP the agent that holds the copy of the coordinator's shard. Its connections stay open."""
    agent = place.agent(place.member)
    with _stopped(agent) as at:
        yield Struck(at=at, did=f"SIGSTOP of the holder's agent, {place.member}")


@contextmanager
def stopped_in_a_snapshot(place: Place) -> Iterator[Struck]:
    """Stop the coordinator's agent while it sends a snapshot of its own rank's shard."""
    owner, holder = place.coordinator, place.member
    rank, agent = place.nodes.index(owner), place.agent(owner)
    deadline = time.monotonic() + STRIKE_SECONDS
    while time.monotonic() < deadline:
        if not _is_arriving(holder, rank):
            continue  # poll without a pause, because the snapshot's transfer lasts only a few milliseconds
        with _stopped(agent) as at:
            pause(SURE_SECONDS)
            if _is_arriving(holder, rank):
                yield Struck(
                    at=at,
                    did=f"SIGSTOP of the agent of rank {rank}, {owner}, which coordinates, with that rank's "
                    "snapshot half sent",
                )
                return
    raise BenchmarkFailed(f"the benchmark never observed the agent of {owner} in the middle of a snapshot")


@contextmanager
def _stopped(agent: Process) -> Iterator[float]:
    at = time.monotonic()
    if not agent.send(signal.SIGSTOP):
        raise BenchmarkFailed(f"the agent {agent.pid} is gone")
    try:
        while Path(f"/proc/{agent.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            pause(0.001)
        yield at
    finally:
        agent.send(signal.SIGCONT)


def _is_arriving(node: str, rank: int) -> bool:
    """Return whether a node has an incomplete slot of this rank's shard."""
    for name, path in memory_of(memory_directory(node)).items():
        if f"/rank-{rank}.slot-" not in name:
            continue
        try:
            with path.open("rb") as file:
                if unpack_header(file.read(HEADER_BYTES)).state is SlotState.WRITING:
                    return True
        except (CorruptSlot, UnknownVersion, FileNotFoundError):
            # The header is not valid yet, because the agent is creating or writing this slot.
            continue
    return False


@contextmanager
def slow_link(place: Place) -> Iterator[Struck]:
    """Limit a node's link to a hundredth of its rate, but at most 12.5 MB/s."""
    megabits = min(place.link_bytes_per_second, CARD_BYTES_PER_SECOND) * 8 / 1e6 * LINK_PART
    whole = place.link_bytes_per_second / 1e6
    struck = Struck(
        at=time.monotonic(), did=f"the line of {place.member} carries {megabits / 8:.1f} MB/s of {whole:,.0f}, each way"
    )
    place.bench.cluster.inject(SlowNetwork(target=place.member, megabits=megabits))
    try:
        yield struck
    finally:
        place.bench.cluster.clear_faults("slow-network")


@contextmanager
def resets(place: Place) -> Iterator[Struck]:
    """Reset all connections between the two agents several times per second."""
    # `ss -K` makes the kernel close a connection, and the other agent receives a TCP reset.
    ports = [place.peer_port(node) for node in place.nodes]
    chosen = " or ".join(f"sport = :{port} or dport = :{port}" for port in ports)
    node, over, count = place.member, threading.Event(), 0

    def reset() -> None:
        nonlocal count
        while not over.wait(RESET_EVERY_SECONDS):
            shown = subprocess.run(
                ["ss", "-K", "-H", "-t", "-n", "state", "established", f"( {chosen} )"],
                capture_output=True,
                text=True,
                check=False,
            )
            count += len(shown.stdout.splitlines())

    resetting = threading.Thread(target=inside, args=(namespace(place.bench.cluster, node), reset))
    struck = Struck(at=time.monotonic())
    resetting.start()
    try:
        yield struck
    finally:
        over.set()
        resetting.join()
        lasted = time.monotonic() - struck.at
        struck.did = f"all connections between the agents, every {RESET_EVERY_SECONDS:g} s: {count} in {lasted:.0f} s"
    if not count:
        raise BenchmarkFailed("no connection was reset. Use a kernel with INET_DIAG_DESTROY.")


LIMITED, UNLIMITED = "a link at 1 %", "a link at 1 %, snapshots without a rate limit"
CASES = (
    Case(name="a peer that stops reading", strike=peer_stopped),
    Case(name="the agent stopped in a snapshot", strike=stopped_in_a_snapshot),
    Case(name=LIMITED, strike=slow_link),
    Case(name="connections reset", strike=resets),
    Case(name=UNLIMITED, strike=slow_link, has_rate_limit=False),
)
