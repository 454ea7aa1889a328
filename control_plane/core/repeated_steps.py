"""Compares the steps that a job repeats after a recovery with the same steps before the recovery.

Invariant: pure. A difference needs two digests of the same step and rank, from generations with the same number of
ranks. A missing digest proves nothing, and leads to no event.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from control_plane.core.actions import EventDraft
from control_plane.core.observed.reasons import RepeatedStepDiffers
from control_plane.core.observed.steps import SealedStates, StepStates
from everstep.protocol.agent_messages import MemberReport, state_count
from everstep.protocol.ids import NodeId, Rank, Step
from everstep.protocol.plan import GenerationPlan
from everstep.protocol.slot import STATE_DIGEST_BYTES

_NO_DIGEST = bytes(STATE_DIGEST_BYTES)


def followed(
    before: SealedStates, plan: GenerationPlan, reports: Mapping[NodeId, MemberReport]
) -> tuple[SealedStates, tuple[EventDraft, ...]]:
    """Return the digests to store, with those that the members report, and at most one event about a difference."""
    states = _of_generation(before, plan)
    newest = {each.step: bytearray(each.digests) for each in states.newest}
    earlier = {each.step: each.digests for each in states.earlier}
    differences: list[tuple[Step, Rank, bytes, bytes]] = []
    for shard in (shard for report in reports.values() for shard in report.protection):
        if shard.rank >= plan.world_size:
            continue
        place = slice(shard.rank * STATE_DIGEST_BYTES, (shard.rank + 1) * STATE_DIGEST_BYTES)
        for step, digest in shard.states:
            of_step = newest.setdefault(step, bytearray(_NO_DIGEST * plan.world_size))
            of_step[place] = digest
            known = earlier[step][place] if step in earlier else _NO_DIGEST
            if known not in (_NO_DIGEST, digest):
                differences.append((step, shard.rank, known, digest))
    kept = _kept(newest, plan.world_size)
    # The ranks have trained past steps before the oldest kept step.
    left = tuple(each for each in states.earlier if not kept or each.step >= kept[0].step)
    if differences:
        return replace(states, newest=kept, earlier=()), (_event(*min(differences)),)
    return replace(states, newest=kept, earlier=left), ()


def wrong_bases(
    states: SealedStates, plan: GenerationPlan, reports: Mapping[NodeId, MemberReport]
) -> Mapping[Rank, NodeId]:
    """Return the ranks whose restored state is not the one that the shard's owner sealed, each with its new owner.

    Two nodes are against the copy: the former owner, and the node that restored it.
    """
    sealed = next((each.digests for each in states.newest if each.step == plan.base_step), b"")
    if plan.relayout is not None or states.world_size != plan.world_size or not sealed:
        return {}
    wrong: dict[Rank, NodeId] = {}
    for node_id, report in reports.items():
        for shard in (shard for shard in report.protection if shard.rank < plan.world_size):
            known = sealed[shard.rank * STATE_DIGEST_BYTES : (shard.rank + 1) * STATE_DIGEST_BYTES]
            # Another generation may have made the base, and its owner's digest is no longer known.
            is_known = known != _NO_DIGEST and any(
                source.origin_generation == states.generation for source in plan.ranks[shard.rank].sources
            )
            if is_known and dict(shard.states).get(plan.base_step, known) != known:
                wrong[shard.rank] = node_id
    return wrong


def _of_generation(states: SealedStates, plan: GenerationPlan) -> SealedStates:
    if states.generation == plan.generation:
        return states
    earlier: tuple[StepStates, ...] = ()
    if states.world_size == plan.world_size and plan.relayout is None:
        known = {each.step: each for each in (*states.earlier, *states.newest) if each.step > plan.base_step}
        earlier = tuple(known[step] for step in sorted(known)[-state_count(plan.world_size) :])
    return SealedStates(generation=plan.generation, world_size=plan.world_size, earlier=earlier)


def _kept(newest: Mapping[Step, bytes | bytearray], world_size: int) -> tuple[StepStates, ...]:
    steps = sorted(newest)[-state_count(world_size) :]
    return tuple(StepStates(step=step, digests=bytes(newest[step])) for step in steps)


def _event(step: Step, rank: Rank, known: bytes, digest: bytes) -> EventDraft:
    return EventDraft(
        type="RepeatedStepDiffers",
        message=RepeatedStepDiffers(step=step, rank=rank),
        detail={"Step": step, "Rank": rank, "Before": known.hex(), "After": digest.hex()},
    )
