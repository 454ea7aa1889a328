"""The sentence for each reason of a node, a fleet or a roll (`core.observed.causes`).

A sentence contains no elapsed time, because the dashboard would show each change of it as news.

Invariant: pure. Every reason has a sentence.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Final, cast

from control_plane.accounts import facts, responses
from control_plane.core.fleets import RATE_WINDOW_SECONDS
from control_plane.core.observed import causes
from control_plane.core.observed.causes import NodeFact, Reason, RefusalKind
from control_plane.core.observed.facts import Fact, Faulty, InstanceEnded, Lemon, Value
from control_plane.core.observed.nodes import Remedy

_FACTS: Final[Mapping[NodeFact, str]] = {
    NodeFact.STARTING: "its instance is starting",
    NodeFact.CONNECTED: "its agent is connected",
    NodeFact.RELEASED: "a user released it",
    NodeFact.JOB_ENDED: "its job has ended",
    NodeFact.REPORTS_AGAIN: "its agent reports again and has no job",
    NodeFact.REPAIRED: "its agent is connected after the reboot, without the fault",
    NodeFact.UNNEEDED: "the job no longer needs to leave a node",
}
_REFUSALS: Final[Mapping[RefusalKind, str]] = {
    RefusalKind.ENDING: "the node {node_id} is already {state}, so its instance is terminated anyway",
    RefusalKind.NOT_JOINED: "the node {node_id} has not joined yet",
    RefusalKind.REBOOTING: "the node {node_id} is rebooting",
    RefusalKind.OTHER_REQUEST: "the node {node_id} already has a pending request: {request}; cancel it with "
    "everstep nodes release {node_id}",
    RefusalKind.FLEET_DELETED: "the fleet of the node {node_id} is being deleted",
    RefusalKind.FLEET_FROZEN: "the fleet of the node {node_id} is frozen: {frozen}",
    RefusalKind.HELD: "the node {node_id} is held and has no job; release it first",
    RefusalKind.WORKS: "the node {node_id} works for {job}; everstep nodes drain {node_id} moves the job first",
    RefusalKind.TAKEN_OVER: "the node {node_id} works for {job}, which {by} has taken over; hand the job back first",
    RefusalKind.NO_REPLACEMENT: "the node {node_id} works for {job} and no node can replace it: the fleet has no spare "
    "and already has its maximum of {max_node_count} nodes",
}
_TEMPLATES: Final[Mapping[type[Value], str]] = {
    causes.WorksFor: "works for {job}",
    causes.JobQueued: "{job} is queued again",
    causes.NotJoined: "its agent has not connected within {seconds} s: {where_to_look}",
    causes.Surplus: "surplus: the fleet needs {desired_count} nodes",
    causes.ReleasedToEnd: "a user released it for termination; it was held: {held}",
    causes.KeptForInspection: "kept for inspection: {because}",
    causes.NotKept: "{because}; not kept for inspection: the group has MaxSize {max_size}, jobs and spares need "
    "{needed_count}, and {held_count} nodes are held already",
    causes.AutomationPaused: "frozen: {text}",
    causes.CannotBeDeleted: "cannot be deleted while its Auto Scaling group has MinSize {min_size}: set it to 0",
    causes.Blind: "frozen: most of the fleet is silent although EC2 reports it as running",
    causes.JoinsFail: "its agent has not connected, for {count} instances in a row: {where_to_look}; the next instance "
    "is replaced after {patience_seconds} s",
    causes.FleetFrozen: "the fleet is frozen",
    causes.JobBusy: "{job} is {state}",
    causes.JobUnsettled: "{job} has an open incident, or has committed no step since its last launch",
    causes.TooFewAvailable: "unavailable nodes: {unavailable_count}, MaxUnavailable: {max_unavailable}",
    causes.RollWaits: "waits: {because}",
    causes.RollStopped: "stopped after {finished_count} of {node_count} nodes",
}
_WHERE_TO_LOOK: Final = (
    "check the user data and its log on the instance, the network path to this server (security group), and "
    "the join token"
)
_VERBS: Final[Mapping[Remedy, str]] = {Remedy.RELEASE: "left", Remedy.HOLD: "unreachable"}


def sentences(reasons: Iterable[Reason]) -> str:
    """Return the sentences of several reasons, joined by semicolons."""
    return "; ".join(map(sentence, reasons))


def sentence(reason: Reason) -> str:
    """Return a reason as a clause without a full stop, for example `surplus: the fleet needs 4 nodes`."""
    match reason:
        case causes.Happened(what=happened):
            return _FACTS[happened]
        case causes.RequestRefused(why=why):
            return _filled(_REFUSALS[why], reason)
        case causes.GivenUp(job=job, remedy=remedy, because=because):
            return f"{_VERBS.get(remedy, 'excluded')} by {job}: {responses.because(because)}"
        case causes.Silent(seconds=None, text=text):
            return f"unreachable: its agent is silent and {text}"
        case causes.Silent(seconds=seconds):
            return f"unreachable: its agent has been silent for more than {seconds:g} s"
        case InstanceEnded(state=state):
            return f"EC2: {state}" + (f" ({reason.text})" if reason.text else "")
        case Faulty():
            return f"its agent reports {facts.sentence(reason)}"
        case causes.StillFaulty(fault=fault):
            return f"after a reboot, its agent still reports {facts.sentence(fault)}"
        case Lemon():
            return f"not used again: {facts.lemon(reason)}"
        case causes.NotRebooted(is_accepted=is_accepted, seconds=seconds, because=because):
            lacks = (
                f"its agent did not reconnect within {seconds:g} s of its reboot"
                if is_accepted
                else f"EC2 did not reboot it within {seconds:g} s"
            )
            return f"{lacks}: {sentence(because)}"
        case causes.Drifted(drift=drift):
            return f"frozen: {' '.join(drift)}"
        case causes.ReplacementLimit(node_ids=node_ids, recent_count=count, limit=limit):
            until = (
                f"the next replacement is possible {RATE_WINDOW_SECONDS / 60:g} minutes after the first"
                if count
                else "no replacement is allowed"
            )
            return (
                f"{', '.join(node_ids)} not replaced: {count} replacements in the last hour, the limit is {limit}; "
                f"{until}"
            )
        case causes.LaunchesFail():
            return _launches(reason)
        case causes.LacksInstances(missing_count=missing, because=because):
            return f"waits for {missing} instance{'s' if missing != 1 else ''}: {_launches(because)}"
        case causes.Keeps(desired_count=count, spare_probability=probability):
            enough = (
                "" if probability is None else f", enough that a spare is free with a probability of {probability:g}"
            )
            return f"keeps {count} nodes{enough}"
        case causes.ShardUnprotected(job=job, rank=rank, missing=missing, text=text):
            clause = text or f"{', '.join(missing)} does not hold it"
            return f"the shard of rank {rank} of {job} is not fully protected: {clause}"
        case causes.NotInService(node_id=node_id, state=state):
            return f"{node_id} is in service; it is {state}"
        case causes.Rolls(reboots=reboots, node_ids=node_ids, is_paused=is_paused):
            does = f"{'reboots' if reboots else 'replaces'} {', '.join(node_ids)}"
            return "; ".join(("paused",) * is_paused + (does,) * bool(node_ids))
        case causes.RollWaits(because=causes.NotInService() as because):
            return f"waits until {sentence(because)}"
        case causes.RollDone(reboots=reboots, node_count=count):
            return f"all {count} nodes are {'rebooted' if reboots else 'replaced'}"
        case _ if type(reason) in _TEMPLATES:
            return _filled(_TEMPLATES[type(reason)], reason)
        case _:
            return facts.sentence(cast(Fact, reason))


def _launches(reason: causes.LaunchesFail) -> str:
    retries = (
        "" if reason.retry_at is None else f"retries at {datetime.fromtimestamp(reason.retry_at, UTC):%H:%M:%S} UTC"
    )
    if reason.suspension is not None:
        words = f"its group's Launch process is suspended ({reason.suspension or 'AWS gives no reason'})"
        if not reason.is_suspension_administrative:
            return f"{words}: resume the process to launch instances"
        then = f"Everstep resumes it{f' and {retries}' if retries else ''}"
        return f"{words}: AWS suspended it after failures; {then}"
    return f"{reason.text}{f'; Everstep {retries}' if retries else ''}"


def _filled(template: str, reason: Value) -> str:
    fields = {name: _shown(getattr(reason, name)) for name in reason.__struct_fields__}
    return template.format(**fields, where_to_look=_WHERE_TO_LOOK)


def _shown(value: object) -> object:
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple):
        return "; ".join(sentence(each) for each in cast(tuple[Reason, ...], value))
    return sentence(cast(Reason, value)) if isinstance(value, Value) else value
