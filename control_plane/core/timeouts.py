"""The ladder of timeouts: all timeouts (rungs) that are multiples of `detection_seconds` (docs/design.md#timeouts).

Invariant: no rung is shorter than the rung before it, so a lower layer gives up before a higher layer acts. A fixed
limit that names a rung in `outlasts` is at least as long as that rung.
"""

from __future__ import annotations

from typing import NamedTuple

from control_plane.errors import InvalidTimeouts
from everstep.protocol.agent_messages import DEVICE_SILENT_SECONDS
from everstep.protocol.plan import Timeouts


class _Rung(NamedTuple):
    name: str
    times: int
    """A multiple of `detection_seconds`."""
    meaning: str
    reason: str


class _Fixed(NamedTuple):
    name: str
    seconds: float
    meaning: str
    reason: str
    outlasts: str = ""
    """Name of a rung that must not be longer than this limit, or empty."""


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
        "the server closes a connection that has sent no hello by then",
        "the agent behind the connection is not identified yet, so the limit detects no failure",
    ),
    _Fixed(
        "send",
        SEND_SECONDS,
        "the server drops a connection on which a send has waited this long; the agent reconnects",
        "silence counts from the agent's last message on any connection, so the limit delays no detection",
    ),
    _Fixed(
        "device_silent",
        DEVICE_SILENT_SECONDS,
        "a GPU driver or a disk that has not answered for this long is a fault",
        "a driver needs seconds to reset its GPU, whatever the detection time is",
    ),
    _Fixed(
        "aws_forgotten",
        FORGET_SECONDS,
        "an instance state or status check from AWS that is older than this no longer counts",
        "the server polls states every second and checks every 5 s; throttled calls take longer",
    ),
    _Fixed(
        "hook_held",
        HOLD_SECONDS,
        "the server extends a terminating hook for at most this long, to save a job's last step",
        "AWS sets the hook's time; the last snapshot must complete within it",
        outlasts="final_round",
    ),
    _Fixed(
        "reboot",
        REBOOT_SECONDS,
        "an instance whose agent has not reconnected this long after a reboot is replaced",
        "bare metal and large GPU instances need up to 15 minutes to boot",
    ),
    _Fixed(
        "join",
        JOIN_SECONDS,
        "an instance whose agent has not connected by then is replaced; the limit doubles for each further "
        "instance in a row that fails to join",
        "a boot takes as long as a reboot; if every instance fails to join, more instances do not help",
    ),
    _Fixed(
        "gang_patience",
        GANG_PATIENCE_SECONDS,
        "an incomplete gang that has received no node for this long releases its nodes",
        "instances take minutes to boot, and a reboot may take this long",
    ),
)

_RUNGS = (
    _Rung(
        "lease",
        1,
        "an agent that has sent nothing for this long is silent; an agent whose server has not answered for "
        "this long connects to the next server",
        "this is the detection time itself",
    ),
    _Rung(
        "holder_deadline",
        1,
        "a holder that has not acknowledged for this long leaves the view",
        "commits wait for a holder as long as the fleet waits for its agent",
    ),
    _Rung(
        "prepare_deadline",
        2,
        "a member that has not promised by then is absent or unreachable",
        "a member that was only late has reported again by then",
    ),
    _Rung(
        "gone",
        5,
        "killed ranks that still exist after this long make their node unusable",
        "large processes free their memory within seconds; the agent waits this long twice, for the exits "
        "and for the cleanup, and both waits end before T_max",
    ),
    _Rung(
        "coordinator_deadline",
        5,
        "a new generation replaces a coordinator that has not returned by then",
        "an agent restarts faster; a new generation costs two prepares and a restart of every rank",
    ),
    _Rung(
        "final_round",
        10,
        "limit for the last snapshot of a stopping job",
        "leaves time to lose and replace a coordinator",
    ),
    _Rung(
        "welcome",
        10,
        "a starting rank that finds no agent for this long gives up",
        "a restarting agent returns within coordinator_deadline",
    ),
    _Rung(
        "stall",
        10,
        "agents read the stacks of all ranks when a rank makes no progress for this long and for 5 times the "
        "job's longest time without progress so far",
        "reading stacks does not disturb training, and a final round has ended by then",
    ),
    _Rung(
        "exclude",
        20,
        "T_max: one class of evidence that lasts this long excludes a node",
        "temporary conditions, agreed stops included, end sooner",
    ),
    _Rung(
        "hang",
        30,
        "a rank without progress for this long, with unchanged stacks and an idle CPU, causes a restart",
        "ranks that wait for a lost node make no progress either; that node is excluded first",
    ),
    _Rung(
        "blind_wait",
        40,
        "a recovery waits this long for an unreachable node before it restores from S3",
        "the evidence against the node is complete by then; S3 costs steps, waiting costs time",
    ),
    _Rung(
        "new_phase",
        200,
        "a phase of unknown length, and each start, may take this long before agents read stacks",
        "compilation, downloads and first evaluations take minutes; torch allows a collective 600 s",
    ),
)
"""Shortest first. docs/reference/timeouts.md is generated from this table."""


def ladder(detection_seconds: float) -> Timeouts:
    """Return all timeouts that follow from the detection time.

    Raises InvalidTimeouts if `detection_seconds` is not a positive, finite number, or a rung exceeds a fixed limit.
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
    """Return the timeouts if they ascend, and none is longer than a fixed limit that must outlast it.

    Raises InvalidTimeouts, with both names and values, if a timeout is shorter than the one before it, or too long.
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
    """Return for how many seconds after its start a control plane ignores silence, so that agents can reconnect."""
    return timeouts.lease_seconds + 2 * timeouts.detection_seconds


def rungs(timeouts: Timeouts) -> tuple[str, ...]:
    """Return a line of text for each rung, shortest first. The server prints these lines at its start."""
    return tuple(
        f"{getattr(timeouts, f'{rung.name}_seconds'):>8.1f} s  {rung.name:<20}  {rung.meaning}" for rung in _RUNGS
    )


def explained(timeouts: Timeouts) -> tuple[str, ...]:
    """Return lines about all rungs and fixed limits, each with its reason, for `everstep server --print-timeouts`."""
    meaning = "the one setting: the time after which silence is noticed; all rungs are multiples of it"
    first = f"{timeouts.detection_seconds:>8.1f} s  {'detection_seconds':<20}  {meaning}"
    figures = zip(rungs(timeouts), _RUNGS, strict=True)
    ladder_lines = (
        line
        for figure, rung in figures
        for line in (figure, f"{'':>12}{rung.times} × detection_seconds: {rung.reason}")
    )
    return first, *ladder_lines, *(line for limit in FIXED for line in _fixed_lines(limit))


def _fixed_lines(limit: _Fixed) -> tuple[str, str]:
    order = f"never below {limit.outlasts}; " if limit.outlasts else ""
    return f"{limit.seconds:>8.1f} s  {limit.name:<20}  {limit.meaning}", f"{'':>12}fixed: {order}{limit.reason}"
