"""Two answers about an incident for people: why it happened, and what Everstep has done about it.

`core.incident_accounts` has the other answers. The API and the dashboard show these sentences.

Invariant: pure. A sentence states only stored facts. If no stored fact explains the failure, the answer is "Cause
unknown" with the evidence.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from control_plane.core.incident_accounts import (
    SOURCES,
    Account,
    Outcome,
    capital,
    duration,
    listed,
    missing,
)
from control_plane.core.incidents import ABSENCE, absent_seconds
from control_plane.core.observed.nodes import Cause
from control_plane.core.remedies import hardware_fault

_MOST_NAMED: Final = 2
"""Maximum number of pieces of evidence in one sentence."""
_SIGNALS: Final[Mapping[str, str]] = {
    "4": "SIGILL, an illegal instruction",
    "6": "SIGABRT, the process aborted itself",
    "7": "SIGBUS, a bus error",
    "8": "SIGFPE, an arithmetic error",
    "9": "SIGKILL, another process or the kernel killed it",
    "11": "SIGSEGV, an invalid memory access",
    "15": "SIGTERM, a request to end",
}
"""Names and meanings of signals, by number on Linux."""
_ENDED: Final = re.compile(r"(?P<rank>rank \d+) on (?P<node>\S+) ended: \w+, (?P<kind>signal|code) (?P<number>\d+)")
_OUT_OF_MEMORY: Final = re.compile(r" ran out of (?:GPU )?memory: ")
_TERMINATED: Final = re.compile(r"EC2 reports (?P<node>\S+) as (?P<state>[\w-]+)(?: \((?P<reason>.*)\))?", re.DOTALL)
_GPU: Final = re.compile(r"\bgpu (?P<index>\d+)\b", re.IGNORECASE)
_REPEATED: Final = re.compile(r"the same failure occurred (?P<count>\d+) times (?P<where>[^,:]+)(?P<trials>[^:]*)")
_NO_PROGRESS: Final = re.compile(r"(?P<count>\d+) failures occurred since \S+ UTC without a step beyond (?P<step>\d+)")
_TRIAL: Final = re.compile(
    r"(?:(?P<node>i-\S+) is replaced|step (?P<step>\d+) is skipped) once, to find out whether the (?P<what>\w+) or the "
    r"script is at fault"
)
"""Forms in which `core.breakers` and `core.job.ruling` describe repeated failures and trials."""
_TRIALS: Final[Mapping[str, str]] = {
    "also without ": "on other nodes",
    "also from an older state ": "from an older step",
}
"""Where the script failed again, by the kind of trial in a match of `_REPEATED`."""
_PROBABLE: Final = "The cause is probably in the script or its data"
_ENDINGS: Final[Mapping[str, str]] = {
    "Client.UserInitiatedShutdown": "a user or a program terminated {node} through the EC2 API",
    "Client.InstanceInitiatedShutdown": "the operating system of {node} shut the instance down",
    "Server.SpotInstanceTermination": "AWS took the Spot instance {node} back",
    "Server.SpotInstanceShutdown": "AWS took the Spot instance {node} back",
    "Server.InternalError": "an error of EC2 ended {node}",
    "Server.ScheduledStop": "AWS stopped {node} for a scheduled retirement of its host",
}
"""Causes of the end of an instance, by EC2's state reason code."""


def why(account: Account) -> str:
    """Return the cause of an incident in one or two sentences, and what made the interruption longer.

    The sentence agrees with `verdict`: both name the same exception, fault or instance.
    """
    words = _CAUSES.get(account.cause, _other)(account)
    absent = absent_seconds(account.evidence)
    if absent is not None:
        words += f"; no control plane was running for {duration(absent)} to recover the job"
    if account.wait is not None:
        words += "; AWS launches no replacement"
    return f"{capital(words).rstrip('.')}."


def done(account: Account) -> tuple[str, ...]:
    """Return what Everstep has done about an incident, oldest first, in the past tense."""
    return (*_changes(account), *_end(account))


def _of_ranks(account: Account) -> str:
    if account.script_error is not None:
        return _of_the_script(account.script_error, account)
    known = [each for each in account.evidence if _OUT_OF_MEMORY.search(each)]
    if known:
        return known[0]
    ends = [_end_words(found) for each in account.evidence if (found := _ENDED.match(each))]
    return f"cause unknown: {' and '.join(ends[:_MOST_NAMED])}" if ends else _unknown(account)


def _end_words(found: re.Match[str]) -> str:
    number = found["number"]
    if found["kind"] == "signal":
        name = f" ({_SIGNALS[number]})" if number in _SIGNALS else ""
        return f"{found['rank']} on {found['node']} ended by signal {number}{name}"
    return f"{found['rank']} on {found['node']} ended with exit code {number}"


def _of_the_script(error: str, account: Account) -> str:
    """Return the exception, how often it occurred, and what the repetitions show about its origin."""
    what = error.rstrip(".") + ("" if account.failed_rank is None else f" on rank {account.failed_rank}")
    reason = account.job_reason.partition("\n")[0]
    if (found := _REPEATED.match(reason)) is not None:
        tried = " and ".join(words for mark, words in _TRIALS.items() if mark in found["trials"])
        cause = f"The cause is in the script or its data, because it also failed {tried}" if tried else _PROBABLE
        return f"the script failed {found['count']} times {found['where'].strip()}: {what}. {cause}"
    if (found := _NO_PROGRESS.match(reason)) is not None:
        step = f"{int(found['step']):,}"
        return f"the script failed {found['count']} times without a step beyond {step}: {what}. {_PROBABLE}"
    return f"the training script raised {what}"


def _of_hardware(account: Account) -> str:
    line = next((each for each in account.evidence if " reports " in each), "")
    fault = hardware_fault(line)
    node = re.search(r"\bthe agent of (\S+) reports ", line)
    if fault is None or node is None:
        return _other(account)
    gpu = _GPU.search(line)
    part = "" if gpu is None else f"GPU {gpu[1]} of "
    return f"{part}{node[1]} failed: it reported {fault}"


def _of_an_instance(account: Account) -> str:
    found = next((match for each in account.evidence if (match := _TERMINATED.match(each))), None)
    if found is None:
        return _other(account)
    reason = found["reason"] or ""
    code = reason.partition(":")[0]
    if code in _ENDINGS:
        return f"{_ENDINGS[code].format(node=found['node'])} ({code})"
    told = f"gives the reason “{reason}”" if reason else "gives no reason"
    return f"cause unknown: EC2 reports {found['node']} as {found['state']} and {told}"


def _of_silence(account: Account) -> str:
    return f"{_unknown(account)}; a broken network and a dead node look the same"


def _other(account: Account) -> str:
    return "; ".join(_facts(account)[:_MOST_NAMED]) or _unknown(account)


def _unknown(account: Account) -> str:
    evidence = next(iter(_facts(account)), "no evidence was recorded").removeprefix("hang: ")
    return f"cause unknown: {evidence}"


def _facts(account: Account) -> tuple[str, ...]:
    """Return the evidence of an incident, without the sentences which state that the control plane was not running.

    The function `why` states this in its own words.
    """
    return tuple(each for each in account.evidence if not each.startswith(ABSENCE))


_CAUSES: Final[Mapping[Cause, Callable[[Account], str]]] = {
    Cause.RANK_EXIT: _of_ranks,
    Cause.NODE_FAULT: _of_hardware,
    Cause.INSTANCE_TERMINATED: _of_an_instance,
    Cause.NODE_UNREACHABLE: _of_silence,
    Cause.HANG: _unknown,
}


def _changes(account: Account) -> Iterator[str]:
    """Yield sentences about Everstep's response to the incident: what it did with the ranks and the nodes."""
    lost, new = listed(account.instance_ids), listed(account.replacement_instance_ids)
    if account.decision.startswith("stop at an agreed step") and account.reached_step is not None:
        yield f"Everstep stopped all ranks at step {account.reached_step:,}, which every rank had finished."
    elif account.outcome is Outcome.OPEN:
        yield "Everstep stopped all ranks."
    trial = _TRIAL.match(account.decision)
    if account.held:
        yield f"Everstep took {listed([node.node_id for node in account.held])} out of use."
    if account.terminated_ids:
        yield f"Everstep terminated {listed(account.terminated_ids)}."
    if lost and new:
        yield f"Everstep moved the ranks of {lost} to {new}."
    elif new:
        yield f"Everstep launched the job on {new} instead of one of its nodes, and the script failed again."
    elif lost and account.restored_at is not None:
        yield f"Everstep continued on {account.node_count_after} nodes without {lost}."
    elif not lost and (account.generation_after or 0) > account.generation_before:
        yield "Everstep restarted all ranks on the same nodes."
    if trial is not None and trial["step"] is not None:
        skipped = f"{int(trial['step']):,}"
        yield f"Everstep skipped step {skipped} once, to find out whether the state or the script was at fault."


def _end(account: Account) -> Iterator[str]:
    """Yield sentences that say how the recovery ended."""
    if account.outcome is Outcome.OPEN and account.wait is not None:
        yield f"Everstep requested {missing(account)} from AWS, which launched none."
    if account.outcome is Outcome.JOB_FAILED:
        yield "Everstep gave the job up."
    elif account.from_step is not None and account.restored_at is not None:
        source = SOURCES.get(account.restore_source or "")
        at = f"step {account.from_step:,}{f', from {source}' if source else ''}"
        yield f"Training resumed from {at}{_newer(account)}."


def _newer(account: Account) -> str:
    """Return why training did not resume from the newest step, or an empty text."""
    reached, resumed = account.reached_step, account.from_step
    if reached is None or resumed is None or resumed >= reached:
        return ""
    trial = _TRIAL.match(account.decision)
    if trial is not None and trial["step"] is not None:
        return ""
    return f", because no complete copy of step {reached:,} existed"
