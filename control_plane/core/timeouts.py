"""The ladder of timeouts (docs/design.md#timeouts): every waiting time of the system, derived from how fast a failure is to be detected.

Limits that do not derive from it are here, too, where the control plane has them, with the reason: they are times of
AWS, of devices or of people.

Invariant: each rung is above the one below it, so that a lower layer has always given up before a higher one acts; a
fixed limit that has to outlast a rung does.
"""

from __future__ import annotations

from typing import NamedTuple

from control_plane.errors import InvalidTimeouts
from everstep.protocol.agent_messages import DEVICE_SILENT_SECONDS
from everstep.protocol.plan import Timeouts


class _Rung(NamedTuple):
    name: str
    times: int
    """Of `detection_seconds`."""
    meaning: str
    reason: str
    """Why it stands where it does."""


class _Fixed(NamedTuple):
    name: str
    seconds: float
    meaning: str
    reason: str
    """Why it does not follow `detection_seconds`."""
    outlasts: str = ""
    """The rung that it must not lie below; empty: it stands in no order with any."""


HELLO_SECONDS = 10.0
SEND_SECONDS = 10.0
FORGET_SECONDS = 30.0
HOLD_SECONDS = 600.0
REBOOT_SECONDS = 900.0
JOIN_SECONDS = 900.0
GANG_PATIENCE_SECONDS = 900.0

FIXED = (
    _Fixed(
        "hello",
        HELLO_SECONDS,
        "a connection that says nothing by then is closed",
        "nobody is known by it yet, so that nothing is detected by it",
    ),
    _Fixed(
        "send",
        SEND_SECONDS,
        "an agent that takes nothing for this long loses its line, and dials again",
        "its silence is counted from its last word, whichever line that came by",
    ),
    _Fixed(
        "device_silent",
        DEVICE_SILENT_SECONDS,
        "a GPU's driver or a disk that does not answer for this long is a fault",
        "a driver that resets its GPU takes seconds, however soon anybody wants to know of a failure",
    ),
    _Fixed(
        "aws_forgotten",
        FORGET_SECONDS,
        "that an instance runs, or fails a check, is not known any more when AWS said it this long ago",
        "AWS is asked every second, and every 5 s about checks; throttled calls take their time",
    ),
    _Fixed(
        "hook_held",
        HOLD_SECONDS,
        "a terminating hook is held at most this long for a job's last step",
        "AWS's time, not ours; the last snapshot has to be through",
        outlasts="final_round",
    ),
    _Fixed(
        "reboot",
        REBOOT_SECONDS,
        "an instance that is not back by then is replaced",
        "bare metal and large GPU instances take a quarter of an hour",
    ),
    _Fixed(
        "join",
        JOIN_SECONDS,
        "an instance whose agent has not dialled in by then is replaced; each further one in a row is given "
        "twice as long as the one before",
        "a boot takes as long as a reboot; what keeps every instance from joining is not mended by new ones",
    ),
    _Fixed(
        "gang_patience",
        GANG_PATIENCE_SECONDS,
        "a gang to which no node has come for this long gives its nodes back",
        "instances take minutes to boot, a reboot as long as this",
    ),
)
"""Limits that stand where they stand whatever `detection_seconds` is."""

_RUNGS = (
    _Rung(
        "lease",
        1,
        "an agent that says nothing for this long is silent, and a server that does not answer it is left "
        "for the next one",
        "this is what detecting a failure means",
    ),
    _Rung(
        "holder_deadline",
        1,
        "a holder that does not acknowledge leaves the view",
        "commits wait for a holder no longer than the fleet for its agent",
    ),
    _Rung(
        "prepare_deadline",
        2,
        "who has not promised by then is absent or unreachable",
        "a member that was only late has been heard again by then",
    ),
    _Rung(
        "gone",
        5,
        "killed ranks that are still there after this long make their node unusable",
        "large processes give their memory back in seconds; waited for once to end and once to be gone, "
        "both before T_max",
    ),
    _Rung(
        "coordinator_deadline",
        5,
        "a coordinator not back by then is replaced by a new generation",
        "an agent restarts in less; a new generation takes two prepares and restarts every rank",
    ),
    _Rung(
        "final_round",
        10,
        "the last snapshot of a stopping job may take this long",
        "a coordinator may be lost and replaced meanwhile",
    ),
    _Rung(
        "welcome",
        10,
        "a rank that starts and finds no agent gives up after this long",
        "an agent that restarts is back before its coordinator would be replaced",
    ),
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
"""The only source of these figures; docs/reference/timeouts.md shows them."""


def ladder(detection_seconds: float) -> Timeouts:
    """Return all timeouts.

    Args:
        detection_seconds: how soon silence is noticed; every rung is a multiple of it.

    Returns:
        The ladder, as it goes to agents and into plans.

    Raises:
        InvalidTimeouts: `detection_seconds` is not a positive, finite number.
    """
    if not 0 < detection_seconds < float("inf"):
        raise InvalidTimeouts(f"detection_seconds is {detection_seconds}; it must be a positive number")
    return check(
        Timeouts(
            detection_seconds=detection_seconds,
            **{f"{rung.name}_seconds": detection_seconds * rung.times for rung in _RUNGS},
        )
    )


def check(timeouts: Timeouts) -> Timeouts:
    """Return the same ladder if no rung lies below the one before it, and no fixed limit below the rung that it has to outlast.

    Args:
        timeouts: seconds, of any origin.

    Returns:
        `timeouts`.

    Raises:
        InvalidTimeouts: two rungs, or a rung and a fixed limit, contradict each other, by name and figure.
    """
    below_name, below = "detection", timeouts.detection_seconds
    for rung in _RUNGS:
        seconds: float = getattr(timeouts, f"{rung.name}_seconds")
        if not below <= seconds < float("inf"):
            raise InvalidTimeouts(f"{rung.name}_seconds is {seconds:g}, below {below_name}_seconds, which is {below:g}")
        below_name, below = rung.name, seconds
    for limit in FIXED:
        if limit.outlasts and limit.seconds < (least := getattr(timeouts, f"{limit.outlasts}_seconds")):
            raise InvalidTimeouts(
                f"{limit.outlasts}_seconds is {least:g}, above {limit.name}, which is {limit.seconds:g} "
                "whatever else is"
            )
    return timeouts


def grace_seconds(timeouts: Timeouts) -> float:
    """Return how long after its start a control plane takes no silence for evidence: agents need that long to find it again."""
    return timeouts.lease_seconds + 2 * timeouts.detection_seconds


def rungs(timeouts: Timeouts) -> tuple[str, ...]:
    """Return the ladder as lines to print at start, lowest rung first."""
    return tuple(
        f"{getattr(timeouts, f'{rung.name}_seconds'):>8.1f} s  {rung.name:<20}  {rung.meaning}" for rung in _RUNGS
    )


def explained(timeouts: Timeouts) -> tuple[str, ...]:
    """Return the ladder as lines for who asks why each rung stands where it does, lowest rung first, and then the limits that follow no knob."""
    knob = "the one knob: how soon a failure is to be noticed; all others are multiples of it"
    first = f"{timeouts.detection_seconds:>8.1f} s  {'detection_seconds':<20}  {knob}"
    told = zip(rungs(timeouts), _RUNGS, strict=True)
    ladder_lines = (
        line for said, rung in told for line in (said, f"{'':>12}{rung.times} × detection_seconds: {rung.reason}")
    )
    return first, *ladder_lines, *(line for limit in FIXED for line in _told(limit))


def _told(limit: _Fixed) -> tuple[str, str]:
    order = f"never below {limit.outlasts}; " if limit.outlasts else ""
    return f"{limit.seconds:>8.1f} s  {limit.name:<20}  {limit.meaning}", f"{'':>12}fixed: {order}{limit.reason}"
