"""Errors of the control plane's core and loops.

Rooms with outside faces add their own trees: `cloud/errors.py`, `api/errors.py`.

    ControlPlaneError
    ├── InvalidTransition     a state was left by an event that its table does not have   programmer error: ends the pass
    ├── ImpossiblePlacement   the copies do not fit the nodes                             permanent: shown to the user
    ├── TooManyCases          an exact probability would take too long to count           permanent: shown as not known
    └── InvalidTimeouts       the ladder of timeouts contradicts itself                   permanent: the server does not start

Whether to retry is a property of the type (`retryable`), never of the call site.
"""

from __future__ import annotations

from typing import ClassVar


class ControlPlaneError(Exception):
    """Base of all errors that the control plane raises itself."""

    retryable: ClassVar[bool] = False


class InvalidTransition(ControlPlaneError):
    """A state machine was asked for a transition that its table does not have.

    Args:
        entity: what it is about, as `job gpt` or `node i-0abc`.
        state: the state it is in.
        event: the event that has no place there.
        story: how it came to that state, one sentence each.
    """

    def __init__(self, entity: str, state: str, event: str, story: tuple[str, ...] = ()) -> None:
        told = "; ".join(story)
        super().__init__(f"{entity}: no transition from {state} by {event}" + (f" ({told})" if told else ""))
        self.entity = entity
        self.state = state
        self.event = event
        self.story = story


class ImpossiblePlacement(ControlPlaneError):
    """There are fewer nodes than copies, or no copy at all is asked for."""


class TooManyCases(ControlPlaneError):
    """What an exact probability is counted from are more cases than there is time and memory for."""


class InvalidTimeouts(ControlPlaneError):
    """A rung of the ladder is not positive or not above the one below it."""
