"""Decides when the job loop must write the agents' reports about copies of shards to the database.

Invariant: a change of holders is stored with the next decision about the job. If only the steps have changed, at most
one write per `WRITE_SECONDS` stores them. Training thus causes no write per step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from control_plane.core.evidence import silent_without_commit
from control_plane.core.observed.jobs import JobObserved
from control_plane.core.states import RUNNING_JOBS
from control_plane.db import protection
from control_plane.loop import records
from control_plane.loop.agents import AgentRegistry
from control_plane.loop.observer import StoredJob
from everstep.protocol.agent_messages import MemberReport
from everstep.protocol.ids import NodeId, Rank, RunId
from everstep.protocol.plan import GenerationPlan, Timeouts

WRITE_SECONDS = 1.0


class ProtectionWatch:
    """Decides when the job loop stores which nodes hold a job's shards, and at which steps."""

    def __init__(self, registry: AgentRegistry, timeouts: Timeouts) -> None:
        self._registry = registry
        self._timeouts = timeouts
        self._rows: dict[RunId, tuple[protection.ShardRecord, ...]] = {}
        self._written_at: dict[RunId, float] = {}

    def changed(self, stored: StoredJob, observed: JobObserved, now: float) -> tuple[protection.ShardRecord, ...]:
        """Return the rows of a job's shards that must be written now; empty if no write is due."""
        run = RunId(stored.job.run_id)
        if stored.plan is None or stored.job.state not in RUNNING_JOBS:
            return ()
        silent = silent_without_commit(
            observed.nodes.values(), committed_at=observed.record.committed_at, now=now, timeouts=self._timeouts
        )
        current = tuple(
            _unvouched(shard, view.node_id, silent)
            for node in stored.plan.nodes
            if (view := self._registry.view(node.node_id)) is not None
            if view.report is not None and (report := view.report.member) is not None
            if report.run == run and report.generation == stored.plan.generation
            for shard in _shard_records(report, node.ranks, stored.plan)
        )
        current = tuple(sorted(current, key=lambda shard: shard.rank))
        before = self._rows.get(run, ())
        if not current or current == before:
            return ()
        if _holders(current) == _holders(before) and now - self._written_at.get(run, 0.0) < WRITE_SECONDS:
            return ()
        return current

    def stored(self, run: RunId, shards: tuple[protection.ShardRecord, ...], now: float) -> None:
        """Record that the database now contains the rows that `changed` returned. `now` is Unix seconds."""
        if shards:
            self._rows[run] = shards
            self._written_at[run] = now

    def forget(self, run: RunId) -> None:
        """Drop the cached rows about the shards of a job that has ended."""
        self._rows.pop(run, None)
        self._written_at.pop(run, None)


def _shard_records(report: MemberReport, ranks: Sequence[Rank], plan: GenerationPlan) -> list[protection.ShardRecord]:
    """Return the rows of a node's own ranks, with the holders of the plan. Other claims of its agent are ignored."""
    claims = {shard.rank: shard for shard in report.protection}
    return [
        protection.ShardRecord(
            rank=shard.rank,
            generation=report.generation,
            owner_node_id=shard.holders[0] if shard.holders else "",
            committed_step=shard.committed,
            payload_bytes=shard.payload_bytes,
            reason=shard.reason,
            holders=tuple(
                protection.HolderRecord(node_id=holder, is_in_view=holder in in_view) for holder in shard.holders
            ),
            verified=tuple(
                protection.VerifiedRecord(node_id=holder, step=step, at=records.at(at))
                # An agent of an older release reports no verified steps, so `shard.verified` may be shorter.
                for holder, (step, at) in zip(shard.holders, shard.verified, strict=False)
                if step >= 0
            ),
        )
        for rank in ranks
        if (shard := claims.get(rank)) is not None and shard.holders == plan.ranks[rank].holders
        for in_view in ({*shard.in_view},)
    ]


def _unvouched(shard: protection.ShardRecord, owner: NodeId, silent: frozenset[NodeId]) -> protection.ShardRecord:
    """Return a shard's row, changed so that nodes with a silent agent no longer count as holders."""
    quiet = next(
        (
            node
            for node in (owner, *(holder.node_id for holder in shard.holders if holder.is_in_view))
            if node in silent
        ),
        None,
    )
    reason = shard.reason if quiet is None else f"the agent of {quiet} says nothing, and no step is committed"
    holders = tuple(
        replace(holder, is_in_view=holder.is_in_view and holder.node_id not in silent) for holder in shard.holders
    )
    return replace(shard, reason=reason, holders=holders)


def _holders(shards: tuple[protection.ShardRecord, ...]) -> tuple[object, ...]:
    return tuple((shard.rank, shard.generation, shard.holders, shard.reason) for shard in shards)
