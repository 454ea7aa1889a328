"""A roll (replacement or reboot of all nodes of a fleet): what a person requested, and how far the fleet loop is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from everstep.protocol.ids import NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetRoll:
    """A person's request to replace or reboot all nodes of a fleet. Only the API writes it."""

    roll_id: str
    node_ids: tuple[NodeId, ...]
    """The nodes to roll: the fleet's nodes at the start of the roll, without held and ending ones."""
    max_unavailable: int
    """Maximum number of nodes, at least 1, that may be out of service while the roll begins another node."""
    reboots: bool
    """Whether the roll reboots the nodes. Otherwise it replaces their instances."""
    requested_by: str
    reason: str
    """The person's reason. May be empty."""
    started_at: float
    """Time of the request, in Unix seconds."""
    is_paused: bool = False
    """Whether the roll begins no further node for now."""
    is_stopped: bool = False
    """Whether a person has ended the roll."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RollProgress:
    """The progress of a roll. Only the fleet loop writes it."""

    roll_id: str
    """The roll that this progress belongs to. A new roll has another id."""
    requested: tuple[NodeId, ...] = ()
    """The nodes whose replacement or reboot the roll has requested, in this order."""
    finished: tuple[NodeId, ...] = ()
    """The nodes that need no more work, in the order of `FleetRoll.node_ids`.

    Nodes that ended or were held during the roll also count as finished, and so do nodes whose request a person
    cancelled.
    """
    reason: str = ""
    """Text that says what the roll does or waits for, as the API shows it."""
    ended_at: float | None = None
    """Time at which the roll was complete or stopped, in Unix seconds. None before that."""

    @property
    def current(self) -> tuple[NodeId, ...]:
        """The nodes that the roll has begun to replace or reboot, and not finished."""
        return tuple(node_id for node_id in self.requested if node_id not in self.finished)


class RollStatus(StrEnum):
    """Status of a roll, as the API shows it.

    - IN_PROGRESS: the roll has nodes to begin or to finish.
    - PAUSED: a person has paused the roll. Nodes that it has begun still finish.
    - STOPPED: the roll ended before all nodes were finished, because a person stopped it or deleted the fleet.
    - COMPLETED: all nodes are finished.
    """

    IN_PROGRESS = "InProgress"
    PAUSED = "Paused"
    STOPPED = "Stopped"
    COMPLETED = "Completed"
