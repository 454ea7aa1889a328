"""The launch of a generation: promise, plan, load, start (docs/design.md#generations).

    PREPARING   Prepare to every member until all have promised to join; a lost member is replaced
    LOADING     the plan is stored; Load to every member until all have verified their shards
    STARTING    Start to every member until its ranks run

Invariant: a generation has one plan, made once every member has promised to join.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from control_plane.core import claims, elastic, members, placement, recovery, slot_memory, witnesses
from control_plane.core.evidence import is_silent
from control_plane.core.observed.jobs import JobObserved, JobRecord
from control_plane.core.observed.nodes import Cause
from control_plane.core.observed.reasons import Starting
from control_plane.core.observed.specs import JobSpec, Policy
from control_plane.core.observed.steps import NO_GENERATION
from everstep.protocol.agent_messages import FIRST_STEP_PHASE, MemberPhase, MemberReport
from everstep.protocol.ids import FIRST_STEP, Generation, NodeId, RunId, Step
from everstep.protocol.parity import holder_of, is_share, stripe_of
from everstep.protocol.plan import CheckpointPlan, GenerationPlan, PlanNode, RankPlan, ShardSource

MASTER_PORTS = range(20_000, 32_000)
"""Ports for torch's rendezvous (MASTER_PORT), below the kernel's ephemeral ports, which may be in use."""

STARTING_PHASES = ("start", "restore", FIRST_STEP_PHASE)
CLOCK_ERROR_SECONDS = 86_400.0
"""Largest plausible error of the control plane's clock, against which reported generation numbers are checked."""
NAMED_NODES = 3
SHOWN_EVERY_SECONDS = 10
"""Granularity of the durations in a job's reason, so that it does not change with every report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Roll:
    """A roll call: which members of the next generation have promised to join it, and so obey no older one."""

    places: tuple[NodeId | None, ...]
    """The members by GROUP_RANK. None marks a vacancy."""
    promised: Mapping[NodeId, MemberReport]
    late: tuple[NodeId, ...]
    """Members that have not promised although their agents report."""
    unreachable: tuple[NodeId, ...]
    """Members that have not promised and whose agents are silent."""

    @property
    def vacancy_count(self) -> int:
        """The number of GROUP_RANKs that have no node yet."""
        return sum(place is None for place in self.places)

    @property
    def is_complete(self) -> bool:
        """Whether every GROUP_RANK has a member, and every member has promised to join."""
        return all(place is not None and place in self.promised for place in self.places)


def call_roll(spec: JobSpec, seen: JobObserved, record: JobRecord, policy: Policy) -> Roll:
    """Return which members have promised to join the generation whose number was issued last."""
    excluded = {exclusion.node_id for exclusion in record.exclusions}
    available = [node for node in seen.assigned if node not in excluded]
    given = {
        node_id: report
        for node_id in available
        if (report := _report(seen, node_id, spec.run)) is not None
        if report.generation == record.issued_generation and report.phase is MemberPhase.PROMISED
    }
    # A new node that received Prepare keeps its GROUP_RANK, even if other nodes arrive later.
    taken = {*dict(record.asked), *given}
    reporting_count = sum(node in seen.nodes and not is_silent(seen.nodes[node], policy.timeouts) for node in available)
    node_count = elastic.next_count(spec, record, available_count=len(available), reporting_count=reporting_count)
    places = members.places(seen.plan, sorted(available, key=lambda node_id: node_id not in taken), node_count)
    placed = set(places)
    promised = {node_id: report for node_id, report in given.items() if node_id in placed}
    missing = [node_id for node_id in places if node_id is not None and node_id not in promised]
    silent = {
        node_id for node_id in missing if node_id not in seen.nodes or is_silent(seen.nodes[node_id], policy.timeouts)
    }
    return Roll(
        places=places,
        promised=promised,
        late=tuple(node_id for node_id in missing if node_id not in silent),
        unreachable=tuple(node_id for node_id in missing if node_id in silent),
    )


def parent_of(seen: JobObserved) -> Generation:
    """Return the newest generation whose ranks may have run, or 0. It is the parent of the next generation."""
    return recovery.newest_started(seen.lineage)


def committed_of(spec: JobSpec, seen: JobObserved, record: JobRecord, now: float) -> Step:
    """Return the newest committed step on the parent's path that the job's record or any node's report shows, or -1."""
    members = [node.member for node in seen.nodes.values() if node.member is not None and node.member.run == spec.run]
    on_pages = [(commit.generation, commit.step) for member in members for commit in member.commits]
    live = [(member.generation, shard.committed) for member in members for shard in member.protection]
    rounds = [(member.generation, member.round.committed) for member in members if member.round is not None]
    path = recovery.path_of(seen.lineage, parent_of(seen))
    named = recovery.newest_committed(path, record.committed, (*on_pages, *live, *rounds))
    return min(named, claims.limit(seen, record, claims.of_nodes(spec, seen, path), now))


def confirmed_of(spec: JobSpec, seen: JobObserved, record: JobRecord, committed: Step) -> Step:
    """Return the part of a committed step that more than one node names."""
    path = recovery.path_of(seen.lineage, parent_of(seen))
    return min(committed, claims.supported(seen, record, claims.of_nodes(spec, seen, path)))


def floor_of(spec: JobSpec, seen: JobObserved, record: JobRecord, now: float) -> Step:
    """Return the step below which the job would lose committed steps (the floor in R52 of docs/design.md)."""
    parent = parent_of(seen)
    base = next((link.base_step for link in seen.lineage if link.generation == parent), FIRST_STEP)
    return max(base, committed_of(spec, seen, record, now), FIRST_STEP) if parent else FIRST_STEP


def survey(spec: JobSpec, seen: JobObserved, record: JobRecord, roll: Roll, now: float) -> recovery.Survey:
    """Return all sources from which ranks can restore shards. The owner is an empty string for a vacancy."""
    owners = [place if place is not None else NodeId("") for place in roll.places for _ in range(spec.ranks_per_node)]
    path = recovery.path_of(seen.lineage, parent_of(seen))
    named = claims.of_nodes(spec, seen, path)
    return recovery.Survey(
        owners=owners,
        former_owners={rank: node.node_id for node in (seen.plan.nodes if seen.plan else ()) for rank in node.ranks},
        supported=claims.supported(seen, record, named),
        limit=claims.limit(seen, record, named, now),
        inventories={node_id: report.inventory for node_id, report in roll.promised.items()},
        path=path,
        worlds=recovery.worlds_of(seen.lineage),
        checkpoints=tuple(each for each in seen.checkpoints if not each.is_wrong),
        refused=(*record.refused, *witnesses.refused(record.failed_reads, seen.checkpoints)),
        committed=committed_of(spec, seen, record, now),
        slot_count=slot_memory.slots_per_shard(spec),
    )


def make_plan(
    spec: JobSpec, seen: JobObserved, record: JobRecord, roll: Roll, policy: Policy, now: float
) -> tuple[GenerationPlan, recovery.Restore]:
    """Return the plan of the generation that the control plane launches now, and the restore that it uses.

    `roll` must be complete. The caller must store the plan before it sends the plan to agents.
    """
    nodes = [place for place in roll.places if place is not None]
    found = survey(spec, seen, record, roll, now)
    restore = recovery.choose(found)
    domains = {node_id: domain for node_id in nodes if (domain := seen.nodes[node_id].domain) is not None}
    ranks = (
        _with_copies(spec, seen, nodes, domains, restore.sources)
        if spec.parity_group_size is None
        else _with_parity(
            spec, nodes, domains, restore.sources, before=_parity_groups_before(spec, seen, found, restore)
        )
    )
    stored = recovery.stored(found, restore.base_step)
    plan = GenerationPlan(
        job=spec.job,
        run=spec.run,
        generation=record.issued_generation,
        parent=parent_of(seen),
        base_step=restore.base_step,
        nodes=tuple(
            PlanNode(
                node_id=node_id,
                address=seen.nodes[node_id].address,
                peer_port=seen.nodes[node_id].peer_port,
                ranks=members.ranks_of(place, spec.ranks_per_node),
                keep=restore.keep.get(node_id, ()),
            )
            for place, node_id in enumerate(nodes)
        ),
        ranks=ranks,
        coordinator=_coordinator(seen, record, nodes),
        master_address=seen.nodes[nodes[0]].address,
        master_port=_master_port(spec.run, record.issued_generation),
        script=spec.script,
        checkpoint=CheckpointPlan(
            every_steps=spec.checkpoint_every_steps,
            prefix=spec.checkpoint_prefix,
            third_slot=spec.third_slot,
            max_uploads=spec.checkpoint_max_uploads,
            stored_step=FIRST_STEP if stored is None else stored.step,
            interval_seconds=spec.checkpoint_interval_seconds or 0.0,
            max_overhead=spec.checkpoint_max_overhead or 0.0,
            max_bytes_per_second=spec.checkpoint_max_bytes_per_second or 0.0,
            stored_at_seconds=(record.started_at or 0.0) if stored is None else stored.completed_at,
            upload_seconds=record.upload_seconds or 0.0,
        ),
        relayout=restore.relayout,
        timeouts=policy.timeouts,
        max_slowdown=spec.max_slowdown,
        encrypts_peers=seen.encrypts_peers,
        is_elastic=spec.least_node_count < spec.most_node_count,
    )
    return plan, restore


def starting(plan: GenerationPlan, reports: Mapping[NodeId, MemberReport]) -> Starting | None:
    """Return what the ranks in the earliest of `STARTING_PHASES` do. None once every rank has finished a new step."""
    waiting = [
        (node.node_id, status)
        for node in plan.nodes
        if node.node_id in reports
        for status in reports[node.node_id].ranks
        if status.exit is None and status.boundary <= plan.base_step
    ]
    for phase in STARTING_PHASES:
        seconds = {node_id: status.still_seconds for node_id, status in waiting if status.phase == phase}
        if seconds:
            return Starting(
                phase=phase,
                node_ids=tuple(sorted(seconds)[:NAMED_NODES]),
                other_count=max(0, len(seconds) - NAMED_NODES),
                seconds=int(max(seconds.values()) // SHOWN_EVERY_SECONDS) * SHOWN_EVERY_SECONDS,
            )
    return None


def highest_seen(seen: JobObserved, run: RunId, now: float) -> Generation:
    """Return the highest plausible generation number of this run in any agent's report."""
    # No number above the Unix time is issued. A higher one is wrong, and would use up the numbers that a slot can
    # store.
    reports = (node.member for node in seen.nodes.values())
    numbers = (report.generation for report in reports if report is not None and report.run == run)
    return max((each for each in numbers if each <= now + CLOCK_ERROR_SECONDS), default=NO_GENERATION)


def _report(seen: JobObserved, node_id: NodeId, run: RunId) -> MemberReport | None:
    node = seen.nodes.get(node_id)
    return node.member if node is not None and node.member is not None and node.member.run == run else None


def _with_copies(
    spec: JobSpec,
    seen: JobObserved,
    nodes: Sequence[NodeId],
    domains: Mapping[NodeId, str],
    sources: Sequence[tuple[ShardSource, ...]],
) -> tuple[RankPlan, ...]:
    copies = min(spec.copies, len(nodes))
    holders = placement.plan(nodes, copies, domains, before=_groups_before(seen)).holders
    return tuple(
        RankPlan(rank=rank, holders=holders[node_id], sources=sources[rank])
        for place, node_id in enumerate(nodes)
        for rank in members.ranks_of(place, spec.ranks_per_node)
    )


def _with_parity(
    spec: JobSpec,
    nodes: Sequence[NodeId],
    domains: Mapping[NodeId, str],
    sources: Sequence[tuple[ShardSource, ...]],
    *,
    before: tuple[tuple[int, ...], ...],
) -> tuple[RankPlan, ...]:
    groups = placement.parity_groups(nodes, spec.parity_group_size or 0, domains, before=before)
    group_of = {place: group for group in groups for place in group}
    return tuple(
        RankPlan(
            rank=rank,
            holders=(node_id, *(nodes[other] for other in group_of[place] if other != place)),
            sources=sources[rank],
            stripe=tuple(members.ranks_of(other, spec.ranks_per_node)[local_rank] for other in group_of[place]),
        )
        for place, node_id in enumerate(nodes)
        for local_rank, rank in enumerate(members.ranks_of(place, spec.ranks_per_node))
    )


def _parity_groups_before(
    spec: JobSpec, seen: JobObserved, found: recovery.Survey, restore: recovery.Restore
) -> tuple[tuple[int, ...], ...]:
    """Return the parity groups, as GROUP_RANKs, for which the members already hold shares, or nothing."""
    shares = [slot for inventory in found.inventories.values() for slot in inventory if is_share(slot.owner_rank)]
    if seen.plan is None or not shares:
        return ()
    # After a change of the number of nodes, only the shares of the restored step name the groups.
    if len(seen.plan.nodes) * spec.ranks_per_node != len(found.owners):
        stripes = {
            stripe_of(holder_of(share.owner_rank), share.contributions)
            for share in shares
            if share.step == restore.base_step and found.worlds.get(share.origin_generation) == len(found.owners)
        }
        named = {tuple(rank // spec.ranks_per_node for rank in stripe) for stripe in stripes}
        return tuple(sorted(named, key=lambda group: (len(group), group)))
    place_of = {rank: place for place, node in enumerate(seen.plan.nodes) for rank in node.ranks}
    groups = {tuple(place_of[rank] for rank in seen.plan.ranks[node.ranks[0]].stripe) for node in seen.plan.nodes}
    return tuple(sorted(groups, key=lambda group: (len(group), group)))


def _groups_before(seen: JobObserved) -> tuple[tuple[int, ...], ...]:
    if seen.plan is None:
        return ()
    place_of = {node.node_id: place for place, node in enumerate(seen.plan.nodes)}
    return placement.groups_of(
        [[place_of[holder] for holder in seen.plan.ranks[node.ranks[0]].holders] for node in seen.plan.nodes]
    )


def _coordinator(seen: JobObserved, record: JobRecord, nodes: list[NodeId]) -> NodeId:
    """Return the member with the lowest GROUP_RANK, without the previous coordinator if its agent was lost."""
    lost_agent = record.incident is not None and record.incident.cause in (Cause.AGENT_LOST, Cause.NODE_UNREACHABLE)
    before = seen.plan.coordinator if lost_agent and seen.plan is not None else None
    return next((node_id for node_id in nodes if node_id != before), nodes[0])


def _master_port(run: RunId, generation: Generation) -> int:
    return MASTER_PORTS[(int(run[:8], 16) + generation) % len(MASTER_PORTS)]
