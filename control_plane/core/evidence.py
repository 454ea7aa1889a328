"""The verdict on a node, from AWS's answers and agents' reports: whether its job keeps it (docs/design.md#failures).

    AWS reports the instance ended                           GONE immediately
    EC2 omits the instance twice + its agent is silent       GONE immediately; with a connected agent: no evidence
    the node's own live agent reports a fault code           GONE; while steps advance or no rank runs yet: IMPAIRED
    control link silent + data plane silent                  GONE: two classes of evidence
    control link silent + a failed status check              GONE: two classes; a failed check alone proves nothing
    control link or data plane alone silent for T_max        GONE; while steps advance: IMPAIRED if its agent reports,
                                                             else UNCLEAR
    control link or data plane alone silent, shorter         UNCLEAR
    steps advance while the node is silent                   the silence begins again: the steps need the node's ranks

T_max is `exclude_seconds`. Invariant: every verdict except ALIVE contains its evidence. Silence counts only while this
control plane could have received a report, and never in a blind fleet. While training advances, only AWS's report makes
a node GONE.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from msgspec import structs

from control_plane.core import remedies
from control_plane.core.observed import facts
from control_plane.core.observed.jobs import AgentSilence, Impairment
from control_plane.core.observed.nodes import Cause, InstanceCondition, NodeObserved, Remedy
from everstep.protocol.agent_messages import MemberReport
from everstep.protocol.ids import NO_STEP, NodeId, Step
from everstep.protocol.plan import Timeouts

COUNTER_EVIDENCE_BOUNDARIES = 2
"""Number of steps that proves a silent node's ranks alive. A single step may have been under way already."""
WATCHED_FROM_LEASES = 2 / 3
"""Fraction of `lease_seconds` after which the control plane tracks a silence. Evidence needs the whole lease."""
BLIND_FLEET_SIZE = 3
"""The silence of most nodes of such a fleet is no evidence: the control plane is more likely at fault."""


class NodeDisposition(StrEnum):
    """The conclusion about a node, and how the job treats the node.

    - ALIVE, UNCLEAR: use the node. If unclear, wait for more reports.
    - IMPAIRED: use the node until all ranks can stop at an agreed step, then continue without it (ADR 0016).
    - GONE: continue without the node.
    """

    ALIVE = "alive"
    UNCLEAR = "unclear"
    IMPAIRED = "impaired"
    GONE = "gone"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeVerdict:
    """The conclusion about one node, with the evidence."""

    node_id: NodeId
    disposition: NodeDisposition
    evidence: facts.Fact = facts.NOTHING
    cause: Cause = Cause.NODE_UNREACHABLE
    """Used only if the node is GONE."""
    is_final: bool = False
    """Whether no later report returns the node to the job."""
    may_terminate: bool = False
    """Whether AWS's report or a fault code from the node's own live agent permits a termination."""
    remedy: Remedy | None = None
    """None: REPLACE if `may_terminate`, else HOLD."""
    what: str = ""
    since: float | None = None
    """Unix seconds of the last evidence that a silent node was alive, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeProgress:
    """The progress of training, according to all members except the member that `judge` judges."""

    boundary: Step
    committed: Step
    stepped_at: float | None = None
    """Unix seconds of the first rank at step `boundary`, by the rank's clock, or None."""


def judge(
    node: NodeObserved,
    *,
    silence: AgentSilence | None,
    stepped_at: float | None = None,
    out_of_view: bool,
    is_blind: bool,
    now: float,
    timeouts: Timeouts,
    impairment: Impairment | None = None,
    is_training: bool = False,
    is_launching: bool = False,
    is_first_to_leave: bool = True,
) -> NodeVerdict:
    """Return the verdict on a node: whether its job keeps the node.

    Args:
        stepped_at: Unix time of the newest step of other members, which proves that the node was alive.
        out_of_view: whether other members report that the node does not answer them.
        is_launching: whether no rank runs yet. A faulty node is then IMPAIRED, because the launch needs its shards.
        is_first_to_leave: whether `first_to_leave` chose this node.
    """
    if node.instance is InstanceCondition.ENDED:
        return NodeVerdict(
            node_id=node.node_id,
            disposition=NodeDisposition.GONE,
            evidence=node.ended or facts.InstanceEnded(node_id=node.node_id, state="ended"),
            cause=Cause.INSTANCE_TERMINATED,
            is_final=True,
            may_terminate=True,
        )
    own = _own_word(
        node,
        now,
        timeouts,
        is_stepping=is_training and _is_stepping(impairment, now, timeouts),
        is_launching=is_launching,
    )
    if own is not None:
        return own
    if silence is None or not is_silent(node, timeouts):
        if is_training and is_first_to_leave and not is_blind and impairment is not None and impairment.is_out_of_view:
            return _out_of_view(node, impairment, now, timeouts, is_accuser=not out_of_view)
        return NodeVerdict(node_id=node.node_id, disposition=NodeDisposition.ALIVE)
    # The wall clock may jump. Limit the silence to the age of the agent's last report by the monotonic clock.
    lasted = min(now - silence.since, node.silent_seconds)
    spoken_for = silence.since if stepped_at is None else max(silence.since, min(stepped_at, now))

    def silent(disposition: NodeDisposition, proof: facts.SilenceProof) -> NodeVerdict:
        fact = facts.AgentSilent(
            node_id=node.node_id,
            seconds=round(lasted, 1),
            proof=proof,
            limit_seconds=timeouts.exclude_seconds if proof is facts.SilenceProof.LIMIT else 0.0,
            text=node.failed_status_check if proof is facts.SilenceProof.CHECK else "",
        )
        return NodeVerdict(node_id=node.node_id, disposition=disposition, evidence=fact, since=spoken_for)

    if is_blind:
        return silent(NodeDisposition.UNCLEAR, facts.SilenceProof.BLIND)
    if out_of_view and lasted > timeouts.lease_seconds:
        return silent(NodeDisposition.GONE, facts.SilenceProof.PEERS)
    if node.failed_status_check and lasted > timeouts.lease_seconds:
        return silent(NodeDisposition.GONE, facts.SilenceProof.CHECK)
    if lasted > timeouts.exclude_seconds:
        return silent(NodeDisposition.GONE, facts.SilenceProof.LIMIT)
    return silent(NodeDisposition.UNCLEAR, facts.SilenceProof.NONE)


def _own_word(
    node: NodeObserved, now: float, timeouts: Timeouts, *, is_stepping: bool, is_launching: bool
) -> NodeVerdict | None:
    """Return the verdict from the reports of the node's own agent, or None."""
    if is_silent(node, timeouts):
        return None
    found = remedies.worst(node.faults, node.history, now)
    if found is None:
        return None
    verdict = NodeVerdict(
        node_id=node.node_id,
        disposition=NodeDisposition.GONE,
        evidence=facts.NodeFaulty(node_id=node.node_id, fault=found.fault),
        cause=Cause.NODE_FAULT,
        is_final=True,
        may_terminate=True,
        remedy=found.remedy,
        what=found.what,
    )
    is_of_use = is_stepping or is_launching
    return replace(verdict, disposition=NodeDisposition.IMPAIRED, is_final=False) if is_of_use else verdict


def _out_of_view(
    node: NodeObserved, impairment: Impairment, now: float, timeouts: Timeouts, *, is_accuser: bool
) -> NodeVerdict:
    lasted = now - impairment.since
    fact = facts.OutOfView(node_id=node.node_id, seconds=round(lasted), is_accuser=is_accuser)
    if lasted <= timeouts.exclude_seconds:
        return NodeVerdict(node_id=node.node_id, disposition=NodeDisposition.UNCLEAR, evidence=fact)
    # `is_final` stays False, because the node may hold the only copy of its own shards.
    verdict = NodeVerdict(
        node_id=node.node_id,
        disposition=NodeDisposition.GONE,
        evidence=structs.replace(fact, limit_seconds=timeouts.exclude_seconds),
        # Only other members report this problem, which does not justify a termination. A person decides on the node.
        remedy=Remedy.RETIRE,
    )
    return (
        replace(verdict, disposition=NodeDisposition.IMPAIRED) if _is_stepping(impairment, now, timeouts) else verdict
    )


def _is_stepping(impairment: Impairment | None, now: float, timeouts: Timeouts) -> bool:
    """Return whether training has completed a step within T_max. True without an impairment."""
    return impairment is None or now - impairment.stepped_at <= timeouts.exclude_seconds


def is_silent(node: NodeObserved, timeouts: Timeouts) -> bool:
    """Return whether the control plane has received no message from a node for longer than `lease_seconds`."""
    return node.silent_seconds > timeouts.lease_seconds


def silent_without_commit(
    nodes: Collection[NodeObserved], *, committed_at: float | None, now: float, timeouts: Timeouts
) -> frozenset[NodeId]:
    """Return the silent nodes whose last report no longer proves that their peers hold copies of shards."""
    if committed_at is not None and now - committed_at <= timeouts.lease_seconds:
        # Every agent takes part in a commit. A silent agent may hang, and then replicates nothing.
        return frozenset()
    return frozenset(node.node_id for node in nodes if is_silent(node, timeouts))


def track_silences(
    known: Collection[AgentSilence],
    nodes: Collection[NodeObserved],
    progress: Mapping[NodeId, NodeProgress],
    now: float,
    timeouts: Timeouts,
) -> tuple[AgentSilence, ...]:
    """Return the silences of the members, sorted by node id. `progress` excludes each node's own report."""
    before = {silence.node_id: silence for silence in known}
    tracked: list[AgentSilence] = []
    for node in sorted(nodes, key=lambda node: node.node_id):
        if (
            node.instance is InstanceCondition.ENDED
            or node.silent_seconds <= WATCHED_FROM_LEASES * timeouts.lease_seconds
        ):
            continue  # Ignore short silences, and nodes whose instances AWS reports as ended.
        seen = progress.get(node.node_id, NodeProgress(boundary=NO_STEP, committed=NO_STEP))
        silence = before.get(node.node_id)
        if silence is None:
            unwatched = min(node.silent_seconds, WATCHED_FROM_LEASES * timeouts.lease_seconds)
            silence = AgentSilence(
                node_id=node.node_id, since=now - unwatched, boundary=seen.boundary, committed=seen.committed
            )
        elif seen.boundary >= silence.boundary + COUNTER_EVIDENCE_BOUNDARIES:
            silence = AgentSilence(node_id=node.node_id, since=now, boundary=seen.boundary, committed=seen.committed)
        tracked.append(silence)
    return tuple(tracked)


def track_impairments(
    known: Collection[Impairment],
    nodes: Collection[NodeObserved],
    out_of_view: Collection[NodeId],
    progress: Mapping[NodeId, NodeProgress],
    now: float,
    timeouts: Timeouts,
) -> tuple[Impairment, ...]:
    """Return the members with a fault, or without answers to other members, although their agents report."""
    before = {(each.node_id, each.is_out_of_view): each for each in known}
    tracked: list[Impairment] = []
    for node in sorted(nodes, key=lambda node: node.node_id):
        if node.instance is InstanceCondition.ENDED or is_silent(node, timeouts):
            continue  # `judge` handles ended instances, and `track_silences` handles silent agents.
        has_fault = remedies.worst(node.faults, node.history, now) is not None
        if not has_fault and node.node_id not in out_of_view:
            continue
        boundary = progress[node.node_id].boundary if node.node_id in progress else NO_STEP
        each = before.get((node.node_id, not has_fault))
        if each is None:
            each = Impairment(
                node_id=node.node_id, is_out_of_view=not has_fault, since=now, boundary=boundary, stepped_at=now
            )
        elif boundary >= each.boundary + COUNTER_EVIDENCE_BOUNDARIES:
            each = replace(each, boundary=boundary, stepped_at=now)
        tracked.append(each)
    return tuple(tracked)


def first_to_leave(reports: Mapping[NodeId, MemberReport], nodes: Sequence[NodeObserved]) -> NodeId | None:
    """Return the unreachable member that the job should give up, or None. `reports` excludes silent members."""
    # Two members that cannot reach each other report each other. With parity, one silent member leaves the shares on
    # all others incomplete, and they report each other. The neighbours in the tree of commits then identify it.
    complaints = Counter(holder for node in reports for holder in nodes_out_of_view({node: reports[node]}))
    silent = Counter(peer for node, report in reports.items() for peer in {*report.silent_peers} - {node})
    before = {node.node_id: sum(line.what == Cause.NODE_UNREACHABLE for line in node.history) for node in nodes}
    order = {node.node_id: place for place, node in enumerate(nodes)}
    coordinating = {node for node, report in reports.items() if report.round is not None and len(order) > 2}
    # A node that accuses another one, which does not accuse it, and has lost a partner before is the one to give up:
    # otherwise a wrong or lying node would cost the fleet one sound node after another.
    again = [node for node in accusers(reports, order) if node in order and before[node] and not complaints[node]]
    if again and max(complaints.values()) == 1:
        return max(again, key=lambda node: (before[node], order[node]))
    return max(
        (node for node in order if complaints[node]),
        key=lambda node: (complaints[node], silent[node], node not in coordinating, before[node], order[node]),
        default=None,
    )


def accusers(reports: Mapping[NodeId, MemberReport], accused: Collection[NodeId]) -> frozenset[NodeId]:
    """Return the nodes that report that some of the nodes in `accused` do not answer them."""
    return frozenset(node for node in reports if nodes_out_of_view({node: reports[node]}) & {*accused})


def progress_without(reports: Mapping[NodeId, MemberReport], left_out: NodeId) -> NodeProgress:
    """Return the progress of training according to all members except `left_out`."""
    others = {node: report for node, report in reports.items() if node != left_out}
    boundary = max((rank.boundary for report in others.values() for rank in report.ranks), default=NO_STEP)
    return NodeProgress(
        boundary=boundary,
        stepped_at=passed_at(others, boundary),
        committed=max((shard.committed for report in others.values() for shard in report.protection), default=NO_STEP),
    )


def passed_at(reports: Mapping[NodeId, MemberReport], least: Step) -> float | None:
    """Return the Unix time of the first rank at step `least`, or of a later step if all ranks are beyond it."""
    stamps = [
        rank.passed_at_seconds
        for report in reports.values()
        for rank in report.ranks
        if rank.boundary >= least and rank.passed_at_seconds
    ]
    return min(stamps, default=None)


def first_passed_at(reports: Mapping[NodeId, MemberReport], base: Step) -> float | None:
    """Return the Unix time of the first step after `base`, by the ranks' clocks, or None."""
    stamps = [
        rank.first_passed_at_seconds
        for report in reports.values()
        for rank in report.ranks
        if rank.first_passed_at_seconds
    ]
    return min(stamps, default=None) or passed_at(reports, Step(base + 1))


def nodes_out_of_view(reports: Mapping[NodeId, MemberReport]) -> frozenset[NodeId]:
    """Return the nodes that have not answered other members for longer than `holder_deadline_seconds`."""
    return silent_in_rounds(reports) | frozenset(
        holder
        for node, report in reports.items()
        for shard in report.protection
        for holder in {*shard.holders} - {*shard.in_view}
        if holder != node
    )


def silent_in_rounds(reports: Mapping[NodeId, MemberReport]) -> frozenset[NodeId]:
    """Return the nodes from which a neighbour in the tree of agents receives no messages about commits."""
    return frozenset(peer for node, report in reports.items() for peer in report.silent_peers if peer != node)


def is_fleet_blind(nodes: Collection[NodeObserved], timeouts: Timeouts) -> bool:
    """Return whether most of a fleet, jobs' nodes included, is silent although its instances have not ended."""
    present = [node for node in nodes if node.instance is not InstanceCondition.ENDED]
    silent = [node for node in present if is_silent(node, timeouts)]
    return len(present) >= BLIND_FLEET_SIZE and 2 * len(silent) > len(present)
