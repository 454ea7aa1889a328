"""Tests the metrics that an agent serves about itself."""

from __future__ import annotations

import urllib.request

from prometheus_client.parser import text_string_to_metric_families

from everstep.protocol.agent_messages import (
    AgentReport,
    MemberPhase,
    MemberReport,
    NodeFault,
    NodeMemory,
    RankMemory,
    RankStatus,
    ShardProtection,
)
from everstep.protocol.ids import Generation, JobName, NodeId, Rank, RunId, Step
from worker.agent.prometheus import AgentFacts, MetricsEndpoint, snapshot_seconds

NODE, PEER = NodeId("i-1"), NodeId("i-2")


def report(ranks: int = 2, *, step: int = 10) -> AgentReport:
    of_node = [Rank(rank) for rank in range(ranks)]
    member = MemberReport(
        job=JobName("gpt"),
        run=RunId("a" * 32),
        generation=Generation(3),
        phase=MemberPhase.RUNNING,
        ranks=tuple(RankStatus(rank=rank, boundary=Step(step)) for rank in of_node),
        protection=tuple(
            ShardProtection(
                rank=rank, holders=(NODE, PEER), in_view=(NODE,), committed=Step(step - 3), payload_bytes=100
            )
            for rank in of_node
        ),
        faults=(NodeFault(code="upload_failed", message="m", is_permanent=False),),
        load_seconds=1.5,
    )
    faults = tuple(NodeFault(code="gpu_xid", message=f"gpu {n}", is_permanent=False) for n in range(2))
    of_ranks = tuple(RankMemory(rank=rank, resident_bytes=50 + rank, peak_bytes=60 + rank) for rank in of_node)
    memory = NodeMemory(total_bytes=1000, available_bytes=400, limit_bytes=1000, ranks=of_ranks)
    return AgentReport(node_id=NODE, sequence=1, member=member, refused_count=4, faults=faults, memory=memory)


def scrape(facts: AgentFacts, *took: float) -> dict[tuple[str, str], float]:
    """Return the metrics by name and labels, after snapshots that took these numbers of seconds."""
    snapshots = snapshot_seconds()
    endpoint = MetricsEndpoint("127.0.0.1", 0, lambda: facts, snapshots)
    for seconds in took:
        snapshots.observe(seconds)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
    finally:
        endpoint.close()
    return {
        (sample.name, ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_figures_of_a_node_that_trains() -> None:
    found = scrape(AgentFacts(report(), is_connected=True, waiting_count=7, dropped_count=2))
    expected = {
        ("everstep_agent_connected", ""): 1,
        ("everstep_agent_metrics_waiting_steps", ""): 7,
        ("everstep_agent_metrics_dropped_steps_total", ""): 2,
        ("everstep_agent_refused_total", ""): 4,
        ("everstep_agent_warm", ""): 1,
        ("everstep_node_faults", "code=gpu_xid"): 2,
        ("everstep_node_faults", "code=upload_failed"): 1,
        ("everstep_node_generation", "job=gpt"): 3,
        ("everstep_node_phase", "job=gpt,phase=running"): 1,
        ("everstep_node_load_seconds", "job=gpt"): 1.5,
        ("everstep_rank_step", "job=gpt,rank=1"): 10,
        ("everstep_shard_committed_step", "job=gpt,rank=1"): 7,
        ("everstep_shard_replica_lag_steps", "job=gpt,rank=1"): 3,
        ("everstep_shard_bytes", "job=gpt,rank=0"): 100,
        ("everstep_shard_holders", "job=gpt,rank=0"): 1,
        ("everstep_node_memory_total_bytes", ""): 1000,
        ("everstep_node_memory_available_bytes", ""): 400,
        ("everstep_node_memory_limit_bytes", ""): 1000,
        ("everstep_rank_resident_bytes", "job=gpt,rank=1"): 51,
        ("everstep_rank_resident_peak_bytes", "job=gpt,rank=1"): 61,
    }
    assert expected.items() <= found.items()


def test_a_node_without_a_job_or_a_report_is_shown_too() -> None:
    idle = AgentReport(node_id=NODE, sequence=1, member=None)
    assert (
        scrape(AgentFacts(idle, is_connected=False, waiting_count=0, dropped_count=0))["everstep_agent_connected", ""]
        == 0
    )
    assert (
        scrape(AgentFacts(None, is_connected=False, waiting_count=0, dropped_count=0))[
            "everstep_agent_metrics_waiting_steps", ""
        ]
        == 0
    )


def test_snapshots_are_counted_by_how_long_they_took() -> None:
    found = scrape(AgentFacts(None, is_connected=True, waiting_count=0, dropped_count=0), 0.004, 0.02, 99.0)
    buckets = {labels: value for (name, labels), value in found.items() if name == "everstep_snapshot_seconds_bucket"}
    assert [buckets[f"le={limit}"] for limit in ("0.0025", "0.005", "0.025", "30.0", "+Inf")] == [0, 1, 2, 2, 3]
    assert found["everstep_snapshot_seconds_sum", ""] == 99.024
    assert not any(name.endswith("_created") for name, _ in found)


def test_series_grow_with_ranks_alone() -> None:
    few = scrape(AgentFacts(report(2), is_connected=True, waiting_count=0, dropped_count=0))
    later = scrape(AgentFacts(report(2, step=99_999), is_connected=True, waiting_count=0, dropped_count=0))
    more = scrape(AgentFacts(report(64), is_connected=True, waiting_count=0, dropped_count=0))
    assert few.keys() == later.keys()
    assert len(more) - len(few) == 62 * 7
