"""Numbers of repetitions in a launch. Standard library only, as harness and ranks both import it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Repeats:
    """Numbers of repetitions in one launch."""

    spaced_steps: int
    """Steps with spans long enough for all background work to finish."""
    tight_steps: int
    """Steps with spans of twice the copy."""
    protects: int
    """Snapshots that are awaited until they are safe; unused for Everstep, where every commit is timed."""
    local_restores: int
    """Restores from the own node; Everstep's ranks also do one at every restore from a peer."""
    peer_restores: int
    span_seconds: float
    tight_span_seconds: float
