"""The sentences and commands of duties: what a person has to do for a job or a fleet.

Invariant: pure. `core.duties` has decided whether and when a person must act.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from control_plane.accounts import rehearsals
from control_plane.accounts.held_nodes import advice
from control_plane.accounts.incidents import duration, moment_words
from control_plane.accounts.jobs import reason
from control_plane.accounts.occurrences import capital, listed
from control_plane.core.duties import ActionKind, DutyKind, FleetFacts, PersonAction, PersonDuty, Urgency
from control_plane.core.observed.jobs import CapacityWait
from control_plane.core.observed.reasons import GaveUp, JobReason
from control_plane.core.observed.rehearsals import RehearsalOutcome
from control_plane.core.observed.steps import HolderState, RepeatedWork
from everstep.protocol.ids import FIRST_STEP

_LOG_LINES: Final = 50
_LEADS: Final[Mapping[Urgency, str]] = {
    Urgency.NOW: "Act now",
    Urgency.LATER: "Not urgent",
    Urgency.OPTIONAL: "Optional",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The job or fleet of a duty, with the names that sentences and commands contain."""

    fleet: FleetFacts
    job: str = ""
    """Empty for the duty of a fleet."""
    person: str = ""
    """Empty while Everstep controls the job."""
    wait: CapacityWait | None = None
    is_waiting: bool = False
    reason: JobReason = ""
    rehearsal: RehearsalOutcome | None = None


@dataclass(frozen=True, slots=True)
class Action:
    """Something that a person can do now, in words."""

    kind: ActionKind
    urgency: Urgency
    words: str
    command: str
    further_commands: tuple[str, ...] = ()
    node_id: str | None = None
    is_recommended: bool = False
    min_node_count: int | None = None
    """The MinNodeCount that the action sets. None if the action leaves MinNodeCount unchanged."""
    step: int | None = None
    """The checkpoint from which the job continues. None for the beginning and for other actions."""


def sentence(duty: PersonDuty) -> str:
    """Return the one sentence that says what a person has to do. All pages, commands and notifications show it."""
    if duty.kind is DutyKind.NOTHING:
        return "Nothing to do."
    if duty.kind is DutyKind.CAPACITY_WAIT:
        return _of_wait(duty)
    return f"{_LEADS[duty.urgency]}: {_brief(duty)}."


def _of_wait(duty: PersonDuty) -> str:
    at = "" if duty.next_attempt_at is None else f" at {moment_words(duty.next_attempt_at)}"
    if duty.urgency is not Urgency.LATER:
        return f"You need not act: Everstep tries again{at}."
    first = duty.actions[0]
    if first.is_recommended:
        return f"Decide: wait for the next attempt{at}, or (recommended) continue on {_nodes(first.node_count)}."
    return f"Decide: wait for the next attempt{at} (recommended), or pause the job."


def _nodes(count: int | None) -> str:
    return f"{count} {'node' if count == 1 else 'nodes'}"


def _brief(duty: PersonDuty) -> str:
    match duty.kind:
        case DutyKind.FLEET_FROZEN if duty.actions[0].kind is ActionKind.CORRECT_GROUP:
            return "correct the Auto Scaling group"
        case DutyKind.HELD_NODES:
            nodes = [each.node.node_id for each in duty.actions if each.node is not None]
            return f"decide about node {nodes[0]}" if len(nodes) == 1 else f"decide about {len(nodes)} nodes"
        case DutyKind.NO_CHECKPOINT if duty.actions[0].kind is ActionKind.SET_CHECKPOINTS:
            return "let the job make checkpoints in S3"
        case DutyKind.DEGRADED if duty.urgency is Urgency.LATER:
            return "find out why copies of some shards are missing"
        case _:
            return _BRIEFS[duty.kind]


_BRIEFS: Final[Mapping[DutyKind, str]] = {
    DutyKind.JOB_FAILED: "correct the cause, and submit the job again",
    DutyKind.TAKEN_OVER: "hand the job back",
    DutyKind.AUTOMATION_PAUSED: "resume automation",
    DutyKind.DELETIONS_PAUSED: "accept what the restore of the database changed",
    DutyKind.CONSENT_TO_REPEAT: "decide whether the job repeats its lost work",
    DutyKind.STORE_UNREACHABLE: "find out why S3 does not answer",
    DutyKind.FLEET_FROZEN: "find out why the fleet is frozen",
    DutyKind.LAUNCHES_SUSPENDED: "let the group launch instances",
    DutyKind.RECOVERY_LATE: "find out what the recovery waits for",
    DutyKind.STALLED: "find out why the ranks make no steps",
    DutyKind.FIRST_STEP_LATE: "find out why the ranks make no first step",
    DutyKind.PROTECTION_LOST: "find out why memory protects no step",
    DutyKind.NO_CHECKPOINT: "find out why the job has no new checkpoint in S3",
    DutyKind.RESUME_DIFFERS: "correct the script, because a restart would not repeat its steps",
    DutyKind.RESUME_UNPROVEN: "see whether the script needs the values that a restart would lose",
    DutyKind.DEGRADED: "see which copies are missing",
    DutyKind.UNCONFIRMED: "see which nodes are silent or report a fault",
    DutyKind.FEWER_NODES: "see which nodes the fleet waits for",
    DutyKind.WITHOUT_COPIES: "see what the loss of a node costs",
    DutyKind.PAUSED: "resume the job",
}


def explanation(duty: PersonDuty, subject: Subject) -> str:
    """Return what follows from the situation, and what Everstep does by itself. Empty if there is nothing to do."""
    fleet, person = subject.fleet, subject.person or "a person"
    match duty.kind:
        case DutyKind.TAKEN_OVER | DutyKind.AUTOMATION_PAUSED if duty.urgency is Urgency.NOW:
            return f"Nothing recovers this job. {capital(reason(subject.reason).rstrip('.'))}."
        case DutyKind.TAKEN_OVER:
            return f"Automation is off: a failure waits for {person}."
        case DutyKind.FLEET_FROZEN:
            effect = "this recovery may need to end an instance" if duty.is_recovering else "it replaces no lost node"
            return f"The fleet {fleet.name} is frozen, and {effect}."
        case DutyKind.LAUNCHES_SUSPENDED:
            effect = "The job waits for nodes" if subject.is_waiting else "A lost node stays without a replacement"
            effect = "This recovery may need an instance" if duty.is_recovering else effect
            return f"{effect}, because the Auto Scaling group of {fleet.name} launches no instances."
        case DutyKind.RECOVERY_LATE if duty.limit_seconds is not None:
            usual = duty.usual_seconds
            why = (
                "no earlier incident of this kind shows how long it takes"
                if usual is None
                else f"it usually takes {duration(usual)} after this kind of failure"
            )
            return f"This phase has taken longer than {duration(duty.limit_seconds)}: {why}."
        case DutyKind.CAPACITY_WAIT if subject.wait is not None:
            return f"AWS reports: “{subject.wait.message.rstrip('.')}.”"
        case DutyKind.RESUME_DIFFERS | DutyKind.RESUME_UNPROVEN if subject.rehearsal is not None:
            return f"{capital(rehearsals.difference(subject.rehearsal))}."
        case DutyKind.NO_CHECKPOINT if duty.since is not None:
            return f"The job has stored no new checkpoint since {moment_words(duty.since)}. {_NO_CHECKPOINT}"
        case _:
            return _EXPLANATIONS.get(duty.kind, "")


_NO_CHECKPOINT: Final = "If all copies in memory are lost, training returns to the newest checkpoint or to the start."
_EXPLANATIONS: Final[Mapping[DutyKind, str]] = {
    DutyKind.JOB_FAILED: "The job does not start again by itself.",
    DutyKind.AUTOMATION_PAUSED: "An administrator has paused all automatic actions: Everstep replaces no lost node.",
    DutyKind.DELETIONS_PAUSED: "Everstep deletes nothing from S3 until a person accepts the restored database.",
    DutyKind.CONSENT_TO_REPEAT: "The job keeps its nodes until you decide.",
    DutyKind.STORE_UNREACHABLE: "The job keeps its nodes, and continues when S3 answers.",
    DutyKind.STALLED: "The ranks run but make no steps.",
    DutyKind.FIRST_STEP_LATE: "The ranks run, and the first step of this launch takes unusually long.",
    DutyKind.PROTECTION_LOST: "A failure now goes back to S3 or to the start.",
    DutyKind.NO_CHECKPOINT: _NO_CHECKPOINT,
    DutyKind.DEGRADED: "Everstep makes the missing copies by itself.",
    DutyKind.UNCONFIRMED: "Everstep replaces these nodes if this lasts.",
    DutyKind.FEWER_NODES: "The job grows again when capacity returns.",
    DutyKind.WITHOUT_COPIES: "By its settings, the job keeps no second copy, so a lost node costs steps.",
    DutyKind.PAUSED: "A person paused the job. It does not continue by itself.",
}


def action(done: PersonAction, subject: Subject) -> Action:
    """Return an action in words, with all names filled in."""
    if done.node is not None:
        found = advice(done.node.node_id, done.node.hold, done.node.reason)
        node = done.node.node_id
        return Action(done.kind, done.urgency, found.words, found.command, found.further_commands, node)
    if done.repeat is not None:
        return _repeat(done, done.repeat, subject.job)
    words, command = _ACTIONS[done.kind]
    failure = subject.reason.because.failure if isinstance(subject.reason, GaveUp) else None
    rank = None if failure is None else failure.rank
    values: Mapping[str, object] = {
        "job": subject.job,
        "fleet": subject.fleet.name,
        "group": subject.fleet.auto_scaling_group_name,
        "person": subject.person or "the person",
        "setting": done.setting,
        "count": done.node_count,
        "nodes": _nodes(done.node_count),
        "start": "the beginning" if done.step is None else f"step {done.step:,}",
        "wrong": "the cause" if failure is None or failure.error is None else "the script or its data",
        "advice": "" if subject.rehearsal is None else subject.rehearsal.advice,
        "rank": "" if rank is None else f" --rank {rank}",
    }
    return Action(
        done.kind,
        done.urgency,
        words.format_map(values).strip(),
        command.format_map(values),
        is_recommended=done.is_recommended,
        min_node_count=done.node_count,
        step=done.step,
    )


def _repeat(done: PersonAction, choice: RepeatedWork, job: str) -> Action:
    count = choice.newest_step - choice.base_step
    cost = "" if choice.seconds is None else f", about {choice.seconds / 60:.0f} minutes of training"
    start = "the beginning" if choice.base_step <= FIRST_STEP else f"step {choice.base_step:,}"
    lost = "AWS reports that every node of the job has ended, and S3 has no checkpoint. " if choice.is_total else ""
    silent = [each.node_id for each in choice.holders if each.state is HolderState.SILENT]
    wait = f", or restore the connection of {listed(silent)}" if silent else ""
    words = f"{lost}Let the job repeat {count:,} steps{cost} from {start}{wait}."
    command = f"everstep jobs accept-loss {job} --from-step {choice.base_step}"
    return Action(done.kind, done.urgency, words, command, step=choice.base_step)


_ACTIONS: Final[Mapping[ActionKind, tuple[str, str]]] = {
    ActionKind.SUBMIT_AGAIN: (
        "Correct {wrong}, and submit the job again from {start}.",
        f"everstep jobs logs {{job}}{{rank}} --tail {_LOG_LINES}",
    ),
    ActionKind.SHRINK: (
        "Continue on {nodes}. The job grows again later.",
        "everstep jobs update {job} --set ElasticConfig.MinNodeCount={count}",
    ),
    ActionKind.PAUSE: ("Pause the job, so that other jobs can use its nodes.", "everstep jobs pause {job}"),
    ActionKind.READ_LOGS: (
        "Read the logs of the ranks. Some scripts evaluate or load data for a long time.",
        f"everstep jobs logs {{job}} --tail {_LOG_LINES}",
    ),
    ActionKind.HAND_BACK: (
        "Ask {person} who works on the job. Then hand the job back, so that Everstep decides again.",
        "everstep jobs hand-back {job}",
    ),
    ActionKind.RESUME_AUTOMATION: (
        "Ask who paused automation, and why. Then resume all automatic actions.",
        "everstep automation resume",
    ),
    ActionKind.ACCEPT_RESTORE: (
        "On the server's machine, read the differences between the backup and S3. Then accept them with --accept.",
        "everstep db restored",
    ),
    ActionKind.RESUME: ("Resume the job.", "everstep jobs resume {job}"),
    ActionKind.STOP: ("Stop the job if it hangs.", "everstep jobs stop {job}"),
    ActionKind.CHECK_STORE: (
        "Check the bucket, its key and the role's permissions. The job's reason has the answer of S3.",
        "everstep jobs describe {job}",
    ),
    ActionKind.CORRECT_GROUP: ("Correct this in AWS: {setting}.", "everstep fleets describe {fleet}"),
    ActionKind.DESCRIBE_FLEET: (
        "Show the fleet's nodes and its reason. The runbook explains what ends each situation.",
        "everstep fleets describe {fleet}",
    ),
    ActionKind.RESUME_LAUNCHES: (
        "Ask who suspended the launches of the Auto Scaling group. Then let it launch instances again.",
        "aws autoscaling resume-processes --auto-scaling-group-name {group} --scaling-processes Launch",
    ),
    ActionKind.CORRECT_SCRIPT: (
        "{advice} Submit the job again with the corrected script.",
        "everstep jobs describe {job}",
    ),
    ActionKind.LIST_EVENTS: ("Show the decisions since the failure.", "everstep events list --job {job}"),
    ActionKind.SHOW_PROTECTION: (
        "Show the holders of each shard. Each shard names the reason for a missing copy.",
        "everstep protection describe {job}",
    ),
    ActionKind.CREATE_CHECKPOINT: (
        "Make a checkpoint now, and read why the last upload did not end.",
        "everstep checkpoints create {job}",
    ),
    ActionKind.SET_CHECKPOINTS: (
        "Let the job make a checkpoint every 30 minutes.",
        "everstep jobs update {job} --set CheckpointConfig.IntervalInSeconds=1800",
    ),
}
