"""Errors that the control plane's core and loops raise.

The API and the cloud client define further errors: `api/errors.py`, `cloud/errors.py`.

    ControlPlaneError
    ├── InvalidTransition     a state machine has no transition for an event   programmer error: ends a loop's pass
    ├── ImpossiblePlacement   numbers of copies, nodes and losses do not fit   permanent: shown to the user
    ├── TooManyCases          an exact probability needs too many cases        permanent: shown as unknown
    ├── ImplausibleClock      the clock contradicts the stored times           permanent: a backup is not restored
    └── InvalidTimeouts       the timeouts contradict each other               permanent: the server does not start

The attribute `retryable` of each type says whether a caller may retry.
"""

from __future__ import annotations

from typing import ClassVar


class ControlPlaneError(Exception):
    """Base class of all errors that the control plane's core and loops raise."""

    retryable: ClassVar[bool] = False


class InvalidTransition(ControlPlaneError):
    """A state machine received an event for which its current state has no transition.

    Args:
        entity: the job or node, as `job gpt` or `node i-0abc`.
        state: state of the entity when the event arrived.
        event: the event without a transition.
        story: the entity's earlier transitions up to the current state, one sentence each.
    """

    def __init__(self, entity: str, state: str, event: str, story: tuple[str, ...] = ()) -> None:
        transitions = "; ".join(story)
        super().__init__(
            f"{entity}: no transition from {state} by {event}" + (f" ({transitions})" if transitions else "")
        )
        self.entity = entity
        self.state = state
        self.event = event
        self.story = story


class ImpossiblePlacement(ControlPlaneError):
    """The requested copies, parity groups or lost nodes do not fit the number of nodes."""


class TooManyCases(ControlPlaneError):
    """The exact computation of a recovery probability would have to examine more cases than its limit permits."""


class ImplausibleClock(ControlPlaneError):
    """The machine's clock shows a time that contradicts stored times, such as a time before a backup."""


class InvalidTimeouts(ControlPlaneError):
    """A timeout is not positive, or it is shorter than another timeout that must expire before it."""
