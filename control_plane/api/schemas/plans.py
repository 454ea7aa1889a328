"""API models: the forecast for a job before its creation, with probabilities and costs."""

from __future__ import annotations

from control_plane.api.schemas.common import Shape


class RecoveryOdds(Shape):
    """Probability that the nodes' memory keeps every shard of a job when several nodes are lost at the same time."""

    lost_nodes: int
    probability: float
    """Exact probability that memory keeps every shard. All sets of LostNodes nodes are equally likely."""


class DomainOdds(Shape):
    """Probability that the nodes' memory keeps every shard of a job when several failure domains are lost at once."""

    lost_domains: int
    probability: float
    """Exact probability that memory keeps every shard. All sets of LostDomains domains are equally likely.

    A node whose domain is unknown counts as a separate domain.
    """


class TrainingJobPlan(Shape):
    """Forecast for a job, based on its fleet's state and history."""

    fleet_name: str
    node_count: int
    ranks_per_node: int
    world_size: int
    copies: int
    parity_group_size: int | None
    """Nodes per parity group. Absent without parity."""
    elasticity: str | None
    """A sentence about the numbers of nodes between which the job may change.

    Absent if the job always has NodeCount nodes.
    """
    slots_per_node: int
    """Number of memory slots that the job needs on each node: slots per shard × Copies × RanksPerNode.

    Each slot holds the state of one rank. With parity, the number is slots per shard × 2 × RanksPerNode. Half of these
    slots hold shares, each with 1 ÷ (ParityGroupSize - 1) of the size of a state.
    """
    memory_ratio: float
    """Memory of the job's slots on each node ÷ size of the training state of the node's ranks."""
    copies_memory_ratio: float | None
    """MemoryRatio of the same job with two copies instead of parity. Absent without parity."""
    node_memory_bytes: int | None
    """Memory for slots on the fleet's smallest node. Absent while the fleet has no node."""
    largest_shard_bytes: int | None
    """The largest state per rank that fits into NodeMemoryBytes."""
    recovery_odds: list[RecoveryOdds]
    """The probability that memory keeps every shard after a simultaneous loss of one, two or three nodes.

    The computation assumes that every shard has all its holders.
    """
    can_start_now: bool
    """Whether enough nodes are free and connected, and no other job is ahead in the queue."""
    queue_position: int | None
    """Position in the fleet's queue, from 1. Absent if the job would not wait for other jobs."""
    queued_behind: list[str]
    """Names of the jobs that would be ahead in the queue."""
    waits_for: str | None
    """A sentence that says what the job would wait for."""
    free_node_count: int
    nodes_to_launch: int
    """Number of instances that the fleet would have to launch for the job."""
    cost_usd_per_hour: float | None
    """The fleet's price × NodeCount. Absent if the fleet has no price."""
    most_cost_usd: float | None
    """Upper limit of the cost: the lower of MaxCostUsd and MaxRuntimeInSeconds ÷ 3600 × CostUsdPerHour.

    The second value exists only if the fleet has a price. Absent if neither value exists.
    """
    expected_mttf_seconds: float | None
    """Mean time to failure: node-seconds of the fleet's jobs ÷ their incidents ÷ NodeCount.

    Absent before the fleet's first incident.
    """
    expected_recovery_seconds: float | None
    """Mean time to recovery of the fleet's closed incidents."""
    expected_ettr_ratio: float | None
    """Expected share of training time, queue excluded.

    ExpectedMttfSeconds ÷ (ExpectedMttfSeconds + ExpectedRecoverySeconds).
    """
