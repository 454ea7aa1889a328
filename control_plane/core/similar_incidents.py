"""Sorts incidents of the same cause by what they share with a given incident: instance, instance type, fleet.

Invariant: pure. Among equally similar incidents, the newest is first. An incident is never similar to itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Likeness(StrEnum):
    """A property that two incidents of the same cause share. The property that counts most comes first."""

    INSTANCE = "Instance"
    INSTANCE_TYPE = "InstanceType"
    FLEET = "Fleet"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """The properties of an incident that `likeness` compares with those of another incident."""

    incident_id: str
    opened_at: float
    """Unix seconds."""
    instance_ids: frozenset[str]
    """Instances on which the failure occurred, and instances that the job lost."""
    instance_types: frozenset[str]
    """Instance types of `instance_ids`, or of the fleet if the control plane has deleted their nodes."""
    fleet_name: str


def likeness(one: Candidate, other: Candidate) -> tuple[Likeness, ...]:
    """Return the properties that two incidents share, in the order of `Likeness`."""
    shares = {
        Likeness.INSTANCE: bool(one.instance_ids & other.instance_ids),
        Likeness.INSTANCE_TYPE: bool(one.instance_types & other.instance_types),
        Likeness.FLEET: one.fleet_name == other.fleet_name,
    }
    return tuple(each for each in Likeness if shares[each])


def ranked(
    incident: Candidate, others: Iterable[Candidate], *, limit: int
) -> tuple[tuple[Candidate, tuple[Likeness, ...]], ...]:
    """Return at most `limit` incidents, the most similar first, each with the properties that it shares."""
    found = [(other, likeness(incident, other)) for other in others if other.incident_id != incident.incident_id]
    found.sort(key=lambda each: (*(kind not in each[1] for kind in Likeness), -each[0].opened_at, each[0].incident_id))
    return tuple(found[:limit])
