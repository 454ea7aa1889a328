"""The sentence for each fact of an incident (`core.observed.facts`).

Invariant: pure. Every fact has a sentence, without a capital letter at its start and without a full stop.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final, assert_never

from control_plane.accounts import out_of_memory
from control_plane.core.observed import facts
from control_plane.core.observed.drills import DrillKind, DrillOutcome
from control_plane.core.remedies import is_of_hardware
from everstep.protocol.agent_messages import FaultCode

_XID_MEANINGS: Final[Mapping[int, str]] = {
    8: "the GPU stopped processing",
    11: "the push buffer stream is invalid or corrupted",
    13: "the graphics engine raised an exception",
    31: "the GPU had a memory page fault",
    32: "the push buffer stream is invalid or corrupted",
    43: "the GPU stopped processing",
    45: "the driver cleaned up after earlier errors",
    48: "GPU memory had an uncorrectable ECC error",
    54: "the GPU board has no auxiliary power",
    62: "the GPU's internal microcontroller halted",
    63: "the GPU retired a memory page or remapped a row",
    64: "the GPU failed to retire a memory page or to remap a row",
    74: "an NVLink connection failed",
    79: "the GPU has fallen off the bus",
    92: "GPU memory had many correctable ECC errors",
    94: "GPU memory had a contained ECC error",
    95: "GPU memory had an uncontained ECC error",
    109: "a context switch on the GPU timed out",
    119: "the GPU System Processor did not answer the driver",
    120: "the GPU System Processor had an error",
    140: "GPU memory had an unrecovered ECC error",
}
"""Meanings of frequent Xids, as clauses. Source: NVIDIA, Xid Catalog, column `Description`."""

_MAX_FRAMES = 3
_SILENT: Final[Mapping[facts.SilenceProof, str]] = {
    facts.SilenceProof.NONE: "",
    facts.SilenceProof.BLIND: ", and so is most of the fleet, so this silence is no evidence of a lost node",
    facts.SilenceProof.PEERS: " and other nodes could not reach it",
    facts.SilenceProof.CHECK: " and {fact.text}",
    facts.SilenceProof.LIMIT: ", longer than {fact.limit_seconds:g} s, and no step advanced",
    facts.SilenceProof.LAUNCH: " during the launch",
    facts.SilenceProof.COORDINATOR: " and no step was committed meanwhile",
}
_SHARDS: Final[Mapping[facts.ShardLoss, str]] = {
    facts.ShardLoss.HOLDERS: "every node that held the shard of rank {ranks} is lost",
    facts.ShardLoss.PARITY: "two nodes of a parity group are lost, and with them the shard of rank {ranks}",
    facts.ShardLoss.MEMORY: "no remaining node holds the shard of rank {ranks}",
}
_FAULTS: Final[Mapping[str, str]] = {
    FaultCode.GPU_XID: "an Xid error",
    FaultCode.GPU_ECC: "a GPU memory (ECC) error",
    FaultCode.GPU_LOST: "the loss of a GPU",
    FaultCode.GPU_THROTTLED: "a throttled GPU",
    FaultCode.GPU_SILENT: "a GPU that does not respond",
    FaultCode.NIC_DOWN: "a network card without a link",
    FaultCode.NIC_ERRORS: "errors of a network card",
    FaultCode.DISK_FULL: "a full disk",
    FaultCode.DISK_READ_ONLY: "a read-only disk",
    FaultCode.DISK_SILENT: "a disk that does not respond",
    FaultCode.MEMORY_LOW: "low memory",
    FaultCode.MEMORY_KILLED: "a process that the kernel killed for memory",
    FaultCode.MEMORY_FULL: "too little memory",
    FaultCode.RANKS_NOT_GONE: "processes that do not exit",
}
_ODD: Final[Mapping[facts.Oddity, str]] = {
    facts.Oddity.STOPPED: "stopped",
    facts.Oddity.BEHIND: "at an earlier step than the other ranks",
    facts.Oddity.ELSEWHERE: "at another place in the code than the other ranks",
}


_CAME: Final[Mapping[DrillOutcome, str]] = {
    DrillOutcome.JOB_COMPLETED: "the job completed",
    DrillOutcome.JOB_FAILED: "the job failed",
    DrillOutcome.JOB_STOPPED: "the job stopped",
    DrillOutcome.JOB_PAUSED: "the job was paused",
    DrillOutcome.OTHER_INCIDENT: "another incident began",
}
_PASSED = "passed the step that it had reached before the drill"


def drill_outcome(outcome: DrillOutcome | str, incident_id: str) -> str:
    """Return why a drill has ended. `outcome` may be the sentence that an earlier version stored, or empty."""
    try:
        why = DrillOutcome(outcome)
    except ValueError:
        return outcome
    match why:
        case DrillOutcome.TRAINED_ON:
            return f"training has {_PASSED}"
        case DrillOutcome.NO_LAUNCH_ENDED:
            return "the drill ended no launch"
        case DrillOutcome.NOT_TRAINING:
            return "the job was not training without an incident"
        case _:
            before = f"training {_PASSED}" if incident_id else "the result of the drill was known"
            return f"{_CAME[why]} before {before}"


def sentences(several: Iterable[facts.Fact]) -> str:
    """Return the sentences of several facts, joined by semicolons."""
    return "; ".join(map(sentence, several))


def sentence(fact: facts.Fact) -> str:
    """Return a fact as a clause, for example `rank 3 on i-07 ended: crashed, code 1`."""
    match fact:
        case facts.Recorded(text=text):
            return text
        case facts.InstanceEnded():
            return f"EC2 reports {fact.node_id} as {fact.state}" + (f" ({fact.text})" if fact.text else "")
        case facts.NodeRemoved():
            return f"{fact.node_id} is no longer part of the fleet"
        case facts.Faulty():
            return f"{fault_name(fact)}: {fact.text}" + ("; a reboot did not repair it" if fact.is_repeated else "")
        case facts.SlowNode():
            rates = [f"{rate / 1e6:,.1f}" for rate in (fact.rate, fact.median_rate)]
            unit = "million operations per second" if "matmul" in fact.test else "MB/s"
            return f"{fact.test} reaches {rates[0]} {unit}; the median of {fact.other_count} others is {rates[1]}"
        case facts.NodeFaulty():
            return f"the agent of {fact.node_id} reports {sentence(fact.fault)}"
        case facts.Lemon():
            return f"{fact.node_id} is not used again: {lemon(fact)}"
        case facts.Announced():
            return f"AWS announced for {fact.node_id}: {fact.notice.value.replace('_', ' ')} ({fact.text})"
        case facts.Requested(request=request, node_id=node_id, by=by):
            note = f": {fact.note}" if fact.note else ""
            if fact.is_roll:
                return f"the roll of the fleet {request}s {node_id} ({by}){note}"
            return f"a user requested to {request} {node_id} ({by}){note}"
        case facts.AgentSilent():
            who = "coordinator" if fact.proof is facts.SilenceProof.COORDINATOR else "agent of"
            return (
                f"the {who} {fact.node_id} was silent for {fact.seconds:.1f} s{_SILENT[fact.proof].format(fact=fact)}"
            )
        case facts.OutOfView():
            limit = fact.limit_seconds
            more = "" if limit is None else f", longer than {limit:g} s, although its agent still reports"
            if fact.is_accuser:
                return (
                    f"{fact.node_id} has reported for {fact.seconds:.0f} s that other nodes do not answer it, as it "
                    "did before, and no other node reports that"
                )
            return f"the replicas on {fact.node_id} have not responded to their owners for {fact.seconds:.0f} s{more}"
        case facts.NotPrepared():
            return _not_prepared(fact)
        case facts.CutOff(texts=texts):
            return f"{'; '.join(texts)}: no step was committed meanwhile"
        case facts.AgentRestarted(reported_generation=None):
            return f"the agent of {fact.node_id} has restarted and has no state of this job"
        case facts.AgentRestarted():
            numbers = f"launch {fact.reported_generation}, not launch {fact.generation}"
            return f"the agent of {fact.node_id} reports {numbers}"
        case facts.RankEnded(memory=memory) if memory is not None:
            return f"{out_of_memory.sentence(fact.rank, fact.node_id, memory)}; {out_of_memory.advice(memory)}"
        case facts.RankEnded():
            how = f"{'signal' if fact.code < 0 else 'code'} {abs(fact.code)}"
            return f"rank {fact.rank} on {fact.node_id} ended: {fact.exit_class.value}, {how}"
        case facts.RankLoadFailed():
            return f"{fact.node_id} failed to load its shards: {fact.text or 'a source failed verification'}"
        case facts.ShardDiffers():
            copy = f"the copy of {fact.source}" if fact.source else "the copy"
            return (
                f"{fact.node_id} restored step {fact.step} of rank {fact.rank}, and {copy} is not the state that the "
                "rank's former node reported"
            )
        case facts.AloneFailedToLoad():
            return f"{fact.node_id} alone could not load step {fact.step}"
        case facts.ShardsLost():
            return _SHARDS[fact.how].format(ranks=listed_ranks(fact.ranks))
        case facts.Standstill(proof=None):
            return standstill(fact)
        case facts.Standstill():
            return f"hang: {hang(fact)}"
        case facts.AloneStuck():
            ranks, are = ("rank", "is") if len(fact.ranks) == 1 else ("ranks", "are")
            return f"{fact.node_id} alone is stuck: its {ranks} {listed_ranks(fact.ranks)} {are} {_ODD[fact.how]}"
        case facts.SameStack():
            return f"{_rank_word(fact.ranks)} {listed_ranks(fact.ranks)}: {_frames(fact.text)}"
        case facts.ControlPlaneAbsent():
            until = datetime.fromtimestamp(fact.until, UTC)
            return f"no control plane was running for {fact.seconds:.0f} s, until {until:%H:%M:%S} UTC"
        case facts.DrillOrdered():
            where = f"rank {fact.rank} on {fact.node_id}" if fact.drill is DrillKind.KILL_RANK else fact.node_id
            return f"a drill ({fact.drill_id}): {fact.by} requested {fact.drill} on {where}"
        case facts.NodesReady(node_ids=names):
            return f"{', '.join(names)} can work for the job"
        case facts.Returned():
            why = f"for {fact.to}" if fact.to else f"MaxNodeCount is {fact.max_node_count}"
            besides = "" if fact.besides is None else f"; {sentence(fact.besides)}"
            return f"{fact.node_id} returns to the fleet: {why}{besides}"
        case facts.NotPaused(step=None):
            return f"the ranks did not agree on a stop, and made no step, for {fact.seconds:g} s"
        case facts.NotPaused():
            return f"step {fact.step} did not become a checkpoint within {fact.seconds:g} s: it is not paused"
        case facts.NotStopped():
            return f"{'its ranks did not end' if fact.is_over else 'no step'} within {fact.seconds:g} s"
        case facts.NoReplacement():
            return f"no node came within {fact.seconds:g} s"
        case facts.FailedAlike():
            return f"ranks failed alike on {fact.node_id} after step {fact.step}, and pass that step without it"
        case facts.LostEachOther(departed=departed):
            others = ", ".join(departed)
            return f"{fact.node_id} and {others} had lost each other's replicas; the job moved off {others}"
        case _:
            assert_never(fact)


def lemon(fact: facts.Lemon) -> str:
    """Return in which incidents a lemon was involved."""
    involvements = ", ".join(f"{code_words(each.what)} ({each.incident_id})" for each in fact.involvements)
    return f"it was involved in {len(fact.involvements)} incidents within {fact.hours:g} h: {involvements}"


def _xid(number: int) -> str:
    return f"Xid {number} ({_XID_MEANINGS[number]})" if number in _XID_MEANINGS else f"Xid {number}"


def code_words(code: str) -> str:
    """Return the code of a fault or of an incident's cause in words. The number of an Xid may follow the code."""
    code, _, number = code.partition(" ")
    return _xid(int(number)) if number else _FAULTS.get(code, code.replace("_", " "))


def hang(fact: facts.Standstill) -> str:
    """Return a standstill with the proof of a hang."""
    return f"{standstill(fact)}: {hang_proof(fact)}"


def hardware_fault(evidence: Iterable[facts.Fact]) -> facts.NodeFaulty | None:
    """Return the first fault of a node's hardware in evidence: its remedy is a reboot or other hardware."""
    faults = (each for each in evidence if isinstance(each, facts.NodeFaulty))
    return next((each for each in faults if is_of_hardware(each.fault)), None)


def fault_name(fault: facts.Faulty) -> str:
    """Return the name of a fault, such as `the loss of a GPU`, or an Xid with its meaning."""
    return code_words(fault.code) if fault.xid is None else _xid(fault.xid)


def standstill(fact: facts.Standstill) -> str:
    """Return which ranks made no progress, in which phases and for how long, without the proof of a hang."""
    stuck, phases = ranks_words(fact.stuck), ", ".join(fact.phases)
    return f"{stuck} made no progress in {phases} for {fact.seconds:.0f} s, the limit is {fact.limit_seconds:g} s"


def hang_proof(fact: facts.Standstill) -> str:
    """Return how the stacks of the ranks prove a hang. Empty if they prove nothing."""
    proven = "" if fact.proven is None else ranks_words(fact.proven)
    match fact.proof:
        case facts.HangProof.STOPPED:
            return f"{proven} stopped by a signal"
        case facts.HangProof.ASLEEP:
            return "no stack changed between two stack dumps, and the ranks used neither CPU nor GPU"
        case facts.HangProof.LEFT_BEHIND:
            return f"{proven} asleep with unchanged stacks while other ranks reached step {fact.reached_step}"
        case facts.HangProof.UNCHANGED:
            return (
                f"no stack has changed for longer than {fact.last_limit_seconds:g} s, although ranks use CPU or GPU: "
                "they wait for each other"
            )
        case None:
            return ""


def ranks_words(group: facts.RanksOnNodes) -> str:
    """Return ranks with their nodes: `ranks 0, 1 on i-1`, or `all 8 ranks`."""
    if group.are_all:
        return f"all {len(group.ranks)} ranks"
    return f"{_rank_word(group.ranks)} {listed_ranks(group.ranks)} on {', '.join(group.node_ids)}"


def listed_ranks(ranks: Iterable[int]) -> str:
    """Return rank numbers as text: `0, 1, 7`."""
    return ", ".join(map(str, ranks))


def _rank_word(ranks: Sequence[int]) -> str:
    return "rank" if len(ranks) == 1 else "ranks"


def _frames(stack: str) -> str:
    frames = [line.strip() for line in stack.splitlines()[1:]]
    if not frames:
        return stack or "no Python stack"
    return " < ".join([*frames[:_MAX_FRAMES], *(["…"] if len(frames) > _MAX_FRAMES else [])])


def _not_prepared(fact: facts.NotPrepared) -> str:
    words = {
        facts.Absence.LATE: "did not prepare within {seconds:g} s",
        facts.Absence.SILENT: "did not prepare within {seconds:g} s and is silent",
        facts.Absence.UNREACHABLE: "was unreachable for {seconds:g} s",
    }[fact.how]
    cost = (
        ""
        if fact.restorable_step is None
        else f"; without it, only step {fact.restorable_step} can be restored, not the committed step "
        f"{fact.committed_step}"
    )
    return f"{fact.node_id} {words.format(seconds=fact.seconds)}{cost}"
