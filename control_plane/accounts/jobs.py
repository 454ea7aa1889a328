"""The sentences for the reason of a job's state, and for the messages of events.

Invariant: pure. A sentence about a running job contains no elapsed time, so that it changes only with the facts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, assert_never

from control_plane.accounts import reasons as causes
from control_plane.accounts import rehearsals
from control_plane.accounts.facts import hang_proof, ranks_words, sentence, sentences, standstill
from control_plane.accounts.responses import checkpoint_wait, clock, repeated, response
from control_plane.core.observed import incidents, reasons
from control_plane.core.observed.causes import Reason
from control_plane.core.observed.facts import Recorded
from control_plane.core.observed.fleets import FleetJob
from control_plane.core.observed.jobs import Suspicion
from control_plane.core.observed.reasons import JobFact
from control_plane.core.observed.specs import JobSettings
from control_plane.core.observed.steps import HolderState
from control_plane.core.queue import QueueSchedule
from everstep.protocol.agent_messages import FIRST_STEP_PHASE, OutputCause
from everstep.protocol.ids import FIRST_STEP, NO_STEP, NodeId, RunId
from everstep.protocol.options import KeptOption
from everstep.protocol.rank_messages import UnkeptCause

_TRAINS: Final = "trains; "
_NOTES: Final[Mapping[JobFact, str]] = {
    JobFact.GIVES_WAY: "gives way to {name} before it started",
    JobFact.AWAITS_RETURN_OF_NODES: "admitted; waits until its former nodes have returned to the fleet",
    JobFact.STANDS_ASIDE: "stands aside until {at}: its nodes did not come",
    JobFact.STANDS_ASIDE_FROM_STORE: "stands aside until {at}: a store was out of reach",
    JobFact.LACKS_NODES: "{lacks}",
    JobFact.LACKS_NODES_TO_START_SMALLER: "{lacks}; starts on at least {count} nodes after {seconds:g} s",
    JobFact.LACKS_NODES_AND_GIVES_BACK: "{lacks}; none came for {seconds:g} s: gives its nodes back",
    JobFact.LACKS_NODES_AND_CHANGES_FLEET: "{lacks}; goes to the fleet {name}",
    JobFact.LACKS_NODES_AND_CHANGES_FLEET_LATER: "{lacks}; goes to the fleet {name}, after {seconds:g} s: every fleet "
    "that the job names was asked",
    JobFact.LACKS_NODES_AND_SHRINKS: "continues{size}: {lacks}; none came within {seconds:g} s",
    JobFact.NEEDS_MORE_NODES: "needs at least {count} nodes to continue",
    JobFact.CONTINUES_SMALLER: "continues on {count} nodes after {seconds:g} s without capacity",
    JobFact.PREPARES: "asks its nodes to prepare",
    JobFact.PREPARES_SMALLER: "starts{on}; asks its nodes to prepare",
    JobFact.NUMBER_IN_USE: "an agent reports launch {generation}, so a higher number is issued",
    JobFact.AWAITS_AGENTS: "waits for an update of the agents on {nodes}, which cannot use Arguments, Module or Keep",
    JobFact.AWAITS_VERIFICATION: "waits for the verification of {name}, which nodes could not load",
    JobFact.INITIAL_STATE_LOST: "cannot start from {name}: it was deleted, or its objects are missing or damaged",
    JobFact.RESTORES: "restores step {step} from {source}",
    JobFact.STARTS_ANEW: "starts from the script's own initial state",
    JobFact.LOADS: "loads step {step}; {nodes} to come",
    JobFact.LOADED: "every node has verified its shards: ranks are started",
    JobFact.STARTED_EARLIER: "the ranks were started before the database was restored",
    JobFact.STARTS_RANKS: "starts its ranks; {nodes} to come",
    JobFact.TRAINS: "trains{on} from step {step}{grows}",
    JobFact.REHEARSES: "trains; repeats steps to prove that a restart repeats them",
    JobFact.MOVES_OFF: "trains; moves off {nodes} when a replacement is ready: {because}",
    JobFact.AGREES_TO_LEAVE: "agrees on a stop, to leave {nodes}: {because}",
    JobFact.AGREES_TO_GROW: "agrees on a stop, to grow with {nodes}",
    JobFact.RETURNS_FOR_JOB: "returns {nodes} to the fleet: for {name}",
    JobFact.RETURNS_ABOVE_LIMIT: "returns {nodes} to the fleet: MaxNodeCount is {count}",
    JobFact.PAUSES_FOR_JOB: "pauses for {name}",
    JobFact.PAUSES_FOR_USER: "pauses as a user asked",
    JobFact.AWAITS_CHECKPOINT_OF_PAUSE: "stopped at step {step} to pause; waits for its checkpoint",
    JobFact.PAUSED: "paused after step {step}, resumes by itself from {start}",
    JobFact.PAUSED_FOR_USER: "paused after step {step}, ResumeTrainingJob resumes it from {start}",
    JobFact.IS_PAUSED: "paused by a user; ResumeTrainingJob resumes it: {checkpoint}",
    JobFact.IS_PAUSED_BEFORE_START: "paused by a user before it started; ResumeTrainingJob puts it back into the queue",
    JobFact.USER_ASKS_TO_STOP: "a user asked it to stop",
    JobFact.MAX_RUNTIME_OVER: "MaxRuntimeInSeconds ({limit:g}) is over",
    JobFact.MAX_PENDING_TIME_OVER: "MaxPendingTimeInSeconds ({limit:g}) is over",
    JobFact.MAX_COST_SPENT: "MaxCostUsd ({limit:g}) is spent",
    JobFact.STOPS: "stops: {stop}",
    JobFact.KILLS: "stops {where}: {because}",
    JobFact.AWAITS_CHECKPOINT_OF_STOP: "stopped at step {step}; waits until its last checkpoint, outputs "
    "and logs are stored",
    JobFact.AWAITS_RANKS: "stopped at step {step}; waits for its ranks to end",
    JobFact.KILLED_AWAITS_CHECKPOINT: "stopped {where}: {because}; waits for its last checkpoint",
    JobFact.STOPPED: "stopped at step {step}: {stop}; {checkpoint}",
    JobFact.STOPPED_THEN_KILLED: "stopped at step {step}: {stop}; but {because}; {checkpoint}",
    JobFact.KILLED: "stopped ({stop}), but not at one step: {because}; {checkpoint}",
    JobFact.KILLED_EARLY: "stopped before a new step: {stop}; {checkpoint}",
    JobFact.STOPPED_WITHOUT_RANKS: "stopped: {stop}; no rank was running{cost}",
    JobFact.STOPPED_BEFORE_START: "stopped before it started: {stop}",
    JobFact.STOPPED_WHILE_PAUSED: "stopped while it was paused: {stop}",
    JobFact.AWAITS_LAST_CHECKPOINT: "every rank ended with success after step {step}; waits for its last checkpoint",
    JobFact.COMPLETED: "every rank ended with success after step {step}{warnings}",
    JobFact.CHECK_COMPLETED: "every rank of the determinism check ended with success. The log of rank 0 and the "
    "outputs (determinism.json) have the result; a script that never calls everstep.training.init() has none",
    JobFact.COMPLETED_WITHOUT_STEPS: "every rank ended with success, and none reported a step. Warning: nothing was "
    "kept. Call everstep.training.init() and session.boundary() in the script, or session.batches()",
    JobFact.TO_LEAVE: "leaves {nodes} at an agreed stop: {because}",
    JobFact.TO_LEAVE_FOR: "leaves {nodes} at an agreed stop, to continue on {takers}: {because}",
    JobFact.TO_GROW: "stops at an agreed step, to grow from {count} nodes with {nodes}",
    JobFact.TO_RETURN_FOR_JOB: "returns {nodes} to the fleet: for {name}, at an agreed stop",
    JobFact.TO_RETURN_ABOVE_LIMIT: "returns {nodes} to the fleet: MaxNodeCount is {count}, at an agreed stop",
    JobFact.GREW: "continues on {count} nodes instead of {node_count}",
    JobFact.SHRANK: "continues{on}: {because}",
    JobFact.SHRANK_BY_RETURN: "continues{on}: it returned nodes",
    JobFact.SHRANK_TO_LIMIT: "continues{on}: MaxNodeCount is {limit:g}",
    JobFact.STARTED_SMALLER: "starts{on}: {because}",
    JobFact.STEP_SKIPPED: "{because}, and no other node has it",
    JobFact.NODE_KEPT: "{nodes} stays: without it, only step {step} can be restored, not the committed step "
    "{committed_step}",
    JobFact.CHECKPOINT_DOUBTED: "the checkpoint of step {step}, launch {generation}, is verified, because {misread}",
    JobFact.CHECKPOINT_DAMAGED: "the checkpoint of step {step}, launch {generation}, is damaged: {misread}",
    JobFact.PROGRESSES_AGAIN: "every rank makes progress again, after {seconds:.0f} s",
    JobFact.KEEPS_STEPS_AGAIN: "nodes keep steps again, from step {step} on",
}
_PHASES: Final[Mapping[str, str]] = {
    "start": "running the script up to everstep.training.init",
    "restore": "restoring the state",
    FIRST_STEP_PHASE: "making the first step",
}
_UNKEPT: Final[Mapping[UnkeptCause, str]] = {
    UnkeptCause.LATE: "the ranks finish steps before their agents can propose them",
    UnkeptCause.STATE: "no restart could restore the state",
    UnkeptCause.CAPTURE: "the state cannot be copied",
    UnkeptCause.CHANGED: "the state changes while it is copied",
    UnkeptCause.LAYOUT: "the size of the state keeps changing",
    UnkeptCause.NO_SLOT: "no memory slot is ready",
    UnkeptCause.MEMORY: "the node has too little memory",
    UnkeptCause.SILENT_AGENT: "its agent does not answer",
    UnkeptCause.UNCONFIRMED: "no agent reports why",
}
SOURCES: Final[Mapping[str, str]] = {
    "local": "the memory of its own nodes",
    "peer": "the memory of other nodes",
    "parity": "parity in the memory of other nodes",
    "s3": "a checkpoint in S3",
}
_KEEP: Final = (
    "NotKept: the script wrote it outside of everstep.training.output_dir(). To keep such files, submit with "
    "`--keep PATTERN`"
)
_HOLDERS: Final[Mapping[HolderState, str]] = {
    HolderState.ENDED: "has ended, as AWS reports",
    HolderState.SILENT: "is silent",
    HolderState.LEFT: "left the job",
}


def reason(of: reasons.JobReason) -> str:
    """Return the reason for a job's state as a clause. It has several lines if the job failed by its script."""
    match of:
        case str():
            return of
        case reasons.Told():
            return _told(of)
        case reasons.JobNote():
            return _note(of)
        case reasons.Starting():
            more = f" and {of.other_count} more" if of.other_count else ""
            nodes = f"{', '.join(of.node_ids)}{more}"
            return f"{_PHASES[of.phase]} on {nodes}" + (f" ({of.seconds} s)" if of.seconds else "")
        case reasons.Unclear(doing=doing):
            does = f"trains{_on(doing)}" if isinstance(doing, reasons.JobNote) else "starts"
            does = reason(doing) if isinstance(doing, reasons.Starting) else does
            return f"{does}; {f'{_listed(of.silent)} silent' if of.silent else sentences(of.because)}"
        case reasons.Observes():
            return _observes(of)
        case reasons.AwaitsConsent():
            return _consent(of)
        case reasons.Waits():
            aim = "" if of.stop is None else f"stops ({_stop(of.stop)}) once it trains, so that no step is lost: "
            return f"{aim}{'; '.join(_waits(of))}"
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
        case incidents.PausesWithoutNodes() | incidents.AwaitsStore() | Recorded():
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
        case reasons.Waits(stop=None, consent=None):
            if of.missing_count:
                return _lacks(of.missing_count)
            return next(iter(_waits_for_members(of)), None)
        case reasons.Waits(stop=None) | reasons.AwaitsConsent():
            return "waits for a decision"
        case incidents.AwaitsStore(stage=incidents.StoreWaitStage.LOADS | incidents.StoreWaitStage.RETRIES):
            return "waits for a store that is out of reach"
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
        case reasons.JobNote():
            return _note(of)
        case reasons.Lapsed():
            return lapsed(of)
        case reasons.OutputsLost():
            names = (f"gen={each.generation}/rank={each.rank}/{each.path} ({each.cause})" for each in of.outputs)
            more = f" and {of.other_count} more" if of.other_count else ""
            is_unkept = any(each.cause is OutputCause.NOT_KEPT for each in of.outputs)
            advice = f". {_KEEP}" if is_unkept else ""
            return f"outputs are not in S3: {', '.join(names)}{more}{advice}"
        case reasons.StateChanged():
            return f"{of.before} → {of.after}: {reason(of.because)}"
        case reasons.GenerationEnded():
            return f"launch {of.generation} ended: {sentences(of.because)}"
        case reasons.HangFound():
            parts = (standstill(of.fact), hang_proof(of.fact), "" if of.alone is None else sentence(of.alone))
            return "; ".join(part for part in parts if part)
        case incidents.Tries():
            return response(of)
        case reasons.RepeatedStepDiffers():
            return (
                f"Warning: step {of.step} was repeated after a recovery, and the state of rank {of.rank} differs from "
                "the state before the recovery. The run is not deterministic, or a part of its state is not registered "
                "with init()"
            )
        case reasons.RollEnded():
            return "roll of the fleet"
        case reasons.RehearsalEnded():
            return rehearsals.ended(of.outcome)
        case reasons.ReplacedOptions(options=options):
            return kept_options(options)
        case _:
            assert_never(of)


def kept_options(options: Sequence[KeptOption]) -> str:
    """Return the event about options that a restored step replaced, and how to use the script's values instead."""
    differing = ", ".join(f"{each.name} is {each.kept} (script: {each.script})" for each in options)
    names = ", ".join(repr(name) for name in dict.fromkeys(each.name.rpartition(".")[2] for each in options))
    return (
        f"Training continues with options of the restored step that the script sets otherwise: {differing}. To use the "
        f"script's values, pass options_from_script=[{names}] where the script calls Everstep"
    )


def queue_words(plan: QueueSchedule, run: RunId) -> str:
    """Return why a queued job waits: its position, the jobs ahead, and the numbers of nodes.

    Members of the job's project read this text, so it names only jobs of this project and counts the others.
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
    is_elastic = 0 < job.least_node_count < job.node_count
    return f"{job.node_count} nodes" + (f" (or {job.least_node_count} after its patience)" if is_elastic else "")


def forecast_words(spec: JobSettings) -> str:
    """Return a clause about the possible numbers of nodes of an elastic job. Empty if only one number is possible."""
    words: list[str] = []
    if spec.least_node_count < spec.node_count:
        words.append(
            f"may start and continue on {spec.least_node_count} of {spec.node_count} nodes after "
            f"{spec.patience_seconds:g} s without capacity"
        )
    if spec.most_node_count > spec.node_count:
        words.append(f"may grow to {spec.most_node_count} nodes")
    return "; ".join(words)


def start_words(spec: JobSettings) -> str:
    """Return a clause that says when a waiting job starts on fewer nodes. Empty if it needs all of its nodes."""
    if spec.least_node_count >= spec.node_count:
        return ""
    return f"starts on at least {spec.least_node_count} nodes after {spec.patience_seconds:g} s"


def restore_reason(from_step: int | None, source: str | None) -> str:
    """Return from which step training resumes after an incident, and why."""
    if from_step is None:
        return "Everstep plans the launch when every node is prepared"
    how = "starts from the script's own initial state"
    if source is not None:
        how = f"restores step {from_step} from {SOURCES[source]}"
    return f"{how}: the newest step that every rank can get"


def policy_words(
    *,
    every_steps: int,
    interval_seconds: int | None,
    max_overhead: float | None,
    max_bytes_per_second: int | None,
    on_notice: bool,
) -> str:
    """Return a clause for users that lists when a job makes a checkpoint."""
    budget = f" and {max_bytes_per_second:,} bytes per second and node" if max_bytes_per_second else ""
    causes = [
        *([f"every {every_steps:,} steps"] if every_steps else []),
        *([f"every {interval_seconds:,} s"] if interval_seconds else []),
        *([f"as often as {max_overhead:.2%} overhead{budget} permit"] if max_overhead else []),
        *(["on a notice of AWS"] if on_notice else []),
        "when the job stops",
    ]
    return ", ".join(causes[:-1]) + f"{' and ' if len(causes) > 1 else ''}{causes[-1]}"


def lapsed(of: reasons.Lapsed) -> str:
    """Return a sentence without a full stop: which step is kept, how far training is, and why."""
    lapse = of.lapse
    where = "" if lapse.node_id is None else f"{lapse.node_id}: "
    where = where if lapse.rank is None else f"rank {lapse.rank} on {where}"
    detail = f": {lapse.detail}" if lapse.detail else ""
    return (
        f"no step after step {lapse.kept} is kept, and training is at step {of.boundary}: "
        f"{where}{_UNKEPT[lapse.cause]}{detail}"
    )


def misread(readers: Iterable[NodeId]) -> str:
    """Return a clause that names the nodes which read wrong content in a checkpoint."""
    return f"{' and '.join(readers)} read other content than its manifest names"


def _told(of: reasons.Told) -> str:
    return "".join(part if isinstance(part, str) else sentence(part) for part in of.parts)


def _note(of: reasons.JobNote) -> str:
    checkpoint = f"the newest checkpoint is step {of.checkpoint_step}"
    checkpoint = checkpoint if of.checkpoint_step > 0 else "there is no checkpoint"
    lost = f"; {of.lost_step_count} committed steps were only in the memory of its nodes: {checkpoint}"
    stored = f"the checkpoint of step {of.checkpoint_step}"
    clauses = {
        "nodes": _listed(of.node_ids),
        "takers": _listed(of.takers),
        "on": _on(of),
        "size": _on(of) or f" on {of.count} nodes",
        "grows": "; grows back when capacity returns" if of.count < of.node_count else "",
        "lacks": _lacks(of.missing_count, of.lack_reasons),
        "at": clock(of.at),
        "source": SOURCES.get(of.name, of.name),
        "because": sentences(of.because),
        "misread": misread(of.node_ids),
        "stop": "" if of.stop is None else _stop(of.stop),
        "where": f"at step {of.step}" if of.step > NO_STEP else "without agreement",
        "checkpoint": checkpoint,
        "cost": lost if of.lost_step_count else "",
        "start": stored if of.checkpoint_step > 0 else "its beginning: no step was committed",
        "warnings": _warnings(of, checkpoint),
    }
    return _NOTES[of.what].format(**{name: getattr(of, name) for name in of.__struct_fields__} | clauses)


def _stop(of: reasons.StopReason) -> str:
    match of:
        case str():
            return of
        case reasons.RehearsalEnded():
            return f"{rehearsals.difference(of.outcome)} (Rehearsal.OnDifference is Stop)"
        case _:
            return _note(of)


def _warnings(of: reasons.JobNote, checkpoint: str) -> str:
    words = ""
    if of.committed_step > max(of.checkpoint_step, FIRST_STEP):
        words = f". Warning: step {of.committed_step} did not become a checkpoint; {checkpoint}"
    elif of.checkpoint_step < of.step:
        words = f". Warning: no later step than {of.committed_step} was kept; {checkpoint}"
    if of.step < of.target_step:
        words += f". Warning: the target is step {of.target_step}; the end of the log shows why the script ended early"
    return words


def _on(of: reasons.JobNote) -> str:
    return f" on {of.count} of {of.node_count} nodes" if of.count < of.node_count else ""


def _observes(of: reasons.Observes) -> str:
    cause = of.pause or f"taken over by {of.taken_over_by}"
    seen = [*(f"{each} is impaired" for each in of.impaired), *(f"{each} is lost" for each in of.lost)]
    seen += map(sentence, of.exits)
    return f"{cause}: Everstep decides nothing" + (f"; it observes: {'; '.join(seen)}" if seen else "")


def _lacks(missing_count: int, because: Iterable[Reason] = ()) -> str:
    words = f"waits for {missing_count} node{'s' if missing_count != 1 else ''}"
    why = causes.sentences(because)
    return f"{words}: {why}" if why else words


def _waits(of: reasons.Waits) -> list[str]:
    waits = [] if of.consent is None else [_consent(of.consent)]
    waits += [] if of.smaller is None else [_note(of.smaller)]
    waits += [_lacks(of.missing_count, of.lack_reasons)] if of.missing_count else []
    return [*waits, *_waits_for_members(of)]


def _waits_for_members(of: reasons.Waits) -> list[str]:
    waits = [f"waits for {_listed(of.late)} to prepare"] if of.late else []
    if of.unreachable:
        waits.append(f"waits for {_listed(of.unreachable)}, which may still hold shards of the committed step")
    return waits


def _consent(of: reasons.AwaitsConsent) -> str:
    choice = of.choice
    what = "the beginning" if choice.base_step <= FIRST_STEP else f"step {choice.base_step}"
    where = f"the checkpoint of {what}" if choice.is_stored else what
    cost = f"repeats {choice.newest_step - choice.base_step} steps"
    if choice.seconds is not None:
        cost += f", about {choice.seconds / 60:.0f} minutes of training"
    why = [f"{each.node_id} {_HOLDERS[each.state]}" for each in choice.holders if each.state is not HolderState.EMPTY]
    why += [f"the checkpoint of step {step} is damaged" for step in choice.wrong_steps]
    why += [f"S3 lists a checkpoint of step {step} that the job cannot use" for step in choice.unknown_steps]
    if choice.listing is not None and not choice.unknown_steps:
        could_look = choice.listing.obstacle is None
        why.append("S3 lists no other checkpoint" if could_look else "S3 could not be listed")
    waits = any(each.state is HolderState.SILENT for each in choice.holders)
    other = "To wait costs the idle time of its nodes" + (", and a silent node may return" if waits else "")
    return (
        f"waits for a decision: only {where} can be restored, which {cost} (MaxRepeatedMinutes is {of.limit_minutes}). "
        f"Step {choice.newest_step} is out of reach: {'; '.join(why) or 'no node has it any more'}. "
        f"`everstep jobs accept-loss {of.job} --from-step {max(choice.base_step, FIRST_STEP)}` continues. {other}"
    )


def _listed(names: Iterable[NodeId]) -> str:
    return ", ".join(names)
