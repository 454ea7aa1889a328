"""Errors that the control plane's core and loops raise.

The API and the cloud client define further errors: `api/errors.py`, `cloud/errors.py`.

    ControlPlaneError
    ├── InvalidTransition     a state machine has no transition for an event   programmer error: ends a loop's pass
    ├── ImpossiblePlacement   numbers of copies, nodes and losses do not fit   permanent: shown to the user
    ├── TooManyCases          an exact probability needs too many cases        permanent: shown as unknown
    ├── ImplausibleClock      the clock contradicts the stored times           permanent: a backup is not restored
    └── InvalidTimeouts       the timeouts contradict each other               permanent: the server does not start
"""

from __future__ import annotations

from typing import ClassVar


class ControlPlaneError(Exception):
    """Base class of the errors of the core and the loops."""

    retryable: ClassVar[bool] = False


class InvalidTransition(ControlPlaneError):
    """A state machine received an event for which its current state has no transition.

    `entity` is for example `job gpt`. `story` contains its earlier transitions, one sentence each.
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
    """The copies, parity groups or lost nodes do not fit the number of nodes."""


class TooManyCases(ControlPlaneError):
    """An exact probability would need more cases than the limit permits."""


class ImplausibleClock(ControlPlaneError):
    """The machine's clock contradicts stored times, such as a backup's."""


class InvalidTimeouts(ControlPlaneError):
    """A timeout is not positive, or shorter than another one that must expire before it."""
