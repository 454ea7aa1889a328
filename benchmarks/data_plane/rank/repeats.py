"""Numbers of repetitions in a launch.

This module imports only the standard library, because the harness and the ranks both use it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Repeats:
    """Numbers of repetitions in one launch."""

    spaced_steps: int
    """Steps with long spans, in which all background work finishes."""
    tight_steps: int
    """Steps with short spans: twice the duration of a copy of the state."""
    protects: int
    """Snapshots after which the loop waits until they are safe. Unused for Everstep, where every commit is timed."""
    local_restores: int
    """Restores from the rank's own node. Everstep's ranks also restore locally at every restore from a peer."""
    peer_restores: int
    span_seconds: float
    tight_span_seconds: float
