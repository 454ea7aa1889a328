"""Finds the faults that end a generation: failed ranks, lost nodes, restarted agents and failed loads.

Invariant: this module only describes faults. Each fault has a cause, a time and its evidence.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from control_plane.core import tracebacks
from control_plane.core.evidence import NodeDisposition, NodeVerdict, is_silent
from control_plane.core.incidents import Fault
from control_plane.core.observed import facts
from control_plane.core.observed.incidents import FailureRecord
from control_plane.core.observed.jobs import AgentSilence
from control_plane.core.observed.nodes import Cause, Implication, NodeObserved, Remedy
from control_plane.core.witnesses import SHARD_FAULTS
from everstep.protocol.agent_messages import (
    ExitClass,
    FaultCode,
    MemberPhase,
    MemberReport,
    NodeFault,
    RankExit,
)
from everstep.protocol.ids import NodeId, Rank, RunId, Step
from everstep.protocol.plan import GenerationPlan, RankPlan, Timeouts

LOAD_FAULTS = SHARD_FAULTS | {FaultCode.MEMORY_FULL}
"""Fault codes of agents whose ranks fail to load a state that another number of ranks wrote."""
COORDINATOR_FAULTS = frozenset({FaultCode.COORDINATOR_UNREACHABLE})
"""Fault codes of an agent that cannot reach the coordinator of its generation."""


def failing_ranks(reports: Mapping[NodeId, MemberReport]) -> list[tuple[NodeId, Rank, RankExit]]:
    """Return the ranks that ended without success, oldest end first. Ranks that the control plane killed come last."""
    failing = [
        (node, rank.rank, rank.exit)
        for node, report in reports.items()
        for rank in report.ranks
        if rank.exit and rank.exit.exit_class is not ExitClass.SUCCESS
    ]
    return sorted(failing, key=lambda each: (each[2].exit_class is ExitClass.HALTED, each[2].at_seconds, each[1]))


def _own_failures(reports: Mapping[NodeId, MemberReport]) -> list[tuple[NodeId, Rank, RankExit]]:
    return [each for each in failing_ranks(reports) if each[2].exit_class is not ExitClass.HALTED]


def of_ranks(reports: Mapping[NodeId, MemberReport], *, only: Rank | None = None) -> tuple[Fault, ...]:
    """Return the exit of the first failed rank, or of rank `only`, as a fault. Later exits are usually consequences."""
    for node, rank, ended in failing_ranks(reports):
        if only in (None, rank):
            fact = facts.RankEnded(
                rank=rank, node_id=node, exit_class=ended.exit_class, code=ended.code, memory=ended.memory
            )
            return (Fault(cause=Cause.RANK_EXIT, evidence=fact, at=ended.at_seconds, seen_on=(node,), rank=rank),)
    return ()


def failing_since(reports: Mapping[NodeId, MemberReport], otherwise: float) -> float:
    """Return the Unix time at which the first rank failed by itself, or `otherwise`."""
    return min((rank_exit.at_seconds for _, _, rank_exit in _own_failures(reports)), default=otherwise)


def failure_of_ranks(
    plan: GenerationPlan, reports: Mapping[NodeId, MemberReport], max_boundary: Step
) -> FailureRecord | None:
    """Return the first failed rank's failure, which counts towards MaxAttempts. None if no rank failed by itself."""
    for node, rank, ended in _own_failures(reports)[:1]:
        return FailureRecord(
            generation=plan.generation,
            step=ended.boundary,
            exit_class=ended.exit_class,
            code=ended.code,
            at=ended.at_seconds,
            max_boundary=max_boundary,
            last_lines=ended.last_lines,
            error=tracebacks.exception(ended.last_lines),
            error_place=tracebacks.place(ended.last_lines),
            rank=rank,
            memory=ended.memory,
            node_id=node,
            base_step=plan.base_step,
        )
    return None


def of_nodes(
    plan: GenerationPlan, verdicts: Mapping[NodeId, NodeVerdict], nodes: Mapping[NodeId, NodeObserved], now: float
) -> tuple[Fault, ...]:
    """Return one fault per lost member in the plan's order, and one more if some shard is lost."""
    lost = [verdicts[node.node_id] for node in plan.nodes if verdicts[node.node_id].disposition is NodeDisposition.GONE]
    faults = [
        Fault(
            cause=verdict.cause,
            evidence=verdict.evidence,
            at=lost_at(verdict, nodes, now),
            node_id=verdict.node_id
            if verdict.is_final
            else None,  # Name no lost node yet: a node that is only silent may still join the next generation.
            seen_on=(verdict.node_id,),
            implicates=implied(verdict, now),
        )
        for verdict in lost
    ]
    final = [verdict.node_id for verdict in lost if verdict.is_final]
    return (*faults, *group_loss(plan, final, min((fault.at for fault in faults), default=now)))


def lost_at(verdict: NodeVerdict, nodes: Mapping[NodeId, NodeObserved], now: float) -> float:
    """Return the Unix time of the node's last report, or of the last step during its silence that proved it alive."""
    return _last_sign(nodes, verdict.node_id, now) if verdict.since is None else min(verdict.since, now)


def implied(verdict: NodeVerdict, now: float) -> Implication | None:
    """Return the entry for the fault history of a lost node. None if AWS or a plan ended its work."""
    if verdict.cause is Cause.INSTANCE_TERMINATED or verdict.cause.is_planned:
        return None
    return Implication(
        node_id=verdict.node_id,
        incident_id="",
        at=now,
        what=verdict.what or verdict.cause.value,
        evidence=verdict.evidence,
        is_own_word=verdict.may_terminate,
        remedy=verdict.remedy or Remedy.RESTART,
    )


def group_loss(plan: GenerationPlan, lost: Sequence[NodeId], at: float) -> tuple[Fault, ...]:
    """Return one fault that lists the shards that the remaining nodes neither hold nor can rebuild, or nothing."""
    taken = [rank for rank in plan.ranks if _is_taken(rank, lost)]
    if not taken:
        return ()
    how = facts.ShardLoss.PARITY if taken[0].stripe else facts.ShardLoss.HOLDERS
    fact = facts.ShardsLost(ranks=tuple(rank.rank for rank in taken), how=how)
    return (Fault(cause=Cause.GROUP_LOST, evidence=fact, at=at),)


def _is_taken(rank: RankPlan, lost: Sequence[NodeId]) -> bool:
    owner, *peers = rank.holders
    return owner in lost and (any if rank.stripe else all)(peer in lost for peer in peers)


def memory_loss(forgotten: Sequence[Rank], at: float) -> tuple[Fault, ...]:
    """Return one fault that lists the shards that no node holds in memory, or nothing. `at`: Unix seconds."""
    if not forgotten:
        return ()
    fact = facts.ShardsLost(ranks=tuple(forgotten), how=facts.ShardLoss.MEMORY)
    return (Fault(cause=Cause.GROUP_LOST, evidence=fact, at=at),)


def of_agents(plan: GenerationPlan, run: RunId, nodes: Mapping[NodeId, NodeObserved], now: float) -> tuple[Fault, ...]:
    """Return one fault for each agent that has restarted, or has promised to join another generation."""
    faults: list[Fault] = []
    for member in plan.nodes:
        node = nodes.get(member.node_id)
        if node is None or not node.is_connected or not node.has_reported:
            continue
        report = node.member
        reported = report.generation if report is not None and report.run == run else None
        if reported == plan.generation:
            continue
        fact = facts.AgentRestarted(node_id=member.node_id, generation=plan.generation, reported_generation=reported)
        faults.append(_lost_agent(fact, _last_sign(nodes, member.node_id, now), now))
    return tuple(faults)


def _lost_agent(fact: facts.AgentRestarted | facts.AgentSilent, at: float, now: float) -> Fault:
    what, remedy = Cause.AGENT_LOST.value, Remedy.RESTART
    line = Implication(node_id=fact.node_id, incident_id="", at=now, what=what, evidence=fact, remedy=remedy)
    return Fault(cause=Cause.AGENT_LOST, evidence=fact, at=at, seen_on=(fact.node_id,), implicates=line)


def of_coordinator(
    plan: GenerationPlan, silence: AgentSilence | None, committed_by_others: Step, now: float, timeouts: Timeouts
) -> tuple[Fault, ...]:
    """Return a fault if the coordinator is silent past its deadline, and no step was committed since."""
    if (
        silence is None
        or now - silence.since <= timeouts.coordinator_deadline_seconds
        or committed_by_others > silence.committed
    ):
        return ()
    # Without a coordinator, ranks still finish steps, but no step is committed. The ranks restart despite their
    # progress.
    fact = facts.AgentSilent(
        node_id=plan.coordinator, seconds=round(now - silence.since, 1), proof=facts.SilenceProof.COORDINATOR
    )
    return (_lost_agent(fact, silence.since, now),)


def of_cut_off_members(
    plan: GenerationPlan, reports: Mapping[NodeId, MemberReport], now: float, timeouts: Timeouts
) -> tuple[Fault, ...]:
    """Return a fault if members could not reach the coordinator, which may be alive, within its deadline."""
    messages = [
        (node, fault.message)
        for node, report in sorted(reports.items())
        for fault in report.faults
        if fault.code in COORDINATOR_FAULTS
    ]
    if not messages:
        return ()
    at = now - timeouts.coordinator_deadline_seconds
    return (
        Fault(
            cause=Cause.AGENT_LOST,
            evidence=facts.CutOff(texts=tuple(message for _, message in messages)),
            at=at,
            seen_on=tuple(node for node, _ in messages),
            unreached=plan.coordinator,
        ),
    )


def of_silence(
    plan: GenerationPlan, nodes: Mapping[NodeId, NodeObserved], now: float, timeouts: Timeouts
) -> tuple[Fault, ...]:
    """Return one fault per member that is silent for longer than `coordinator_deadline_seconds` during a launch."""
    return tuple(
        Fault(
            cause=Cause.NODE_UNREACHABLE,
            evidence=facts.AgentSilent(
                node_id=member.node_id,
                seconds=round(nodes[member.node_id].silent_seconds, 1),
                proof=facts.SilenceProof.LAUNCH,
            ),
            at=now - nodes[member.node_id].silent_seconds,
            seen_on=(member.node_id,),
        )
        for member in plan.nodes
        if member.node_id in nodes
        and is_silent(nodes[member.node_id], timeouts)
        and nodes[member.node_id].silent_seconds > timeouts.coordinator_deadline_seconds
    )


def of_loads(plan: GenerationPlan, reports: Mapping[NodeId, MemberReport], now: float) -> tuple[Fault, ...]:
    """Return one fault per node that failed to load its shards."""
    failed = {node: report for node, report in reports.items() if _has_failed_load(plan, report)}
    return of_nodes_without_load(failed, failed, now)


def of_nodes_without_load(
    nodes: Iterable[NodeId], reports: Mapping[NodeId, MemberReport], now: float
) -> tuple[Fault, ...]:
    """Return one fault for each of `nodes`, none of which has loaded its shards."""
    return tuple(
        Fault(
            cause=Cause.LOAD_FAILED,
            evidence=facts.RankLoadFailed(node_id=node, text=_words(reports[node])),
            at=now,
            seen_on=(node,),
        )
        for node in sorted(nodes)
    )


def blocked_loads(plan: GenerationPlan, reports: Mapping[NodeId, MemberReport]) -> tuple[tuple[NodeId, NodeFault], ...]:
    """Return the nodes whose loads failed because S3, IAM or KMS was out of reach, each with its fault.

    Empty if a load also failed for another reason, because the job may then be the cause.
    """
    found: list[tuple[NodeId, NodeFault]] = []
    for node_id, report in sorted(reports.items()):
        if _has_failed_load(plan, report):
            because = [each for each in report.faults if _is_blocked(plan, node_id, each)]
            if not because or any(each.code == FaultCode.SOURCE_MISMATCH for each in report.faults):
                return ()
            found.append((node_id, because[0]))
    return tuple(found)


def held_loads(reports: Mapping[NodeId, MemberReport]) -> tuple[tuple[NodeId, NodeFault], ...]:
    """Return the nodes that repeat a load, because S3, IAM or KMS is out of reach, each with its fault."""
    return tuple(
        (node_id, fault)
        for node_id, report in sorted(reports.items())
        if report.phase is MemberPhase.LOADING
        for fault in report.faults
        if fault.obstacle is not None
    )


def _is_blocked(plan: GenerationPlan, node_id: NodeId, fault: NodeFault) -> bool:
    """Return whether a store prevented a load. Older agents report no obstacle, only that a source was unreachable."""
    if fault.obstacle is not None or fault.code != FaultCode.SOURCE_UNAVAILABLE:
        return fault.obstacle is not None
    shards = (
        plan.base_shards
        if plan.relayout is not None
        else [(rank, plan.ranks[rank].sources) for rank in plan.node(node_id).ranks]
    )
    return any(source.kind == "s3" for _, sources in shards for source in sources)


def _has_failed_load(plan: GenerationPlan, report: MemberReport) -> bool:
    if report.phase is MemberPhase.LOAD_FAILED or _permanent_faults(report):
        return True
    # Only in a relayout do the ranks themselves load the shards.
    return plan.relayout is not None and any(fault.code in LOAD_FAULTS for fault in report.faults)


def failure_of_loads(
    plan: GenerationPlan, reports: Mapping[NodeId, MemberReport], max_boundary: Step, now: float
) -> FailureRecord | None:
    """Return the first failed load as a failure that counts towards MaxAttempts, or None."""
    for node, report in sorted(reports.items()):
        if _has_failed_load(plan, report):
            return FailureRecord(
                generation=plan.generation,
                step=plan.base_step,
                exit_class=None,
                code=0,
                at=now,
                max_boundary=max_boundary,
                last_lines=_words(report),
                node_id=node,
                base_step=plan.base_step,
            )
    return None


def permanent(reports: Mapping[NodeId, MemberReport], *, has_trained: bool) -> NodeFault | None:
    """Return a permanent fault of the job, which a new generation would repeat, or None.

    Once the job has trained, two nodes must report a permanent fault. A fault of one node counts as a failed load.
    """
    found = {node: each for node, report in sorted(reports.items()) for each in reversed(_permanent_faults(report))}
    return next(iter(found.values()), None) if len(found) > has_trained else None


def _permanent_faults(report: MemberReport) -> list[NodeFault]:
    return [each for each in report.faults if each.is_permanent]


def gone(verdict: NodeVerdict) -> NodeVerdict:
    """Return the final verdict GONE on a member that the fleet has removed. Earlier evidence stays."""
    if verdict.disposition is NodeDisposition.GONE:
        return replace(verdict, is_final=True)
    removed = facts.NodeRemoved(node_id=verdict.node_id)
    return replace(
        verdict, disposition=NodeDisposition.GONE, evidence=removed, cause=Cause.INSTANCE_TERMINATED, is_final=True
    )


def _last_sign(nodes: Mapping[NodeId, NodeObserved], node_id: NodeId, now: float) -> float:
    node = nodes.get(node_id)
    return now if node is None or node.heard_at is None else min(now, node.heard_at)


def _words(report: MemberReport) -> str:
    return "; ".join(fault.message for fault in report.faults)
