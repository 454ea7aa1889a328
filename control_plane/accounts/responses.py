"""The sentences for Everstep's responses to failures: what it does, and for what it waits.

Invariant: pure. A sentence contains no elapsed time, so that it changes only with the facts.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final, assert_never

from control_plane.accounts import out_of_memory
from control_plane.accounts.facts import sentence
from control_plane.core.job.store_wait import STAND_ASIDE_SECONDS
from control_plane.core.observed import incidents
from control_plane.core.observed.facts import Fact, Recorded
from control_plane.core.observed.incidents import CheckpointWaitKind, StoreWaitStage
from control_plane.core.tracebacks import exception_class
from everstep.protocol.agent_messages import Obstacle

_NO_PACKAGE: Final = "Name missing packages in a requirements file of the source (--requirements)"
_ADVICE: Final[Mapping[str, str]] = {"ImportError": _NO_PACKAGE, "ModuleNotFoundError": _NO_PACKAGE}
_CHECKPOINT_WAITS: Final[Mapping[CheckpointWaitKind, str]] = {
    CheckpointWaitKind.NO_STEP: "there was no step to keep",
    CheckpointWaitKind.IN_S3: "step {step} is in S3",
    CheckpointWaitKind.HELD_ELSEWHERE: "the remaining nodes hold its last step",
    CheckpointWaitKind.NO_TIME: "no time remained for its checkpoint",
    CheckpointWaitKind.TOO_SLOW: "did not wait for its checkpoint: {took}, {left} remained",
    CheckpointWaitKind.GAVE_UP: "stopped waiting for its checkpoint: {took}",
    CheckpointWaitKind.SOLE_HOLDER: "waits for its checkpoint, because only the departing nodes hold its last step; "
    "{left} remained",
    CheckpointWaitKind.NO_REPLACEMENT: "waits for its checkpoint while no replacement is ready; {left} remained",
    CheckpointWaitKind.IN_TIME: "waits for its checkpoint: {took}, {left} remained",
}
_OBSTACLES: Final[Mapping[Obstacle, str]] = {
    Obstacle.DENIED: "a store denies access",
    Obstacle.NO_CREDENTIALS: "there are no AWS credentials",
    Obstacle.THROTTLED: "a store throttles the nodes",
    Obstacle.NO_ANSWER: "a store does not answer",
    Obstacle.GARBLED: "a store's answers cannot be read",
    Obstacle.NO_BUCKET: "a bucket does not exist",
    Obstacle.REFUSED: "a store rejects the request",
}
_STORE_WAITS: Final[Mapping[StoreWaitStage, str]] = {
    StoreWaitStage.LOADS: "waits: {why}; its nodes try again all the time; {keeps}",
    StoreWaitStage.RETRIES: "waits: {why}; tries again at {at}; {keeps}",
    StoreWaitStage.PAUSES: "paused while it waited: {why}; ResumeTrainingJob resumes it",
    StoreWaitStage.GIVES_UP: "gives its nodes back, because {why}; it queues again in {minutes:g} minutes and restores "
    "step {step}",
}


def response(of: incidents.Response) -> str:
    """Return Everstep's response to a failure as a clause."""
    match of:
        case Recorded(text=text):
            return text
        case incidents.RestartsRanks(replaced=()):
            return "restart all ranks on the same nodes"
        case incidents.RestartsRanks(replaced=lost):
            return f"replace {', '.join(lost)} and restart all ranks"
        case incidents.LeavesNodes():
            names = ", ".join(of.node_ids)
            aim = f"return {names}" if of.is_return else f"move the ranks of {names} to other nodes"
            return f"stop at an agreed step and {aim}" + ("" if of.wait is None else f"; {checkpoint_wait(of.wait)}")
        case incidents.Tries():
            return f"{_change(of.change)}: {repeated(of.because)}"
        case incidents.Shrinks():
            return f"continue on {of.count} of {of.node_count} nodes; grow when nodes return"
        case incidents.Grows():
            return f"stop at an agreed step and continue on more than {of.count} nodes"
        case incidents.GivesUp(after=after):
            return f"{response(after)}; then give the job up"
        case incidents.PausesWithoutNodes():
            start = f"the checkpoint of step {of.step}" if of.step > 0 else "its beginning: there is no checkpoint"
            count = of.lost_step_count
            cost = f"; {count} committed steps were only in the memory of its nodes and are repeated" if count else ""
            return f"paused while it waited for a node, ResumeTrainingJob resumes it from {start}{cost}"
        case incidents.AwaitsStore():
            return store_wait(of)
        case _:
            assert_never(of)


def because(of: Fact | incidents.Tries) -> str:
    """Return why a job gave up a node."""
    return response(of) if isinstance(of, incidents.Tries) else sentence(of)


def store_wait(of: incidents.AwaitsStore) -> str:
    """Return why a restore waits for a store, and what the job does meanwhile."""
    keeps = "keeps its nodes, because only their memory has the newest step"
    return _STORE_WAITS[of.stage].format(
        why=f"{_OBSTACLES[of.wait.obstacle]} since {clock(of.wait.since)} ({of.wait.detail})",
        keeps=keeps if of.until is None else f"keeps its nodes until {clock(of.until)}",
        at=clock(of.wait.next_attempt_at),
        minutes=STAND_ASIDE_SECONDS / 60,
        step=of.step,
    )


def clock(at: float) -> str:
    """Return a Unix time as the time of day, for example `12:30:05 UTC`."""
    return f"{datetime.fromtimestamp(at, UTC):%H:%M:%S} UTC"


def _change(of: incidents.Change) -> str:
    what = f"step {of.skipped_step} is skipped" if of.node_id is None else f"{of.node_id} is replaced"
    part = "state" if of.node_id is None else "node"
    return f"{what} once, to find out whether the {part} or the script is at fault"


def repeated(of: incidents.Repeated | Recorded) -> str:
    """Return how a job failed repeatedly. The last lines of the failed rank follow."""
    if isinstance(of, Recorded):
        return of.text
    if of.lost:
        nodes = ", ".join(dict.fromkeys(of.lost))
        return (
            f"{of.count} launches lost a node before a new step ({nodes}), and neither AWS nor an agent named a cause. "
            "The job itself is probably the cause"
        )
    how = _failure(of.failure)
    if of.since is not None:
        which = "the last" if of.alike_count == 1 else f"the last {of.alike_count} are identical"
        limit = of.failure.max_boundary
        return f"{of.count} failures occurred since {clock(of.since)} without a step beyond {limit}, {which}: {how}"
    where = "before its first step" if of.failure.step <= 0 else f"after step {of.failure.step}"
    if of.count == 1:
        return f"the job failed {where}: {how}"
    tried = "".join(f", also {_tried(each)}" for each in of.tried)
    return f"the same failure occurred {of.count} times {where}{tried}: {how}"


def _tried(of: incidents.Change) -> str:
    return f"without {of.node_id}" if of.node_id is not None else f"from an older state than step {of.skipped_step}"


def _failure(of: incidents.FailureRecord) -> str:
    if of.is_hang:
        return "its ranks were hung"
    if of.exit_class is None:
        how = "a node failed to load its shards"
    elif of.memory is not None and of.rank is not None and of.node_id is not None:
        how = f"{out_of_memory.sentence(of.rank, of.node_id, of.memory)}; {out_of_memory.advice(of.memory)}"
    else:
        how = _ended(of)
    return f"{how}\n{of.last_lines}".rstrip() if of.last_lines else how


def _ended(of: incidents.FailureRecord) -> str:
    who = "a rank" if of.rank is None or of.node_id is None else f"rank {of.rank} on {of.node_id}"
    if of.code < 0:
        return f"{who} ended first, with {_signal_name(-of.code)}"
    place = f" ({of.error_place})" if of.error_place else ""
    error = f": {of.error}{place}" if of.error else ""
    hint = f". {_ADVICE[name]}" if (name := exception_class(of.error)) in _ADVICE else ""
    return f"{who} ended first, with exit code {of.code}{error}{hint}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def checkpoint_wait(of: incidents.CheckpointWait) -> str:
    """Return whether a job that stopped to give up nodes waits for its checkpoint, and why."""
    upload = of.upload_seconds
    took = "no upload was measured" if upload is None else f"the last one took {_seconds(upload)}"
    return _CHECKPOINT_WAITS[of.why].format(step=of.step, took=took, left=_seconds(of.remaining_seconds))


def _seconds(seconds: float) -> str:
    return f"{max(0.0, seconds):.0f} s"
