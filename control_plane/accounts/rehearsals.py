"""The sentences about a job's rehearsals. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from control_plane.core.observed.rehearsals import NoResult, RehearsalOutcome
from everstep.protocol.rehearsals import RehearsalVerdict

_UNANSWERED: Final[Mapping[NoResult, tuple[str, str]]] = {
    NoResult.EARLIER_AGENT: (
        "the agent of {node_id} has an earlier release, which does not support rehearsals",
        "Update the agents of all nodes of the job, and request the rehearsal again.",
    ),
    NoResult.RANKS_ENDED: (
        "a failure interrupted two rehearsals in a row",
        "Rehearse later: everstep jobs rehearse. If the rehearsal itself fails, read the logs of the ranks.",
    ),
    NoResult.NOT_REPORTED: (
        "the ranks did not agree on a step, or did not report: their release is too old, or the job's steps are too "
        "short",
        "Request another rehearsal with `everstep jobs rehearse`.",
    ),
    NoResult.JOB_ENDED: ("the job ended before its ranks had repeated the steps", ""),
}
_WHAT: Final[Mapping[RehearsalVerdict, str]] = {
    RehearsalVerdict.UNSTABLE: "is not deterministic",
    RehearsalVerdict.UNPROVEN: "loses values of the script",
    RehearsalVerdict.DIFFERS: "does not repeat its steps",
}


def finding(result: RehearsalOutcome) -> str:
    """Return what a rehearsal found, or why it has no result: the rank's words, or a clause."""
    if result.unanswered is None:
        return result.message
    return _UNANSWERED[result.unanswered][0].format(node_id=result.node_id)


def advice(result: RehearsalOutcome) -> str:
    """Return what a person can do about a result. Empty if there is nothing to do."""
    return result.advice if result.unanswered is None else _UNANSWERED[result.unanswered][1]


def difference(result: RehearsalOutcome) -> str:
    """Return a clause about a result with a difference or with lost values, without the advice."""
    words = finding(result).rstrip(".")
    return f"a restart from step {result.step} {_WHAT[result.verdict]}: rank {result.rank}: {words}"


def ended(result: RehearsalOutcome) -> str:
    """Return the message of the event about a result."""
    match result.verdict:
        case RehearsalVerdict.PROVEN:
            what = f"repeated {result.steps} steps bit for bit, in {result.seconds:.1f} s"
            return f"a restart from step {result.step} {what}"
        case RehearsalVerdict.REFUSED:
            subject = "the job has not rehearsed" if result.rank is None else f"rank {result.rank} cannot rehearse"
            return f"{subject} a restart: {finding(result)}"
        case _:
            return f"{difference(result)}. {advice(result)}".strip()
