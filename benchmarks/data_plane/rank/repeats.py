"""How often a launch does what. Standard library only: the harness makes it, ranks take it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Repeats:
    """Of one launch."""

    spaced_steps: int
    """With spans long enough for everything in the background to end."""
    tight_steps: int
    """With spans of twice the copy."""
    protects: int
    """Snapshots that are waited for until they are safe; with Everstep every step's commit is timed, and this is not used."""
    local_restores: int
    """Everstep's ranks restore from their own node beside every restore from a peer as well."""
    peer_restores: int
    span_seconds: float
    tight_span_seconds: float
