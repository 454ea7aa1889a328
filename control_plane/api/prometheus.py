"""Exposes metrics of this service in Prometheus's text format 0.0.4.

Most values are read at the scrape; the loops collect others (`control_plane.loop.loop_metrics`). Labels name only
unfinished jobs, fleets and causes, so the number of series stays bounded. Source of names and units:
https://prometheus.io/docs/practices/naming.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from control_plane.core import accounting
from control_plane.db.exports import ExportRecord
from control_plane.db.fleets import FleetRecord
from control_plane.db.incidents import Recoveries
from control_plane.db.jobs import SavedJob
from control_plane.db.nodes import SavedNode
from control_plane.db.protection import ShardRecord
from control_plane.loop import disposition
from control_plane.loop.loop_metrics import LoopMetrics
from control_plane.loop.memos import lapse_of
from everstep.protocol.ids import NodeId

MEDIA_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4
MICRO: Final = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """The data of one scrape."""

    version: str
    jobs: tuple[SavedJob, ...]
    """Jobs that have not ended."""
    shards: Mapping[str, tuple[ShardRecord, ...]]
    """Shards of unfinished jobs, by run id."""
    recoveries: tuple[Recoveries, ...]
    """Recoveries of unfinished jobs, by job, cause and restore source."""
    fleets: tuple[FleetRecord, ...]
    nodes: tuple[SavedNode, ...]
    """Nodes of all fleets, without ended ones."""
    connected: frozenset[NodeId]
    refused_count: int
    """Messages of agents that the servers of all fleets rejected."""
    exports: tuple[ExportRecord, ...] = ()
    newest_event_id: int = 0
    is_paused: bool = False
    """Whether an administrator paused all automatic actions."""
    is_restore_pending: bool = False
    """Whether a restored database waits for a person, so that nothing is deleted from S3."""


def exposition(facts: ServerFacts, loop_metrics: LoopMetrics | None) -> bytes:
    """Return all metrics of this server in Prometheus's text format.

    `loop_metrics` contains the metrics that the background loops have collected, and `facts` the data for all other
    metrics.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Once(families(facts)))
    for collector in loop_metrics.collectors if loop_metrics is not None else ():
        registry.register(collector)
    return generate_latest(registry)


class _Once(Collector):
    """A collector that returns its constructor's metrics, for one scrape."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics

    def describe(self) -> Iterable[Metric]:
        return ()


def families(facts: ServerFacts) -> Iterator[Metric]:
    """Yield the metrics of one scrape, one family per name."""
    info = InfoMetricFamily("everstep_build", "The version of this server.")
    info.add_metric([], {"version": facts.version})
    yield info
    yield GaugeMetricFamily(
        "everstep_automation_paused",
        "1 while an administrator pauses all automatic actions.",
        value=float(facts.is_paused),
    )
    yield GaugeMetricFamily(
        "everstep_deletions_paused",
        "1 while nothing is deleted from S3, because a person has not accepted a restore of the database.",
        value=float(facts.is_restore_pending),
    )
    yield from _of_jobs(facts)
    yield from _of_recoveries(facts.recoveries)
    yield from _of_fleets(facts)
    yield from _of_exports(facts)
    yield CounterMetricFamily(
        "everstep_agent_messages_refused", "Messages of agents that the server rejected.", value=facts.refused_count
    )


def _of_jobs(facts: ServerFacts) -> Iterator[Metric]:
    statuses = GaugeMetricFamily("everstep_jobs", "Training jobs that have not ended.", labels=["status"])
    for status, count in sorted(Counter(disposition.secondary_status_of(job) for job in facts.jobs).items()):
        statuses.add_metric([status], count)
    yield statuses
    of_job = ["job", "project", "fleet"]
    step = GaugeMetricFamily("everstep_job_step", "The newest step that a rank has finished.", labels=of_job)
    committed = GaugeMetricFamily(
        "everstep_job_committed_step", "The newest step that every holder has verified.", labels=of_job
    )
    generation = GaugeMetricFamily("everstep_job_generation", "Launches of the job's ranks.", labels=of_job)
    ettr = GaugeMetricFamily(
        "everstep_job_ettr_ratio",
        "Effective training time divided by wall time, without time in the queue.",
        labels=of_job,
    )
    spent = CounterMetricFamily(
        "everstep_job_seconds",
        "Wall time of the job by use; the buckets add up to its age.",
        labels=[*of_job, "bucket"],
    )
    cost = CounterMetricFamily("everstep_job_cost_usd", "Cost of its nodes at the fleet's price.", labels=of_job)
    lag = GaugeMetricFamily(
        "everstep_job_replica_lag_steps",
        "Steps between the newest step and the committed step of the most delayed shard.",
        labels=of_job,
    )
    unprotected = GaugeMetricFamily("everstep_job_degraded_shards", "Shards with a holder out of view.", labels=of_job)
    lapsed = GaugeMetricFamily(
        "everstep_job_protection_lapsed", "1 while training goes on and nodes keep no further step.", labels=of_job
    )
    for job in facts.jobs:
        labels = [job.name, job.project, job.fleet_name]
        lapsed.add_metric(labels, lapse_of(job) is not None)
        step.add_metric(labels, max(job.boundary, 0))
        committed.add_metric(labels, max(job.committed_step, 0))
        generation.add_metric(labels, job.generation)
        if job.started_at is not None and (ratio := accounting.ettr_ratio(job.accounting)) is not None:
            ettr.add_metric(labels, ratio)
        for bucket, microseconds in sorted(job.accounting.items()):
            spent.add_metric([*labels, bucket], microseconds / MICRO)
        if job.cost_usd is not None:
            cost.add_metric(labels, job.cost_usd)
        if shards := facts.shards.get(job.run_id):
            lag.add_metric(labels, max(0, job.boundary - min(shard.committed_step for shard in shards)))
            unprotected.add_metric(
                labels, sum(not all(holder.is_in_view for holder in shard.holders) for shard in shards)
            )
    yield from (step, committed, generation, ettr, spent, cost, lag, unprotected, lapsed)


def _of_recoveries(recoveries: Iterable[Recoveries]) -> Iterator[Metric]:
    labels = ["job", "project", "cause", "source"]
    count = CounterMetricFamily("everstep_job_recoveries", "Completed recoveries.", labels=labels)
    steps = CounterMetricFamily("everstep_job_lost_steps", "Steps executed again after recoveries.", labels=labels)
    for each in recoveries:
        of_these = [each.job_name, each.project, each.cause, each.source or "none"]
        count.add_metric(of_these, each.count)
        steps.add_metric(of_these, each.lost_steps)
    yield from (count, steps)


def _of_exports(facts: ServerFacts) -> Iterator[Metric]:
    lag = GaugeMetricFamily("everstep_export_lag_events", "Events that the export has not read yet.", labels=["export"])
    failing = GaugeMetricFamily("everstep_export_failing", "1 while an export fails and is retried.", labels=["export"])
    for each in facts.exports:
        lag.add_metric([each.name], max(0, facts.newest_event_id - each.position))
        failing.add_metric([each.name], each.failing_since is not None)
    yield from (lag, failing)


def _of_fleets(facts: ServerFacts) -> Iterator[Metric]:
    nodes = GaugeMetricFamily("everstep_nodes", "Nodes by state.", labels=["fleet", "state"])
    connected = GaugeMetricFamily(
        "everstep_agents_connected", "Nodes whose agent is connected to this server.", labels=["fleet"]
    )
    desired = GaugeMetricFamily(
        "everstep_fleet_desired_nodes", "Desired capacity of the fleet's group.", labels=["fleet"]
    )
    frozen = GaugeMetricFamily("everstep_fleet_frozen", "1 while Everstep does not change the fleet.", labels=["fleet"])
    drift = GaugeMetricFamily(
        "everstep_fleet_drift",
        "Differences between the group's configuration and the configuration that Everstep needs.",
        labels=["fleet"],
    )
    for (fleet, state), count in sorted(Counter((node.fleet_name, node.state) for node in facts.nodes).items()):
        nodes.add_metric([fleet, state], count)
    here = Counter(node.fleet_name for node in facts.nodes if node.id in facts.connected)
    for each in facts.fleets:
        connected.add_metric([each.name], here[each.name])
        desired.add_metric([each.name], each.desired_node_count)
        frozen.add_metric([each.name], each.state == "frozen")
        drift.add_metric([each.name], len(each.drift))
    yield from (nodes, connected, desired, frozen, drift)
