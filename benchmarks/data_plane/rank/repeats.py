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
    restores: int
    span_seconds: float
    tight_span_seconds: float
