"""Three answers about an incident for people: its headline, its cause, and what Everstep has done about it. Pure.

Invariant: without a stored fact that explains the failure, the answer is "Cause unknown" with the evidence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from control_plane.accounts.facts import fault_name, hang, hardware_fault, sentence
from control_plane.accounts.incidents import Account, IncidentOutcome
from control_plane.accounts.jobs import SOURCES
from control_plane.accounts.occurrences import brief_occurrence, capital, listed
from control_plane.core.incidents import absent_seconds
from control_plane.core.observed.facts import (
    AgentSilent,
    ControlPlaneAbsent,
    Fact,
    Faulty,
    InstanceEnded,
    RankEnded,
    Standstill,
)
from control_plane.core.observed.incidents import Grows, LeavesNodes, Tries
from control_plane.core.observed.nodes import Cause
from everstep.protocol.ids import FIRST_STEP

_MOST_NAMED: Final = 2
_SIGNALS: Final[Mapping[int, str]] = {
    4: "SIGILL, an illegal instruction",
    6: "SIGABRT, the process aborted itself",
    7: "SIGBUS, a bus error",
    8: "SIGFPE, an arithmetic error",
    9: "SIGKILL, another process or the kernel killed it",
    11: "SIGSEGV, an invalid memory access",
    15: "SIGTERM, a request to end",
}
_ENDINGS: Final[Mapping[str, str]] = {
    "Client.UserInitiatedShutdown": "someone outside Everstep terminated it",
    "Client.InstanceInitiatedShutdown": "the operating system of the instance shut the instance down",
    "Server.SpotInstanceTermination": "AWS took the Spot instance back",
    "Server.SpotInstanceShutdown": "AWS took the Spot instance back",
    "Server.InternalError": "AWS ended the instance because of an error in EC2",
    "Server.ScheduledStop": "AWS stopped the instance for a scheduled retirement of its host",
}
"""The person or service that ended an instance, by EC2's state reason code."""
_BY_API: Final = "Client.UserInitiatedShutdown"
"""State reason code of an instance that any caller of EC2's API terminated, including Everstep."""


def headline(cause: Cause, evidence: Sequence[Fact], nodes: Sequence[str], error: str | None) -> str:
    """Return what failed, in a few words without a full stop."""
    down = "" if absent_seconds(evidence) is None else " during an Everstep outage"
    return f"{_failed(cause, evidence, nodes, error)}{down}"


def _failed(cause: Cause, evidence: Sequence[Fact], nodes: Sequence[str], error: str | None) -> str:
    if error is not None:
        return f"The training script raised {error.partition(':')[0]}"
    found = hardware_fault(evidence) if cause is Cause.NODE_FAULT else None
    if found is None:
        return brief_occurrence(cause, nodes)
    gpu = _gpu(found.fault)
    return f"{found.node_id} reported {fault_name(found.fault)}" if gpu is None else f"{gpu} of {found.node_id} failed"


def _gpu(fault: Faulty) -> str | None:
    return f"GPU {fault.gpu}" if fault.gpu is not None else None


def why(account: Account) -> str:
    """Return the cause of an incident. After an outage of the control plane, also say that its cause is unknown."""
    outage = "" if absent_seconds(account.evidence) is None else " Outage: cause unknown."
    cause = _CAUSES.get(account.cause, _other)(account).rstrip(".")
    if account.script_error is None:  # A script error begins with the name of a class, which keeps its case.
        cause = capital(cause)
    return f"{cause}.{outage}"


def done(account: Account) -> tuple[str, ...]:
    """Return what Everstep has done about an incident: one sentence with all actions, then details."""
    deeds = (*_changes(account), *_end(account))
    return (*((f"Everstep {_joined(deeds)}.",) if deeds else ()), *_details(account))


def _joined(parts: Sequence[str]) -> str:
    return f"{', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else parts[0]


def _of_ranks(account: Account) -> str:
    if account.script_error is not None:
        place = "" if account.error_place is None else f" at {account.error_place}"
        rank = "" if account.failed_rank is None else f", rank {account.failed_rank}"
        return f"{account.script_error.rstrip('.')}{place}{rank}"
    ended = [each for each in account.evidence if isinstance(each, RankEnded)]
    if (lacking := next((each for each in ended if each.memory is not None), None)) is not None:
        return sentence(lacking)
    ends = [_end_words(each) for each in ended]
    return f"cause unknown: {' and '.join(ends[:_MOST_NAMED])}" if ends else _unknown(account)


def _end_words(ended: RankEnded) -> str:
    rank = f"rank {ended.rank} on {ended.node_id}"
    if ended.code >= 0:
        return f"{rank} ended with exit code {ended.code}"
    name = f" ({_SIGNALS[-ended.code]})" if -ended.code in _SIGNALS else ""
    return f"{rank} ended by signal {-ended.code}{name}"


def _progress(account: Account) -> str:
    if account.reached_step is None or account.reached_step <= FIRST_STEP:
        return "No launch finished a step."
    return f"No launch passed step {account.reached_step:,}."


def _of_hardware(account: Account) -> str:
    if (found := hardware_fault(account.evidence)) is None:
        return _other(account)
    if found.fault.xid is not None:
        return fault_name(found.fault)
    return f"{'it' if _gpu(found.fault) else found.node_id} reported {fault_name(found.fault)}"


def _of_an_instance(account: Account) -> str:
    if (found := _termination(account)) is None:
        return _other(account)
    if found.code == _BY_API and found.node_id in account.terminated_ids:
        return "Everstep terminated the instance"
    if found.code in _ENDINGS:
        return _ENDINGS[found.code]
    clause = f"gives the reason “{found.text}”, but" if found.text else "gives no reason and"
    return f"cause unknown: EC2 reports {found.node_id} as {found.state}, {clause} does not say who ended it"


def _termination(account: Account) -> InstanceEnded | None:
    return next((each for each in account.evidence if isinstance(each, InstanceEnded)), None)


def _ended_from_outside(account: Account) -> str | None:
    found = _termination(account) if account.cause is Cause.INSTANCE_TERMINATED else None
    if found is None or found.code != _BY_API or found.node_id in account.terminated_ids:
        return None
    return found.node_id


def _of_silence(account: Account) -> str:
    found = next((each for each in account.evidence if isinstance(each, AgentSilent)), None)
    return _unknown(account) if found is None else f"cause unknown: no message for {found.seconds:.1f} s"


def _other(account: Account) -> str:
    return "; ".join(_facts(account)[:_MOST_NAMED]) or _unknown(account)


def _unknown(account: Account) -> str:
    return f"cause unknown: {next(iter(_facts(account)), 'no evidence was recorded')}"


def _facts(account: Account) -> tuple[str, ...]:
    facts = (each for each in account.evidence if not isinstance(each, ControlPlaneAbsent))
    return tuple(hang(each) if isinstance(each, Standstill) else sentence(each) for each in facts)


_CAUSES: Final[Mapping[Cause, Callable[[Account], str]]] = {
    Cause.RANK_EXIT: _of_ranks,
    Cause.NODE_FAULT: _of_hardware,
    Cause.INSTANCE_TERMINATED: _of_an_instance,
    Cause.NODE_UNREACHABLE: _of_silence,
    Cause.HANG: _unknown,
}


def _changes(account: Account) -> Iterator[str]:
    """Yield what Everstep did with the ranks and the nodes, as clauses in the past tense without their subject."""
    lost, new = listed(account.instance_ids), listed(account.replacement_instance_ids)
    is_failed_script = _restarts(account) is not None
    if account.outcome is IncidentOutcome.OPEN and account.wait is None:
        yield "stopped all ranks"
    held = tuple(node.node_id for node in account.held)
    if held and not (lost and new):
        yield f"took {listed(held)} out of use"
    if account.terminated_ids:
        yield f"terminated {listed(account.terminated_ids)}"
    if lost and new:
        if not _has_resumed(account):  # otherwise `_end` names the replacements
            yield f"moved {'its' if len(account.instance_ids) == 1 else 'their'} ranks to {new}"
    elif new and account.node_count_after > account.node_count_before > 0:
        yield f"added {new} to continue on {account.node_count_after} nodes"
    elif new and not is_failed_script:
        yield f"restarted all ranks with {new} in place of one node"
    elif lost and account.restored_at is not None:
        yield f"continued on {account.node_count_after} nodes without {lost}"
    elif not lost and not is_failed_script and (account.generation_after or 0) > account.generation_before:
        yield "restarted all ranks on the same nodes"
    if (step := _skipped_step(account)) is not None:
        yield f"skipped step {step} once"


def _end(account: Account) -> Iterator[str]:
    """Yield the end of a sentence about the recovery, such as "resumed from step 1,200"."""
    if account.outcome is IncidentOutcome.OPEN and account.wait is not None:
        count = account.wait.missing_count
        what = f"{count} {account.instance_type or ('node' if count == 1 else 'nodes')}"
        often = "once" if account.wait.failed_count == 1 else f"{account.wait.failed_count} times"
        yield f"requested {what} {often}: AWS {'has' if account.wait.is_shortage else 'launches'} none"
    if account.outcome is IncidentOutcome.JOB_FAILED:
        restarts = _restarts(account)
        words = "restart" if restarts == 1 else "restarts"
        yield "gave the job up" if restarts is None else f"gave up after {restarts} {words}"
    elif _has_resumed(account):
        new = listed(account.replacement_instance_ids) if account.instance_ids else ""
        yield f"resumed from step {account.from_step:,}{f' with {new} instead' if new else ''}"


def _has_resumed(account: Account) -> bool:
    return (
        account.outcome is not IncidentOutcome.JOB_FAILED
        and account.from_step is not None
        and account.restored_at is not None
    )


def _details(account: Account) -> Iterator[str]:
    if (restarts := _restarts(account)) is not None:
        yield _progress(account)
        # `restarts` also counts the restarts of earlier incidents. If it exceeds the number of this incident's new
        # generations, some restarts belong to earlier incidents. A new generation that never started its ranks is no
        # restart, but counts here. The following sentence can therefore be absent although earlier incidents exist.
        if restarts > (account.generation_after or account.generation_before) - account.generation_before:
            yield "The time and the cost of earlier restarts are in earlier incidents."
        if account.replacement_instance_ids:
            yield f"Everstep also tried {listed(account.replacement_instance_ids)} in place of a node."
    if account.held and account.replacement_instance_ids:
        yield f"Everstep took {listed(node.node_id for node in account.held)} out of use."
    if isinstance(account.attempted, LeavesNodes | Grows) and account.reached_step is not None:
        yield f"All ranks stopped after step {account.reached_step:,}, which every rank had finished."
    if (ended := _ended_from_outside(account)) is not None:
        yield f"AWS CloudTrail records who called TerminateInstances for {ended}."
    if account.wait is not None:
        yield f"AWS reports: “{account.wait.message.rstrip('.')}.”"
        yield "Pauses between attempts double from 30 s up to 15 min."
    if absent_seconds(account.evidence) is not None:
        yield "Everstep's log shows why the control plane was down: journalctl --unit everstep-server."
    if (step := _skipped_step(account)) is not None:
        yield f"The launch without step {step} showed whether the state or the script was at fault."
    source = SOURCES.get(account.restore_source or "")
    if not _has_resumed(account) or not source:
        return
    yield f"Training resumed from step {account.from_step:,}, from {source}{_newer(account)}."


def _restarts(account: Account) -> int | None:
    if account.script_error is None or account.outcome is not IncidentOutcome.JOB_FAILED:
        return None
    if account.repeated is None:
        return None
    return (account.repeated.count - 1) or None  # after the last failure, Everstep did not restart the job


def _skipped_step(account: Account) -> str | None:
    step = account.attempted.change.skipped_step if isinstance(account.attempted, Tries) else None
    return None if step is None else f"{step:,}"


def _newer(account: Account) -> str:
    reached, resumed = account.reached_step, account.from_step
    if reached is None or resumed is None or resumed >= reached or _skipped_step(account) is not None:
        return ""
    return f", because no complete copy of step {reached:,} existed"
