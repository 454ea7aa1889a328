"""How many spares a fleet keeps. For now what the user says; a count from measured failure and replacement times has its place here."""

from __future__ import annotations

from control_plane.core.observed import FleetSpec


def spare_count(spec: FleetSpec) -> int:
    """Return how many nodes beyond the jobs' own a fleet keeps booted and connected."""
    return max(0, spec.spare_count)
