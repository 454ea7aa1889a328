"""What signals prove about a node (docs/design.md#failures).

    AWS says ended                                           gone at once
    a typed fault of its own live agent                      gone: the node says so itself; while steps advance, or none are due: impaired
    control link silent + data plane silent                  gone: two classes
    control link silent + a status check impaired            gone: two classes; a check that fails while the agent is heard means nothing
    one class alone for T_max                                gone; while steps advance: impaired if its agent is heard, else wait
    one class, shorter                                       wait
    steps advance without it having been heard               alive: its ranks make boundaries that others report

An impaired member works, and is left at a stop that all ranks agree upon, once another node is there to take over (ADR
0016).

Invariant: every verdict but ALIVE names its evidence in sentences; silence is never counted from before this control
plane could have heard; nobody is gone while steps advance, unless AWS says so. *Blind is not dead*: while most of a
fleet is silent and AWS says that it runs, silence proves nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from control_plane.core import remedies
from control_plane.core.observed.jobs import Impairment, Silence
from control_plane.core.observed.nodes import Cause, InstanceCondition, NodeObserved, Remedy
from control_plane.core.observed.steps import NO_STEP
from everstep.protocol.agent_messages import FaultCode, MemberReport
from everstep.protocol.ids import Generation, NodeId, RunId, Step
from everstep.protocol.plan import Timeouts

NODE_FAULTS = frozenset({FaultCode.RANKS_NOT_GONE})
"""Faults of a live agent that make its node unusable; other faults are the job's."""
COUNTER_EVIDENCE_BOUNDARIES = 2
"""Boundaries completed since a silence began that prove the silent node's ranks alive: one may still have been under way."""
WATCHED_FROM_LEASES = 2 / 3
"""From so much of a lease on, a silence is followed: whether steps advance meanwhile has to be known by the time that it counts."""
BLIND_FLEET_SIZE = 3
"""From this many nodes on, most of them falling silent at once says more about the observer than about them."""


class Standing(StrEnum):
    """What the evidence proves. ALIVE: use it. UNCLEAR: wait, and use it. IMPAIRED: use it until an agreed stop.

    GONE: do without it.
    """

    ALIVE = "alive"
    UNCLEAR = "unclear"
    IMPAIRED = "impaired"
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
    remedy: Remedy | None = None
    """What is to be done about the node; None: see `Exclusion.remedy`."""
    what: str = ""
    """The fault by its name, where there is one."""
    since: float | None = None
    """Unix seconds: since when nothing spoke for the node any more, where its silence is what is judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far training is, from the reports of all members but the one that is judged."""

    boundary: Step
    committed: Step
    stepped_at: float | None = None
    """Unix seconds, by the ranks' own stamps: when the first of them passed that boundary.

    None where nobody has told.
    """


def judge(
    node: NodeObserved,
    *,
    silence: Silence | None,
    stepped_at: float | None = None,
    out_of_view: bool,
    is_blind: bool,
    now: float,
    timeouts: Timeouts,
    impairment: Impairment | None = None,
    is_training: bool = False,
    is_launching: bool = False,
    is_blamed: bool = True,
) -> Verdict:
    """Return what is proven about a node.

    Args:
        node: as observed.
        silence: since when it has been silent while no steps advanced, or None while it is not silent.
        stepped_at: Unix seconds: when the newest boundary that others report was passed. Steps that were made after its
            last word spoke for it, too.
        out_of_view: other members report that its replicas stopped answering: the data plane's evidence.
        is_blind: most of its fleet is silent.
        now: Unix seconds.
        timeouts: the ladder.
        impairment: since when something has been wrong with it although its agent is heard, or None.
        is_training: its generation's ranks run. Their steps count as advancing until none was made for T_max.
        is_launching: it was a member, and no rank runs yet: what is wrong with it takes nothing from what its memory
            holds.
        is_blamed: of the members out of view it is the one to be left, see `blamed`.

    Returns:
        ALIVE, UNCLEAR, IMPAIRED or GONE; unless ALIVE, with the evidence in a sentence.
    """
    if node.instance is InstanceCondition.ENDED:
        words = f"EC2 reports {node.node_id} as {node.instance_words or 'ended'}"
        return Verdict(
            node_id=node.node_id,
            standing=Standing.GONE,
            evidence=words,
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
        if (
            is_training
            and out_of_view
            and is_blamed
            and not is_blind
            and impairment is not None
            and impairment.is_out_of_view
        ):
            return _out_of_view(node, impairment, now, timeouts)
        return Verdict(node_id=node.node_id, standing=Standing.ALIVE)
    lasted = min(now - silence.since, node.silent_seconds)  # `now` may be stepped, the age of the last word is not
    words = f"the agent of {node.node_id} has been silent for {lasted:.1f} s"
    spoken_for = silence.since if stepped_at is None else max(silence.since, min(stepped_at, now))
    silent = Verdict(node_id=node.node_id, standing=Standing.UNCLEAR, evidence=words, since=spoken_for)
    if is_blind:
        return replace(silent, evidence=f"{words}, but so is most of the fleet: blind is not dead")
    if out_of_view and lasted > timeouts.lease_seconds:
        return replace(silent, standing=Standing.GONE, evidence=f"{words} and other nodes cannot reach it")
    if node.complaint and lasted > timeouts.lease_seconds:
        return replace(silent, standing=Standing.GONE, evidence=f"{words} and {node.complaint}")
    if lasted > timeouts.exclude_seconds:
        return replace(
            silent,
            standing=Standing.GONE,
            evidence=f"{words}, longer than {timeouts.exclude_seconds:g} s, and no step advanced",
        )
    return silent


def _own_word(
    node: NodeObserved, now: float, timeouts: Timeouts, *, is_stepping: bool, is_launching: bool
) -> Verdict | None:
    """Return the verdict on a node whose own agent reports a fault that it must leave its job for; only a live agent's word counts.

    A node that cannot be rid of its old ranks can promise nothing, and so is of no use to a launch.
    """
    if is_silent(node, timeouts):
        return None
    of_job = (
        next((fault for fault in node.member.faults if fault.code in NODE_FAULTS), None)
        if node.member is not None
        else None
    )
    found = remedies.worst([*([of_job] if of_job is not None else []), *node.faults], node.history, now)
    if found is None:
        return None
    verdict = Verdict(
        node_id=node.node_id,
        standing=Standing.GONE,
        evidence=f"the agent of {node.node_id} reports {found.words}",
        cause=Cause.NODE_FAULT,
        is_final=True,
        may_terminate=True,
        remedy=found.remedy,
        what=found.what,
    )
    is_of_use = is_stepping or (is_launching and of_job is None)
    return replace(verdict, standing=Standing.IMPAIRED, is_final=False) if is_of_use else verdict


def _out_of_view(node: NodeObserved, impairment: Impairment, now: float, timeouts: Timeouts) -> Verdict:
    """Return the verdict on a node whose agent is heard and whose replicas do not answer: one class of evidence, which has to last.

    Never final: it may be the only one to hold its own shards, so it is left only where that costs no committed step.
    """
    lasted = now - impairment.since
    words = f"the replicas on {node.node_id} have not answered their owners for {lasted:.0f} s"
    if lasted <= timeouts.exclude_seconds:
        return Verdict(node_id=node.node_id, standing=Standing.UNCLEAR, evidence=words)
    verdict = Verdict(
        node_id=node.node_id,
        standing=Standing.GONE,
        evidence=f"{words}, longer than {timeouts.exclude_seconds:g} s, although its agent is heard",
        remedy=Remedy.RETIRE,  # that its agent is heard says nothing about its replicas: a person has to look
    )
    return replace(verdict, standing=Standing.IMPAIRED) if _is_stepping(impairment, now, timeouts) else verdict


def _is_stepping(impairment: Impairment | None, now: float, timeouts: Timeouts) -> bool:
    """Say whether steps still advance: one that is not followed yet has had no time to show that they do not."""
    return impairment is None or now - impairment.stepped_at <= timeouts.exclude_seconds


def is_silent(node: NodeObserved, timeouts: Timeouts) -> bool:
    """Say whether a node's control link has been silent for longer than its lease."""
    return node.silent_seconds > timeouts.lease_seconds


def unvouched(
    nodes: Collection[NodeObserved], *, committed_at: float | None, now: float, timeouts: Timeouts
) -> frozenset[NodeId]:
    """Return whose last word of the shards that it owns is worth nothing any more: it is silent, and no step was committed for as long.

    A shard that its owner saw whole is not protected by that: an agent that stands still neither seals nor votes, and
    where it coordinates, nobody is asked to. What is committed all the same has every owner's vote, however long the
    control plane has not heard of one.

    Args:
        nodes: of a job that trains.
        committed_at: Unix seconds of its newest commit; None: there is none.
        now: Unix seconds.
        timeouts: the ladder.

    Returns:
        Their ids.
    """
    if committed_at is not None and now - committed_at <= timeouts.lease_seconds:
        return frozenset()
    return frozenset(node.node_id for node in nodes if is_silent(node, timeouts))


def track_silences(
    known: Collection[Silence],
    nodes: Collection[NodeObserved],
    progress: Mapping[NodeId, Progress],
    now: float,
    timeouts: Timeouts,
) -> tuple[Silence, ...]:
    """Return the silences that are followed; those shorter than a lease do not count yet.

    A silence begins with the node's last word, and begins anew whenever two boundaries were completed during it: they
    prove that its ranks live. The last word is up to a third of a lease old when a node dies, so steps are compared
    from a little later on. Of a silence that is found later than that, because nobody looked, the time before counts
    for no more: nobody saw whether steps were made in it.

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
        if (
            node.instance is InstanceCondition.ENDED
            or node.silent_seconds <= WATCHED_FROM_LEASES * timeouts.lease_seconds
        ):
            continue  # of an ended instance nothing more is to be learnt from silence
        seen = progress.get(node.node_id, Progress(boundary=NO_STEP, committed=NO_STEP))
        silence = before.get(node.node_id)
        if silence is None:
            unwatched = min(node.silent_seconds, WATCHED_FROM_LEASES * timeouts.lease_seconds)
            silence = Silence(
                node_id=node.node_id, since=now - unwatched, boundary=seen.boundary, committed=seen.committed
            )
        elif seen.boundary >= silence.boundary + COUNTER_EVIDENCE_BOUNDARIES:
            silence = Silence(node_id=node.node_id, since=now, boundary=seen.boundary, committed=seen.committed)
        tracked.append(silence)
    return tuple(tracked)


def track_impairments(
    known: Collection[Impairment],
    nodes: Collection[NodeObserved],
    out_of_view: Collection[NodeId],
    progress: Mapping[NodeId, Progress],
    now: float,
    timeouts: Timeouts,
) -> tuple[Impairment, ...]:
    """Return which members have something wrong while their agents are heard, and when steps last advanced in spite of it.

    Args:
        known: from the pass before.
        nodes: the members.
        out_of_view: those whose replicas do not answer.
        progress: by node, what all others report.
        now: Unix seconds.
        timeouts: the ladder.

    Returns:
        One for each such node, sorted by id; to be given to the next pass.
    """
    before = {(each.node_id, each.is_out_of_view): each for each in known}
    tracked = []
    for node in sorted(nodes, key=lambda node: node.node_id):
        if node.instance is InstanceCondition.ENDED or is_silent(node, timeouts):
            continue  # AWS has spoken, or silence is what is followed
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


def blamed(reports: Mapping[NodeId, MemberReport], nodes: Sequence[NodeObserved]) -> NodeId | None:
    """Return the one member to be left of those out of view: two that cannot reach each other blame each other, and one of them is enough.

    Args:
        reports: of the members that are heard.
        nodes: the members by GROUP_RANK.

    Returns:
        Whom most others have lost; of equals the one that was out of view before, with another partner; else the last.
        None while nobody is.
    """
    complaints = Counter(holder for node in reports for holder in nodes_out_of_view({node: reports[node]}))
    before = {node.node_id: sum(line.what == Cause.NODE_UNREACHABLE for line in node.history) for node in nodes}
    order = {node.node_id: place for place, node in enumerate(nodes)}
    return max(
        (node for node in order if complaints[node]),
        key=lambda node: (complaints[node], before[node], order[node]),
        default=None,
    )


def progress_without(reports: Mapping[NodeId, MemberReport], left_out: NodeId) -> Progress:
    """Return how far training is by the word of all members but one.

    Args:
        reports: of the members, of the newest generation.
        left_out: whose own word does not count.

    Returns:
        The highest boundary, when it was passed, and the highest committed step that the others report; `NO_STEP` where
        none does.
    """
    others = {node: report for node, report in reports.items() if node != left_out}
    boundary = max((rank.boundary for report in others.values() for rank in report.ranks), default=NO_STEP)
    return Progress(
        boundary=boundary,
        stepped_at=passed_at(others, boundary),
        committed=max((shard.committed for report in others.values() for shard in report.protection), default=NO_STEP),
    )


def passed_at(reports: Mapping[NodeId, MemberReport], least: Step) -> float | None:
    """Return when a rank was the first to stand at `least` or beyond, by the ranks' own stamps; None where nobody has told.

    A rank tells when it passed its newest boundary: one that is further already tells a later moment.
    """
    stamps = [
        rank.passed_at_seconds
        for report in reports.values()
        for rank in report.ranks
        if rank.boundary >= least and rank.passed_at_seconds
    ]
    return min(stamps, default=None)


def first_passed_at(reports: Mapping[NodeId, MemberReport], base: Step) -> float | None:
    """Return when a rank made the first new step of its launch, Unix seconds; None where nobody has told.

    Args:
        reports: of the members, of one generation.
        base: the step that the generation was started from.

    Returns:
        The earliest of the ranks' own stamps. Where no rank reports one, the stamp of the newest step counts.
    """
    stamps = [
        rank.first_passed_at_seconds
        for report in reports.values()
        for rank in report.ranks
        if rank.first_passed_at_seconds
    ]
    return min(stamps, default=None) or passed_at(reports, Step(base + 1))


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


def current_reports(
    nodes: Mapping[NodeId, NodeObserved], run: RunId, generation: Generation
) -> dict[NodeId, MemberReport]:
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
