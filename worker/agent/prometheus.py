"""Exports the metrics of a node for Prometheus: the agent's newest report in Prometheus's text format.

The number of series is limited by the node's ranks (at most 64) and the kinds of faults. Invariant: a scrape reads the
agent's last report in its own thread and never calls into the agent.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Histogram, Metric, disable_created_metrics, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.registry import Collector

from everstep import __version__
from everstep.protocol.agent_messages import AgentReport

# Without this call, every counter has an additional `_created` series with the start time.
disable_created_metrics()  # type: ignore[no-untyped-call]

SNAPSHOT_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


@dataclass(frozen=True, slots=True)
class AgentFacts:
    """The input of one scrape: the agent's newest report, its connection, and its counters."""

    report: AgentReport | None
    is_connected: bool
    waiting_count: int
    dropped_count: int
    """Logged steps whose values were dropped, because the queue was full."""


def families(facts: AgentFacts) -> Iterator[Metric]:
    """Yield the node's metrics for one scrape, computed from `facts`; one family per metric name."""
    build = InfoMetricFamily("everstep_agent_build", "The version of this agent.")
    build.add_metric([], {"version": __version__})
    yield build
    yield GaugeMetricFamily(
        "everstep_agent_connected", "1 while the agent is connected to the control plane.", value=facts.is_connected
    )
    yield GaugeMetricFamily(
        "everstep_agent_metrics_waiting_steps",
        "Logged training steps that the control plane has not stored yet.",
        value=facts.waiting_count,
    )
    yield CounterMetricFamily(
        "everstep_agent_metrics_dropped_steps",
        "Logged training steps that this node has dropped.",
        value=facts.dropped_count,
    )
    report = facts.report
    if report is None:
        return
    yield CounterMetricFamily(
        "everstep_agent_refused",
        "Connections and requests of peers and ranks that this agent refused.",
        value=report.refused_count,
    )
    yield GaugeMetricFamily(
        "everstep_agent_warm",
        "1 while ranks start from a process that has already imported their modules.",
        value=report.is_warm,
    )
    yield from _of_memory(report)
    member = report.member
    faults = GaugeMetricFamily("everstep_node_faults", "Present faults of the node or its job.", labels=["code"])
    every = [*report.faults, *(member.faults if member is not None else ())]
    for code, count in sorted(Counter(fault.code for fault in every).items()):
        faults.add_metric([code], count)
    yield faults
    if member is None:
        return
    generation = GaugeMetricFamily(
        "everstep_node_generation", "The generation that the node has promised.", labels=["job"]
    )
    generation.add_metric([member.job], member.generation)
    phase = GaugeMetricFamily("everstep_node_phase", "1 for the node's present phase.", labels=["job", "phase"])
    phase.add_metric([member.job, member.phase.value], 1)
    load = GaugeMetricFamily(
        "everstep_node_load_seconds",
        "Seconds that the node took to load its shards for this generation.",
        labels=["job"],
    )
    load.add_metric([member.job], member.load_seconds)
    yield from (generation, phase, load)
    of_rank = ["job", "rank"]
    step = GaugeMetricFamily("everstep_rank_step", "The newest step that the rank has finished.", labels=of_rank)
    committed = GaugeMetricFamily(
        "everstep_shard_committed_step",
        "The newest step of the rank's shard that every holder has verified.",
        labels=of_rank,
    )
    lag = GaugeMetricFamily(
        "everstep_shard_replica_lag_steps",
        "Steps from the shard's committed step to the rank's newest step.",
        labels=of_rank,
    )
    size = GaugeMetricFamily("everstep_shard_bytes", "Size of one copy of the rank's shard.", labels=of_rank)
    holders = GaugeMetricFamily(
        "everstep_shard_holders", "Holders in view of the shard, including the rank's own node.", labels=of_rank
    )
    boundaries = {status.rank: max(status.boundary, 0) for status in member.ranks}
    for rank, boundary in sorted(boundaries.items()):
        step.add_metric([member.job, str(rank)], boundary)
    for shard in member.protection:
        labels = [member.job, str(shard.rank)]
        committed.add_metric(labels, max(shard.committed, 0))
        lag.add_metric(labels, max(0, boundaries.get(shard.rank, 0) - max(shard.committed, 0)))
        size.add_metric(labels, shard.payload_bytes)
        holders.add_metric(labels, len(shard.in_view))
    yield from (step, committed, lag, size, holders)


def _of_memory(report: AgentReport) -> Iterator[Metric]:
    memory = report.memory
    if memory is None:
        return
    yield GaugeMetricFamily(
        "everstep_node_memory_total_bytes", "Maximum memory for the agent and its ranks.", value=memory.total_bytes
    )
    yield GaugeMetricFamily(
        "everstep_node_memory_available_bytes", "Memory that can be allocated now.", value=memory.available_bytes
    )
    if memory.limit_bytes is not None:
        yield GaugeMetricFamily(
            "everstep_node_memory_limit_bytes", "The memory limit of the agent's cgroup.", value=memory.limit_bytes
        )
    if report.member is None:
        return
    resident = GaugeMetricFamily(
        "everstep_rank_resident_bytes", "Resident memory of the rank's process.", labels=["job", "rank"]
    )
    peak = GaugeMetricFamily(
        "everstep_rank_resident_peak_bytes",
        "The highest resident memory since the rank started.",
        labels=["job", "rank"],
    )
    for rank in memory.ranks:
        resident.add_metric([report.member.job, str(rank.rank)], rank.resident_bytes)
        peak.add_metric([report.member.job, str(rank.rank)], rank.peak_bytes)
    yield from (resident, peak)


def snapshot_seconds() -> Histogram:
    """Return a new histogram of snapshot durations. Several threads may use it."""
    return Histogram(
        "everstep_snapshot_seconds",
        "Seconds from a boundary until the rank's state is in shared memory, per rank and snapshot.",
        buckets=SNAPSHOT_SECONDS,
        registry=None,
    )


class _Facts(Collector):
    def __init__(self, facts: Callable[[], AgentFacts]) -> None:
        self._facts = facts

    def collect(self) -> Iterable[Metric]:
        return families(self._facts())

    def describe(self) -> Iterable[Metric]:
        return ()


class MetricsEndpoint:
    """HTTP server for `GET /metrics` of one agent, without encryption or a token: bind it to a private network.

    With port 0, the kernel chooses. `facts` is called in the endpoint's threads. Raises OSError if the address or port
    cannot be used.
    """

    def __init__(self, address: str, port: int, facts: Callable[[], AgentFacts], snapshots: Histogram) -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Facts(facts))
        registry.register(snapshots)
        self._server: WSGIServer
        self._thread: threading.Thread
        self._server, self._thread = start_http_server(port, addr=address, registry=registry)
        self.port = self._server.server_port

    def close(self) -> None:
        """Stop listening and wait for the endpoint's thread to end."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
