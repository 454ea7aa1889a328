"""The reasons for the states of nodes, fleets and rolls, as values: the facts of `core.observed.facts`, and others.

No code interprets `note` and `text`, which contain words of a person, of AWS or of an agent. The database stores a
reason as JSON with its class as `kind`. An unknown class becomes `Recorded`.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import TypeAlias

from control_plane.core.observed.facts import Fact, Faulty, NodeRequest, Recorded, Value
from control_plane.core.observed.incidents import Tries
from control_plane.core.observed.nodes import Remedy
from control_plane.core.states import JobState, NodeState
from everstep.protocol.codec import resolve


class NodeFact(StrEnum):
    """A fact about a node that needs no further fields."""

    STARTING = "starting"
    CONNECTED = "connected"
    RELEASED = "released"
    JOB_ENDED = "job_ended"
    REPORTS_AGAIN = "reports_again"
    REPAIRED = "repaired"
    UNNEEDED = "unneeded"


class Happened(Value, frozen=True):
    """A fact about a node without further fields."""

    what: NodeFact


class WorksFor(Value, frozen=True):
    """The fleet assigned the node to a job."""

    job: str


class JobQueued(Value, frozen=True):
    """The node's job returned to the queue."""

    job: str


class GivenUp(Value, frozen=True):
    """The node's job gave the node up. `remedy` is the action that the fleet takes for the node."""

    job: str
    remedy: Remedy
    because: Fact | Tries


class Silent(Value, frozen=True):
    """The agent of a spare has been silent for `seconds`, or is silent while a status check of EC2 fails (`text`)."""

    seconds: float | None = None
    text: str = ""


class StillFaulty(Value, frozen=True):
    """The node's own agent reports a fault after the reboot that should have repaired it."""

    fault: Faulty


class NotRebooted(Value, frozen=True):
    """EC2 did not accept the node's reboot in time, or the agent did not reconnect in time after it (`is_accepted`)."""

    is_accepted: bool
    seconds: float
    because: Reason


class NotJoined(Value, frozen=True):
    """The agent of a new instance did not connect in time."""

    seconds: float


class Surplus(Value, frozen=True):
    """The fleet needs only `desired_count` nodes, so it terminates the idle node."""

    desired_count: int


class ReleasedToEnd(Value, frozen=True):
    """A person permitted the termination of a held node. `is_replaced`: its replacement was requested while held."""

    held: Reason
    is_replaced: bool = False


class KeptForInspection(Value, frozen=True):
    """The node failed, and the fleet keeps failed instances."""

    because: Reason


class NotKept(Value, frozen=True):
    """The node failed, and its group has no room to keep it for inspection."""

    because: Reason
    max_size: int
    needed_count: int
    held_count: int


class AutomationPaused(Value, frozen=True):
    """A person paused all automatic actions. `text` names the person and the reason."""

    text: str


class Drifted(Value, frozen=True):
    """Settings of the Auto Scaling group differ from the registered settings."""

    drift: tuple[str, ...]


class CannotBeDeleted(Value, frozen=True):
    """The fleet is being deleted, but its Auto Scaling group has a MinSize above 0."""

    min_size: int


class Blind(Value, frozen=True):
    """Most of the fleet's agents are silent although EC2 reports their instances as running."""


class ReplacementLimit(Value, frozen=True):
    """The hourly limit of replacements delays the replacement of nodes."""

    node_ids: tuple[str, ...]
    recent_count: int
    limit: int


class JoinsFail(Value, frozen=True):
    """The agents of the newest `count` instances did not connect in time."""

    count: int
    patience_seconds: float


class LaunchesFail(Value, frozen=True):
    """The group's launches fail or are suspended. `text` and `suspension` are AWS's reasons."""

    text: str = ""
    retry_at: float | None = None
    """Unix seconds of Everstep's next attempt."""
    suspension: str | None = None
    is_suspension_administrative: bool = False


class LacksInstances(Value, frozen=True):
    """The fleet waits for instances, because launches fail."""

    missing_count: int
    because: LaunchesFail


class Keeps(Value, frozen=True):
    """The fleet has what it needs."""

    desired_count: int
    spare_probability: float | None = None


class RefusalKind(StrEnum):
    """The reason why the fleet cannot fulfil a request for a node."""

    ENDING = "ending"
    NOT_JOINED = "not_joined"
    REBOOTING = "rebooting"
    OTHER_REQUEST = "other_request"
    FLEET_DELETED = "fleet_deleted"
    FLEET_FROZEN = "fleet_frozen"
    HELD = "held"
    WORKS = "works"
    TAKEN_OVER = "taken_over"
    NO_REPLACEMENT = "no_replacement"


class RequestRefused(Value, frozen=True, tag="Refused"):
    """The fleet cannot fulfil a request for a node."""

    why: RefusalKind
    node_id: str
    state: NodeState
    request: NodeRequest | None = None
    job: str = ""
    by: str = ""
    max_node_count: int = 0
    frozen: tuple[Reason, ...] = ()


class FleetFrozen(Value, frozen=True):
    """The fleet terminates nothing, so the roll waits."""


class JobBusy(Value, frozen=True):
    """A job of the fleet is in a state in which no node may leave it."""

    job: str
    state: JobState


class JobUnsettled(Value, frozen=True):
    """A job of the fleet has an open incident, or has committed no step since its last launch."""

    job: str


class ShardUnprotected(Value, frozen=True):
    """A shard of a job of the fleet has fewer copies than planned. `text` is the agent's reason, if it reported one."""

    job: str
    rank: int
    missing: tuple[str, ...] = ()
    text: str = ""


class TooFewAvailable(Value, frozen=True):
    """More nodes are out of service than the roll permits."""

    unavailable_count: int
    max_unavailable: int


class NotInService(Value, frozen=True):
    """The next node of a roll is not in service."""

    node_id: str
    state: NodeState


Obstacle: TypeAlias = (
    RequestRefused | FleetFrozen | JobBusy | JobUnsettled | ShardUnprotected | TooFewAvailable | NotInService
)


class Rolls(Value, frozen=True):
    """The roll replaces or reboots nodes now, or waits while it is paused."""

    reboots: bool
    node_ids: tuple[str, ...]
    is_paused: bool = False


class RollWaits(Value, frozen=True):
    """The roll does not begin with another node."""

    because: Obstacle


class RollStopped(Value, frozen=True):
    """A person stopped the roll."""

    finished_count: int
    node_count: int


class RollDone(Value, frozen=True):
    """The roll has replaced or rebooted all nodes."""

    reboots: bool
    node_count: int


Reason: TypeAlias = (
    Fact
    | Happened
    | WorksFor
    | JobQueued
    | GivenUp
    | Silent
    | StillFaulty
    | NotRebooted
    | NotJoined
    | Surplus
    | ReleasedToEnd
    | KeptForInspection
    | NotKept
    | AutomationPaused
    | Drifted
    | CannotBeDeleted
    | Blind
    | ReplacementLimit
    | JoinsFail
    | LaunchesFail
    | LacksInstances
    | Keeps
    | Rolls
    | RollWaits
    | RollStopped
    | RollDone
    | Obstacle
)
NOTHING = Recorded()

resolve(Reason)


def origins(reason: Reason) -> Iterator[Reason]:
    """Yield a reason, then the reason behind it, down to the first reason."""
    known: Reason | None = reason
    while known is not None:
        yield known
        match known:
            case GivenUp(because=given_up):
                known = None if isinstance(given_up, Tries) else given_up
            case NotRebooted(because=earlier) | ReleasedToEnd(held=earlier):
                known = earlier
            case KeptForInspection(because=earlier) | NotKept(because=earlier):
                known = earlier
            case _:
                known = None
