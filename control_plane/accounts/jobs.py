"""The sentences for the reason of a job's state, Everstep's response to a failure, and the messages of events.

Invariant: pure. A sentence about a running job contains no elapsed time, so that it changes only with the facts.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final, assert_never

from control_plane.accounts import out_of_memory
from control_plane.accounts.facts import hang_proof, ranks_words, sentence, sentences, standstill
from control_plane.core.incidents import SOURCES
from control_plane.core.observed import incidents, reasons
from control_plane.core.observed.facts import Fact, Recorded
from control_plane.core.observed.fleets import FleetJob
from control_plane.core.observed.incidents import CheckpointWaitKind
from control_plane.core.observed.jobs import Suspicion
from control_plane.core.observed.specs import JobSettings
from control_plane.core.queue import QueueSchedule
from everstep.protocol.ids import RunId

_TRAINS: Final = "trains; "
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


def reason(of: reasons.JobReason) -> str:
    """Return the reason for a job's state as a clause. It has several lines if the job failed by its script."""
    match of:
        case str():
            return of
        case reasons.Told():
            return _told(of)
        case reasons.Waits():
            return f"{of.aim}{'; '.join(_waits(of))}"
        case reasons.AwaitsFirstStep():
            return f"waits for the first step after step {of.step}"
        case reasons.Restarts():
            return f"{sentence(of.because)}; {response(of.response)}"
        case reasons.StandsStill():
            phases = ", ".join(of.phases)
            return (
                f"{_TRAINS}{ranks_words(of.stuck)} made no progress in {phases} for longer than "
                f"{of.limit_seconds:g} s; the stacks are in the job's events"
            )
        case reasons.WaitsDeliberately():
            waits = "waits" if len(of.waiting.ranks) == 1 else "wait"
            phases = ", ".join(of.phases)
            return (
                f"{_TRAINS}{ranks_words(of.waiting)} {waits} deliberately (phase {phases}), for at most "
                f"{of.limit_seconds:g} s"
            )
        case reasons.StoppedToLeave():
            return f"stopped at step {of.step}: {checkpoint_wait(of.wait)}"
        case incidents.PausesWithoutNodes() | Recorded():
            return response(of)
        case reasons.GaveUp():
            return repeated(of.because)
        case _:
            assert_never(of)


def headline(of: reasons.JobReason) -> str:
    """Return the first line of the reason for a job's state."""
    return reason(of).partition("\n")[0]


def reason_now(of: reasons.JobReason, suspicion: Suspicion | None, now: float) -> str:
    """Return the reason for a job's state, with the age and the limit of a suspected hang. `now`: Unix seconds."""
    words = reason(of)
    if suspicion is None or not suspicion.limit_seconds:
        return words
    still = f"no progress for {max(now - suspicion.since, 0.0):.0f} s (limit {suspicion.limit_seconds:.0f} s)"
    return f"{still}: {words.removeprefix(_TRAINS)}"


def waiting(of: reasons.JobReason) -> str | None:
    """Return for what a job waits before its ranks train again, or None if it does not wait."""
    match of:
        case reasons.Waits(aim=""):
            parts = (part for part in _waits(of) if part.startswith("waits"))
            return next((part.partition(": ")[0] for part in parts), None)
        case reasons.AwaitsFirstStep():
            return reason(of)
        case _:
            return None


def message(of: reasons.Message) -> str:
    """Return the message of an event."""
    match of:
        case str():
            return of
        case reasons.Told():
            return _told(of)
        case reasons.StateChanged():
            return f"{of.before} → {of.after}: {reason(of.because)}"
        case reasons.GenerationEnded():
            return f"launch {of.generation} ended: {sentences(of.because)}"
        case reasons.HangFound():
            parts = (standstill(of.fact), hang_proof(of.fact), "" if of.alone is None else sentence(of.alone))
            return "; ".join(part for part in parts if part)
        case incidents.Tries():
            return response(of)
        case _:
            assert_never(of)


def queue_words(plan: QueueSchedule, run: RunId) -> str:
    """Return why a queued job waits: its position, the jobs ahead, and the numbers of nodes.

    Members of the job's project read this text. The text names jobs of this project. It only counts jobs of other
    projects.
    """
    place = plan.place_of(run)
    if place is None:
        return "it starts next"
    job = plan.waiting[place - 1]
    if run in plan.limited:
        held = f"{job.project} has a quota of {job.quota} nodes of this fleet and holds {plan.limited[run]}"
        return f"waits for its project's quota: {held}, the job needs {_needs_words(job)}"
    ahead = plan.ahead_of(run)
    named = [f"{other.job} (priority {other.priority})" for other in ahead if other.project == job.project][:3]
    more = len(ahead) - len(named)
    behind = (
        f", behind {' and '.join([', '.join(named)] * bool(named) + [f'{more} more'] * bool(more))}" if ahead else ""
    )
    pausing = sum(head.run == run for head in plan.giving_way.values())
    paused = f"; {pausing} jobs of lower priority are being paused" if pausing else ""
    shrinking = sum(each.head.run == run for each in plan.reductions.values())
    shrunk = f"; {shrinking} elastic jobs return nodes" if shrinking else ""
    figures = f"needs {_needs_words(job)}; jobs use {plan.capacity - plan.free_count} of at most {plan.capacity} nodes"
    return f"place {place} of {len(plan.waiting)} in the queue{behind}: {figures}{paused}{shrunk}"


def _needs_words(job: FleetJob) -> str:
    """Return the number of nodes that a queued job needs, and the number that suffices after `patience_seconds`."""
    is_elastic = 0 < job.least_node_count < job.node_count
    return f"{job.node_count} nodes" + (f" (or {job.least_node_count} after its patience)" if is_elastic else "")


def forecast_words(spec: JobSettings) -> str:
    """Return a sentence about the possible numbers of nodes of an elastic job, for the API's preview of a new job.

    Empty if the job can have only one number of nodes.
    """
    words: list[str] = []
    if spec.least_node_count < spec.node_count:
        words.append(
            f"may start and continue on {spec.least_node_count} of {spec.node_count} nodes after "
            f"{spec.patience_seconds:g} s without capacity"
        )
    if spec.most_node_count > spec.node_count:
        words.append(f"may grow to {spec.most_node_count} nodes")
    return "; ".join(words)


def restore_reason(from_step: int | None, source: str | None) -> str:
    """Return why training resumes from a step of an incident."""
    if from_step is None:
        return "Everstep plans the launch when every node is prepared"
    how = "starts from the script's own initial state"
    if source is not None:
        how = f"restores step {from_step} from {SOURCES[source]}"
    return f"{how}: the newest step that every rank can get"


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
        case _:
            assert_never(of)


def because(of: Fact | incidents.Tries) -> str:
    """Return why a job gave up a node."""
    return response(of) if isinstance(of, incidents.Tries) else sentence(of)


def _told(of: reasons.Told) -> str:
    return "".join(part if isinstance(part, str) else sentence(part) for part in of.parts)


def _waits(of: reasons.Waits) -> list[str]:
    waits = [of.before] if of.before else []
    if of.missing_count:
        nodes = f"waits for {of.missing_count} node{'s' if of.missing_count != 1 else ''}"
        waits.append(f"{nodes}: {of.text}" if of.text else nodes)
    if of.late:
        waits.append(f"waits for {', '.join(of.late)} to prepare")
    if of.unreachable:
        waits.append(f"waits for {', '.join(of.unreachable)}, which may still hold shards of the committed step")
    return waits


def _change(of: incidents.Change) -> str:
    what = f"step {of.skipped_step} is skipped" if of.node_id is None else f"{of.node_id} is replaced"
    part = "state" if of.node_id is None else "node"
    return f"{what} once, to find out whether the {part} or the script is at fault"


def repeated(of: incidents.Repeated | Recorded) -> str:
    """Return how a job failed repeatedly. The last lines of the failed rank follow."""
    if isinstance(of, Recorded):
        return of.text
    how = _failure(of.failure)
    if of.since is not None:
        which = "the last" if of.alike_count == 1 else f"the last {of.alike_count} are identical"
        since = f"{datetime.fromtimestamp(of.since, UTC):%H:%M:%S} UTC"
        limit = of.failure.max_boundary
        return f"{of.count} failures occurred since {since} without a step beyond {limit}, {which}: {how}"
    where = "before its first step" if of.failure.step <= 0 else f"after step {of.failure.step}"
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
        how = f"{of.exit_class.value} ({of.code})"
    return f"{how}\n{of.last_lines}".rstrip() if of.last_lines else how


def checkpoint_wait(of: incidents.CheckpointWait) -> str:
    """Return whether a job that stopped to give up nodes waits for its checkpoint, and why."""
    upload = of.upload_seconds
    took = "no upload was measured" if upload is None else f"the last one took {_seconds(upload)}"
    return _CHECKPOINT_WAITS[of.why].format(step=of.step, took=took, left=_seconds(of.remaining_seconds))


def _seconds(seconds: float) -> str:
    return f"{max(0.0, seconds):.0f} s"
