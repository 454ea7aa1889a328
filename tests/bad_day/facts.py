"""Facts of a bad day, observed from outside: AWS's answers, traces of the ranks, and the public API.

This module contains data only; `rules` judges it. All times are Unix seconds of the machine that ran the day.
"""

from __future__ import annotations

from typing import Any

import msgspec


class Boundary(msgspec.Struct, frozen=True, kw_only=True):
    """A finished step of a rank, read from the rank's trace file."""

    job: str
    generation: int
    rank: int
    pid: int
    node: str
    step: int
    """Number of steps that the job has finished. In a rank's first line: the step from which the rank resumed."""
    at: float
    monotonic: float


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A call to EC2 or Auto Scaling that the local AWS logged."""

    at: float
    action: str
    instance: str = ""
    desired: int | None = None
    """Requested desired capacity. None: the call does not set it."""
    launched: int = 0
    """Number of instances by which LaunchInstances enlarges the group."""
    token: str = ""
    """ClientToken of LaunchInstances. AWS launches once per token."""
    is_decrement: bool = False
    status: int = 200
    server: str = ""
    """Name of the control plane's server that called. Empty if someone else called."""


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """An instance that AWS reports as shutting down or gone."""

    instance: str
    at: float
    """Time of the first such report."""


class Strike(msgspec.Struct, frozen=True, kw_only=True):
    """A fault that the day injected, with its observed effect."""

    at: float
    kind: str
    """A kind of `plan.Line`, except `pair`: a pair counts as a strike of the kind `instances`."""
    targets: tuple[str, ...]
    """Instances that the strike hit."""
    did: str
    seen: str = ""
    """Observed effect of the strike. Empty: no effect was observed."""


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """An event in which Everstep decides to take a node out of use."""

    at: float
    instance: str
    words: str


class Incident(msgspec.Struct, frozen=True, kw_only=True):
    """An incident as the API describes it."""

    id: str
    job: str
    cause: str
    source: str | None
    from_step: int | None
    lost_steps: int | None
    generation_before: int
    generation_after: int | None
    instances: tuple[str, ...]
    """Instances that the job lost in this incident."""
    evidence: tuple[str, ...]
    failed_at: float
    opened_at: float
    closed_at: float | None
    phase_seconds: tuple[float, ...]
    faulted: tuple[str, ...] = ()
    """Instances on which the failure occurred. The job may have continued to use some of them."""


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """A job's state when the wait for its first committed step ended, successfully or not.

    The first two jobs must start before the day injects its first fault.
    """

    job: str
    waited_seconds: float
    """Seconds since the job's submission."""
    status: str
    secondary: str
    reason: str
    node_count: int
    committed_step: int


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A job after its end: the API's description and the results of its ranks."""

    name: str
    status: str
    nodes: int
    priority: int
    created_at: float
    started_at: float | None
    ended_at: float | None
    accounted_until: float | None
    accounting_seconds: dict[str, float]
    ettr: float | None
    checkpoint_every: int
    result: list[Any]
    """Result of each rank."""
    undisturbed: list[Any]
    """Result of each rank of the run outside Everstep."""


class Day(msgspec.Struct, frozen=True, kw_only=True):
    """All facts of a bad day."""

    seed: int
    minutes: float
    boundaries: list[Boundary]
    calls: list[Call]
    ended: list[Ended]
    strikes: list[Strike]
    decisions: list[Decision]
    incidents: list[Incident]
    jobs: list[Job]
    has_links: bool
    """True if this machine can cut network links of its instances."""
    starts: list[Start] = []
    """How each of the first two jobs started."""
    has_servers: bool = False
    """True if the control plane had two servers behind a load balancer, and PostgreSQL."""
    orphans: tuple[str, ...] = ()
    """Instances, objects and rows that nothing refers to, a sentence for each."""
    wrong_calls: tuple[str, ...] = ()
    """Calls that the local AWS refused because AWS does not document their parameters, a sentence for each."""
    is_temptation: bool = False
    """True for a short day whose plan tests a single safeguard. The rules do not count its injected faults."""
    returned: tuple[Decision, ...] = ()
    """Events in which the fleet takes a node back into use, because the node's agent reports again."""
    refused: int = 0
    """Number of planned faults that were not injected, because there was no instance or rank to hit."""


class Violation(msgspec.Struct, frozen=True, kw_only=True):
    """A rule that the day violated, and a sentence that describes the violation."""

    rule: str
    words: str
