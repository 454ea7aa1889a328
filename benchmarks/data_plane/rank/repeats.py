"""Defines how often a launch repeats each measurement. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Repeats:
    """Number of repetitions of each measurement in one launch."""

    spaced_steps: int
    """Steps with a long span, in which all background work finishes."""
    tight_steps: int
    """Steps with a short span: twice the duration of a copy of the state."""
    protects: int
    """Snapshots with `Adapter.protect`. Everstep's loop measures the time to commit of every step instead."""
    local_restores: int
    """Restores from the rank's own node. Everstep has more: one per restore of the other rank from its peer."""
    peer_restores: int
    span_seconds: float
    tight_span_seconds: float
