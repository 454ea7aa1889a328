"""What signals prove about a node (design §7, Evidence).

    AWS says ended                                  gone at once
    a typed fault of its own live agent             gone: the node says so itself
    control link silent + data plane silent         gone: two classes
    one class alone for T_max                       gone
    one class, shorter                              wait
    steps advance without it having been heard      alive: its ranks make boundaries that others report

Invariant: every verdict but ALIVE names its evidence in sentences; silence is never counted from before this control plane could have heard.
*Blind is not dead*: while most of a fleet is silent and AWS says that it runs, silence proves nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum

from control_plane.core.observed import NO_STEP, Cause, InstanceCondition, NodeObserved, Silence
from everstep.protocol.agent_messages import MemberReport
from everstep.protocol.ids import Generation, NodeId, RunId, Step
from everstep.protocol.plan import Timeouts

NODE_FAULTS = frozenset({"ranks_not_gone"})
"""Faults of a live agent that make its node unusable; other faults are the job's."""
COUNTER_EVIDENCE_BOUNDARIES = 2
"""Boundaries completed since a silence began that prove the silent node's ranks alive: one may still have been under way."""
WATCHED_FROM_LEASES = 2 / 3
"""From so much of a lease on, a silence is followed: whether steps advance meanwhile has to be known by the time that it counts."""
BLIND_FLEET_SIZE = 3
"""From this many nodes on, most of them falling silent at once says more about the observer than about them."""


class Standing(StrEnum):
    """What the evidence proves. ALIVE: use it. UNCLEAR: wait, and use it. GONE: do without it."""

    ALIVE = "alive"
    UNCLEAR = "unclear"
    GONE = "gone"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What is proven about one node, and by what."""

    node_id: NodeId
    standing: Standing
    evidence: str = ""
    cause: Cause = Cause.NODE_UNREACHABLE
    """What a GONE node means for its job."""
    is_final: bool = False
    """Nothing that is still to be heard can make it a member again."""
    may_terminate: bool = False
    """AWS's word, or a typed fault that the live agent reported itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far training is, from the reports of all members but the one that is judged."""

    boundary: Step
    committed: Step


def judge(node: NodeObserved, *, silence: Silence | None, out_of_view: bool, is_blind: bool, now: float, timeouts: Timeouts) -> Verdict:
    """Return what is proven about a node.

    Args:
        node: as observed.
        silence: since when it has been silent while no steps advanced, or None while it is not silent.
        out_of_view: other members report that its replicas stopped answering: the data plane's evidence.
        is_blind: most of its fleet is silent.
        now: Unix seconds.
        timeouts: the ladder.

    Returns:
        ALIVE, UNCLEAR or GONE; unless ALIVE, with the evidence in a sentence.
    """
    if node.instance is InstanceCondition.ENDED:
        words = f"EC2 reports {node.node_id} as {node.instance_words or 'ended'}"
        return Verdict(
            node_id=node.node_id, standing=Standing.GONE, evidence=words, cause=Cause.INSTANCE_TERMINATED, is_final=True, may_terminate=True
        )
    fault = next((fault for fault in node.member.faults if fault.code in NODE_FAULTS), None) if node.member is not None else None
    if fault is not None:
        words = f"the agent of {node.node_id} reports {fault.code}: {fault.message}"
        return Verdict(node_id=node.node_id, standing=Standing.GONE, evidence=words, cause=Cause.NODE_FAULT, is_final=True, may_terminate=True)
    if silence is None or not is_silent(node, timeouts):
        return Verdict(node_id=node.node_id, standing=Standing.ALIVE)
    lasted = now - silence.since
    words = f"the agent of {node.node_id} has been silent for {lasted:.1f} s"
    if is_blind:
        return Verdict(node_id=node.node_id, standing=Standing.UNCLEAR, evidence=f"{words}, but so is most of the fleet: blind is not dead")
    if out_of_view and lasted > timeouts.lease_seconds:
        return Verdict(node_id=node.node_id, standing=Standing.GONE, evidence=f"{words} and its replicas do not answer their owners")
    if lasted > timeouts.exclude_seconds:
        return Verdict(
            node_id=node.node_id, standing=Standing.GONE, evidence=f"{words}, longer than {timeouts.exclude_seconds:g} s, and no step advanced"
        )
    return Verdict(node_id=node.node_id, standing=Standing.UNCLEAR, evidence=words)


def is_silent(node: NodeObserved, timeouts: Timeouts) -> bool:
    """Say whether a node's control link has been silent for longer than its lease."""
    return node.silent_seconds > timeouts.lease_seconds


def track_silences(
    known: Collection[Silence], nodes: Collection[NodeObserved], progress: Mapping[NodeId, Progress], now: float, timeouts: Timeouts
) -> tuple[Silence, ...]:
    """Return the silences that are followed; those shorter than a lease do not count yet.

    A silence begins with the node's last word, and begins anew whenever two boundaries were completed during it: they prove that its ranks live.
    The last word is up to a third of a lease old when a node dies, so steps are compared from a little later on.

    Args:
        known: from the pass before.
        nodes: the members.
        progress: by node, what all others report.
        now: Unix seconds.
        timeouts: the ladder.

    Returns:
        One for each node that is silent, sorted by id; to be given to the next pass.
    """
    before = {silence.node_id: silence for silence in known}
    tracked = []
    for node in sorted(nodes, key=lambda node: node.node_id):
        if node.instance is InstanceCondition.ENDED or node.silent_seconds <= WATCHED_FROM_LEASES * timeouts.lease_seconds:
            continue  # of an ended instance nothing more is to be learnt from silence
        seen = progress.get(node.node_id, Progress(boundary=NO_STEP, committed=NO_STEP))
        silence = before.get(node.node_id)
        if silence is None:
            silence = Silence(node_id=node.node_id, since=now - node.silent_seconds, boundary=seen.boundary, committed=seen.committed)
        elif seen.boundary >= silence.boundary + COUNTER_EVIDENCE_BOUNDARIES:
            silence = Silence(node_id=node.node_id, since=now, boundary=seen.boundary, committed=seen.committed)
        tracked.append(silence)
    return tuple(tracked)


def progress_without(reports: Mapping[NodeId, MemberReport], left_out: NodeId) -> Progress:
    """Return how far training is by the word of all members but one.

    Args:
        reports: of the members, of the newest generation.
        left_out: whose own word does not count.

    Returns:
        The highest boundary and the highest committed step that the others report, `NO_STEP` where none does.
    """
    others = [report for node, report in reports.items() if node != left_out]
    return Progress(
        boundary=max((rank.boundary for report in others for rank in report.ranks), default=NO_STEP),
        committed=max((shard.committed for report in others for shard in report.protection), default=NO_STEP),
    )


def nodes_out_of_view(reports: Mapping[NodeId, MemberReport]) -> frozenset[NodeId]:
    """Return the nodes that the data plane of another one has not heard for the holder deadline: lost from a view, or silent in the rounds."""
    silent = frozenset(peer for node, report in reports.items() for peer in report.silent_peers if peer != node)
    return silent | frozenset(
        holder
        for node, report in reports.items()
        for shard in report.protection
        for holder in shard.holders
        if holder not in shard.in_view and holder != node
    )


def current_reports(nodes: Mapping[NodeId, NodeObserved], run: RunId, generation: Generation) -> dict[NodeId, MemberReport]:
    """Return the members' reports that speak of this generation of this run."""
    return {
        node_id: node.member
        for node_id, node in nodes.items()
        if node.member is not None and node.member.run == run and node.member.generation == generation
    }


def is_fleet_blind(nodes: Collection[NodeObserved], timeouts: Timeouts) -> bool:
    """Say whether most of a fleet is silent although AWS does not say that it ended.

    Args:
        nodes: all nodes of the fleet whose agents have ever connected.
        timeouts: the ladder.

    Returns:
        True when more than half of at least `BLIND_FLEET_SIZE` nodes are silent.
    """
    present = [node for node in nodes if node.instance is not InstanceCondition.ENDED]
    silent = [node for node in present if is_silent(node, timeouts)]
    return len(present) >= BLIND_FLEET_SIZE and 2 * len(silent) > len(present)
