"""The ladder of timeouts (design §3): every waiting time of the system, derived from how fast a failure is to be detected.

Invariant: each rung is above the one below it, so that a lower layer has always given up before a higher one acts.
"""

from __future__ import annotations

from control_plane.errors import InvalidTimeouts
from everstep.protocol.plan import Timeouts

_RUNGS = (
    ("lease", 1, "an agent that says nothing for this long is silent"),
    ("holder_deadline", 1, "a holder that does not acknowledge leaves the view"),
    ("prepare_deadline", 2, "who has not promised by then is absent or unreachable"),
    ("coordinator_deadline", 5, "a coordinator not back by then is replaced by a new generation"),
    ("final_round", 10, "the last snapshot of a stopping job may take this long"),
    ("exclude", 20, "T_max: one class of evidence that lasts this long excludes a node"),
    ("blind_wait", 40, "an unreachable node is waited for this long before S3 is used"),
)
"""Name, multiple of `detection_seconds`, meaning. Source: design §3, its last line but one; the only place."""


def ladder(detection_seconds: float) -> Timeouts:
    """Return all timeouts.

    Args:
        detection_seconds: d of design §3; how soon silence is noticed.

    Returns:
        The ladder, as it goes to agents and into plans.

    Raises:
        InvalidTimeouts: `detection_seconds` is not a positive, finite number.
    """
    if not 0 < detection_seconds < float("inf"):
        raise InvalidTimeouts(f"detection_seconds is {detection_seconds}; it must be a positive number")
    return check(Timeouts(detection_seconds=detection_seconds, **{f"{name}_seconds": detection_seconds * times for name, times, _ in _RUNGS}))


def check(timeouts: Timeouts) -> Timeouts:
    """Return the same ladder if no rung lies below the one before it.

    Args:
        timeouts: seconds, of any origin.

    Returns:
        `timeouts`.

    Raises:
        InvalidTimeouts: two rungs contradict each other, by name and figure.
    """
    below_name, below = "detection", timeouts.detection_seconds
    for name, _, _ in _RUNGS:
        seconds: float = getattr(timeouts, f"{name}_seconds")
        if not below <= seconds < float("inf"):
            raise InvalidTimeouts(f"{name}_seconds is {seconds:g}, below {below_name}_seconds, which is {below:g}")
        below_name, below = name, seconds
    return timeouts


def grace_seconds(timeouts: Timeouts) -> float:
    """Return how long after its start a control plane takes no silence for evidence: agents need that long to find it again."""
    return timeouts.lease_seconds + 2 * timeouts.detection_seconds


def rungs(timeouts: Timeouts) -> tuple[str, ...]:
    """Return the ladder as lines to print at start, lowest rung first."""
    return tuple(f"{getattr(timeouts, f'{name}_seconds'):>8.1f} s  {name:<20}  {meaning}" for name, _, meaning in _RUNGS)
