"""A roll (replacement or reboot of all nodes of a fleet): what a person requested, and which nodes are finished."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from control_plane.core.observed.causes import NOTHING, Reason
from everstep.protocol.ids import NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetRoll:
    """A person's request to replace or reboot all nodes of a fleet, at a Unix time. Only the API writes it."""

    roll_id: str
    node_ids: tuple[NodeId, ...]
    """The fleet's nodes at the time of the request, without held and ending nodes."""
    max_unavailable: int
    """Limit (at least 1) of nodes out of service. At the limit, the roll does not begin with further nodes."""
    reboots: bool
    requested_by: str
    reason: str
    started_at: float
    is_paused: bool = False
    """While paused, the roll begins with no further node."""
    is_stopped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RollProgress:
    """The progress of a roll. Only the fleet loop writes it."""

    roll_id: str
    requested: tuple[NodeId, ...] = ()
    finished: tuple[NodeId, ...] = ()
    """The order is that of `FleetRoll.node_ids`. Skipped nodes count: ended, held, or with a cancelled request."""
    reason: Reason = NOTHING
    ended_at: float | None = None
    """Unix seconds."""

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
