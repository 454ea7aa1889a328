"""Defines how often a launch repeats each measurement.

This module imports only the standard library, because the benchmark's main process and the ranks both use it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Repeats:
    """Number of repetitions of each measurement in one launch."""

    spaced_steps: int
    """Steps with a long wait in place of forward and backward, in which all background work finishes."""
    tight_steps: int
    """Steps with a short wait in place of forward and backward: twice the duration of a copy of the state."""
    protects: int
    """Number of snapshots for each of which the loop waits until the snapshot is safe (`Adapter.protect`).

    Everstep's loop ignores this value, because it measures the time to commit of every step.
    """
    local_restores: int
    """Number of restores from the memory of the rank's own node.

    Everstep's launch has more such restores: when one rank restores from the other node, the other rank restores from
    its own node.
    """
    peer_restores: int
    span_seconds: float
    tight_span_seconds: float
