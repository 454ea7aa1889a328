"""A roll (replacement or reboot of all nodes of a fleet): what a person requested, and which nodes are finished."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from control_plane.core.observed.causes import NOTHING, Reason
from everstep.protocol.ids import NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetRoll:
    """A person's request to replace or reboot all nodes of a fleet. Only the API writes it."""

    roll_id: str
    node_ids: tuple[NodeId, ...]
    """The nodes to replace or reboot: the fleet's nodes at the time of the request, without held and ending nodes."""
    max_unavailable: int
    """Limit (at least 1) of nodes out of service. At the limit, the roll does not begin with further nodes."""
    reboots: bool
    """Whether EC2 reboots the nodes. If False, new instances replace them."""
    requested_by: str
    reason: str
    """The person's reason. May be empty."""
    started_at: float
    """Time of the request, in Unix seconds."""
    is_paused: bool = False
    """Whether a person has paused the roll. The fleet then begins to replace or reboot no further node."""
    is_stopped: bool = False
    """Whether a person has ended the roll before all nodes were replaced or rebooted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RollProgress:
    """The progress of a roll (replacement or reboot of all nodes of a fleet). Only the fleet loop writes it."""

    roll_id: str
    """The roll that this progress belongs to. A new roll has another id."""
    requested: tuple[NodeId, ...] = ()
    """The nodes whose replacement or reboot was requested so far, in the order of the requests."""
    finished: tuple[NodeId, ...] = ()
    """The nodes that were replaced or rebooted, in the order of `FleetRoll.node_ids`.

    Nodes that the roll skips also count: nodes that ended or were held meanwhile, and nodes whose request a person
    cancelled.
    """
    reason: Reason = NOTHING
    """What the roll does or waits for."""
    ended_at: float | None = None
    """Time at which the roll was complete or stopped, in Unix seconds. None before that."""

    @property
    def current(self) -> tuple[NodeId, ...]:
        """The nodes whose replacement or reboot was requested and is not finished."""
        return tuple(node_id for node_id in self.requested if node_id not in self.finished)


class RollStatus(StrEnum):
    """Status of a roll (replacement or reboot of all nodes of a fleet), as the API shows it.

    - IN_PROGRESS: the roll has nodes to begin or to finish.
    - PAUSED: a person has paused the roll. Nodes that it has begun still finish.
    - STOPPED: the roll ended before all nodes were finished, because a person stopped it or deleted the fleet.
    - COMPLETED: all nodes are finished.
    """

    IN_PROGRESS = "InProgress"
    PAUSED = "Paused"
    STOPPED = "Stopped"
    COMPLETED = "Completed"
