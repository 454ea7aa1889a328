"""Shapes of the API: the plan of a job before its creation, with odds and costs."""

from __future__ import annotations

from control_plane.api.schemas.common import Shape


class RecoveryOdds(Shape):
    """What becomes of the job's memory when nodes are lost at once."""

    lost_nodes: int
    probability: float
    """That every shard keeps a copy, all sets of so many nodes equally likely; exact."""


class DomainOdds(Shape):
    """What becomes of the job's memory when whole failure domains are lost at once."""

    lost_domains: int
    probability: float
    """That every shard keeps a copy, all sets of so many domains equally likely; exact.

    A node whose domain is not known is one of its own.
    """


class TrainingJobPlan(Shape):
    """What would become of a job, by what its fleet is and has seen."""

    fleet_name: str
    node_count: int
    ranks_per_node: int
    world_size: int
    copies: int
    slots_per_node: int
    """Host memory of a node is taken by so many slots, each as large as one rank's state: slots of a shard × Copies × RanksPerNode."""
    node_memory_bytes: int | None
    """What the fleet's smallest node has for them; absent while it has none."""
    largest_shard_bytes: int | None
    """So large may one rank's state be there."""
    recovery_odds: list[RecoveryOdds]
    """For one, two and three lost nodes at once, with all copies in place."""
    can_start_now: bool
    """Its turn has come, and enough nodes are free and connected."""
    queue_position: int | None
    """Its place in the fleet's queue, from 1; absent where its turn would come at once."""
    queued_behind: list[str]
    """Names of the jobs that would be ahead of it there."""
    waits_for: str | None
    """What it would wait for, in words."""
    free_node_count: int
    nodes_to_launch: int
    """Instances that the fleet would have to bring for it."""
    cost_usd_per_hour: float | None
    """The fleet's price × NodeCount; absent where it has none."""
    most_cost_usd: float | None
    """What it can cost at most: by MaxRuntimeInSeconds at that price, or by MaxCostUsd.

    Absent where neither bounds it.
    """
    expected_mttf_seconds: float | None
    """Mean time to failure: node-seconds of the fleet's jobs ÷ their incidents ÷ NodeCount; absent before the first incident."""
    expected_recovery_seconds: float | None
    """Mean time to recovery, of the fleet's closed incidents."""
    expected_ettr_ratio: float | None
    """ExpectedMttfSeconds ÷ (ExpectedMttfSeconds + ExpectedRecoverySeconds): the part of the time that will be training, the queue not counted."""
