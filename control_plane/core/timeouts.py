"""The ladder of timeouts (design §3): every waiting time of the system, derived from how fast a failure is to be detected.

Invariant: each rung is above the one below it, so that a lower layer has always given up before a higher one acts.
"""

from __future__ import annotations

from typing import NamedTuple

from control_plane.errors import InvalidTimeouts
from everstep.protocol.plan import Timeouts


class _Rung(NamedTuple):
    name: str
    times: int
    """Of `detection_seconds`."""
    meaning: str
    reason: str
    """Why it stands where it does."""


_RUNGS = (
    _Rung("lease", 1, "an agent that says nothing for this long is silent", "this is what detecting a failure means"),
    _Rung(
        "holder_deadline", 1, "a holder that does not acknowledge leaves the view", "commits wait for a holder no longer than the fleet for its agent"
    ),
    _Rung("prepare_deadline", 2, "who has not promised by then is absent or unreachable", "a member that was only late has been heard again by then"),
    _Rung(
        "coordinator_deadline",
        5,
        "a coordinator not back by then is replaced by a new generation",
        "an agent restarts in less; a new generation takes two prepares and restarts every rank",
    ),
    _Rung("final_round", 10, "the last snapshot of a stopping job may take this long", "a coordinator may be lost and replaced meanwhile"),
    _Rung(
        "stall",
        10,
        "a rank that stands still for this long, and 5 times as long as ever, has its stacks taken",
        "a look harms nobody, and a final round has ended by then",
    ),
    _Rung(
        "exclude",
        20,
        "T_max: one class of evidence that lasts this long excludes a node",
        "nothing that passes by itself, a stop included, lasts so long",
    ),
    _Rung(
        "hang",
        30,
        "a rank that stands still for this long, its stacks unchanged and its CPU idle, is restarted",
        "who waits for a lost node stands still, too: that node is excluded before",
    ),
    _Rung(
        "blind_wait",
        40,
        "an unreachable node is waited for this long before S3 is used",
        "evidence against the node would be complete; S3 costs steps, waiting costs time",
    ),
    _Rung(
        "new_phase",
        200,
        "a phase of unknown length, and each start, may take this long before anybody looks",
        "compiling, downloading and first evaluations take minutes; torch gives a collective 600 s",
    ),
)
"""Source: design §3, its last line but one; the only place."""


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
    return check(Timeouts(detection_seconds=detection_seconds, **{f"{rung.name}_seconds": detection_seconds * rung.times for rung in _RUNGS}))


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
    for rung in _RUNGS:
        seconds: float = getattr(timeouts, f"{rung.name}_seconds")
        if not below <= seconds < float("inf"):
            raise InvalidTimeouts(f"{rung.name}_seconds is {seconds:g}, below {below_name}_seconds, which is {below:g}")
        below_name, below = rung.name, seconds
    return timeouts


def grace_seconds(timeouts: Timeouts) -> float:
    """Return how long after its start a control plane takes no silence for evidence: agents need that long to find it again."""
    return timeouts.lease_seconds + 2 * timeouts.detection_seconds


def rungs(timeouts: Timeouts) -> tuple[str, ...]:
    """Return the ladder as lines to print at start, lowest rung first."""
    return tuple(f"{getattr(timeouts, f'{rung.name}_seconds'):>8.1f} s  {rung.name:<20}  {rung.meaning}" for rung in _RUNGS)


def explained(timeouts: Timeouts) -> tuple[str, ...]:
    """Return the ladder as lines for who asks why each rung stands where it does, lowest rung first."""
    knob = "the one knob: how soon a failure is to be noticed; all others are multiples of it"
    first = f"{timeouts.detection_seconds:>8.1f} s  {'detection_seconds':<20}  {knob}"
    told = zip(rungs(timeouts), _RUNGS, strict=True)
    return first, *(line for said, rung in told for line in (said, f"{'':>12}{rung.times} × detection_seconds: {rung.reason}"))
