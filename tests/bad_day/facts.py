"""What was seen of a bad day, from outside: AWS's answers, what ranks wrote, what the public API tells.

Data only; `rules` judges it.

All times are Unix seconds of the one machine that everything ran on.
"""

from __future__ import annotations

from typing import Any

import msgspec


class Boundary(msgspec.Struct, frozen=True, kw_only=True):
    """A rank has passed a boundary, by its own word."""

    job: str
    generation: int
    rank: int
    pid: int
    node: str
    step: int
    """Steps finished; the first line of a rank has the step that it went on from."""
    at: float
    monotonic: float


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A call of EC2 or Auto Scaling, as AWS recorded it."""

    at: float
    action: str
    instance: str = ""
    desired: int | None = None
    """What the group was to have then."""
    is_decrement: bool = False
    status: int = 200


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """An instance that AWS says is shutting down or gone."""

    instance: str
    at: float
    """When it was first seen so."""


class Strike(msgspec.Struct, frozen=True, kw_only=True):
    """Something that was done to the cluster, and what the checker saw of it."""

    at: float
    kind: str
    """ranks, agents, instances, groups, control plane, links, checks, throttle."""
    targets: tuple[str, ...]
    """Instances."""
    did: str
    seen: str = ""
    """What the checker itself saw of its effect; empty: nothing."""
    until: float | None = None
    """When what lasts was undone."""


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """An event of Everstep that names a node and takes it out of use."""

    at: float
    instance: str
    words: str


class Incident(msgspec.Struct, frozen=True, kw_only=True):
    """An incident, as the API tells it."""

    id: str
    job: str
    cause: str
    source: str | None
    from_step: int | None
    lost_steps: int | None
    generation_before: int
    generation_after: int | None
    instances: tuple[str, ...]
    """Lost by it."""
    evidence: tuple[str, ...]
    failed_at: float
    opened_at: float
    closed_at: float | None
    phase_seconds: tuple[float, ...]
    faulted: tuple[str, ...] = ()
    """Where it happened, lost by it or not."""


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """A job that is to train before anything is done to it, when it was no longer waited for."""

    job: str
    waited_seconds: float
    """Since it was submitted."""
    status: str
    secondary: str
    reason: str
    node_count: int
    committed_step: int


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A job at its end, as the API tells it, and what its ranks left."""

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
    """By rank."""
    undisturbed: list[Any]
    """The same of a run outside Everstep."""


class Day(msgspec.Struct, frozen=True, kw_only=True):
    """All of it."""

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
    """Lines could be cut."""
    starts: list[Start] = []
    """Of the jobs that fill the fleet."""
    is_temptation: bool = False
    """Little was done, of a purpose: nobody counts it."""
    refused: int = 0
    """Strikes that were not possible when their time came."""


class Violation(msgspec.Struct, frozen=True, kw_only=True):
    """What must not be."""

    rule: str
    words: str
