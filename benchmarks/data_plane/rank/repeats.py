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
    """Number of snapshots for each of which the loop waits until the snapshot is safe (`Adapter.protect`).

    Everstep's loop does not use the value, because it times every commit.
    """
    local_restores: int
    """Restores from the memory of the rank's own node.

    Everstep has more of them: while one rank restores from the other node, the other rank restores from its own node.
    """
    peer_restores: int
    span_seconds: float
    tight_span_seconds: float
