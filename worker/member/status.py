"""Reads the state of one generation on this node, for reports to the control plane."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from msgspec import structs

from everstep.protocol.agent_messages import FaultCode, NodeFault, RankStatus, RoundStatus, ShardProtection
from everstep.protocol.ids import NodeId, Rank, Step
from everstep.protocol.options import KeptOption
from everstep.protocol.plan import GenerationPlan, PlanNode
from everstep.protocol.rehearsals import RehearsalVerdict, Rehearsed
from worker.core.phases import PhaseClock
from worker.member.faults import ReportedFaults
from worker.replication.coordinator import RoundServer
from worker.replication.round_member import RoundMember
from worker.shards.owned_shard import OwnedShard

WORDED_RANKS = 2
"""Number of ranks per verdict whose rehearsal a report contains with all its texts."""


class MemberStatus:
    """Reads the state of a generation from the parts of its `Member` object, for the reports to the control plane."""

    def __init__(
        self,
        plan: GenerationPlan,
        here: PlanNode,
        shards: Mapping[Rank, OwnedShard],
        *,
        rounds: RoundMember,
        server: Callable[[], RoundServer | None],
        faults: ReportedFaults,
        rehearsed: Mapping[Rank, Rehearsed],
        kept_options: Mapping[Rank, tuple[KeptOption, ...]],
        stalls: Callable[[float], tuple[NodeFault, ...]],
    ) -> None:
        """Create the object at the start of a generation. `stalls` returns a fault for each stalled upload."""
        self.clocks = {rank: PhaseClock(plan.base_step) for rank in here.ranks}
        self._plan = plan
        self._here = here
        self._shards = shards
        self._rounds = rounds
        self._server = server
        self._faults = faults
        self._rehearsed = rehearsed
        self._kept_options = kept_options
        self._stalls = stalls
        self._node_id = here.node_id

    def rank_statuses(self) -> tuple[RankStatus, ...]:
        """Return the status of each local rank, and update `clocks`."""
        now, statuses = time.monotonic(), []
        rehearsed = shortened(self._rehearsed)
        for shard in self._shards.values():
            half = shard.page.rank()
            shard.note_first(half)
            clock = self.clocks[shard.rank] = self.clocks[shard.rank].seen(half, now)
            statuses.append(
                RankStatus(
                    rank=shard.rank,
                    boundary=Step(half.boundary),
                    phase=clock.phase,
                    still_seconds=clock.still_seconds,
                    limit_seconds=clock.limit_seconds,
                    passed_at_seconds=shard.passed[1] if shard.passed[0] == half.boundary else 0.0,
                    first_passed_at_seconds=shard.first_passed_at,
                    rehearsed=rehearsed.get(shard.rank),
                    resume_revision=half.resume_revision,
                    kept_options=self._kept_options.get(shard.rank, ()),
                )
            )
        return tuple(statuses)

    def target(self) -> Step:
        """Return the number of the training's last step, as the script announced it; 0 without an announcement."""
        return Step(max((shard.page.rank().target for shard in self._shards.values()), default=0))

    def begin_clocks(self) -> None:
        """Restart `clocks`, when the ranks start."""
        self.clocks = {rank: PhaseClock(self._plan.base_step) for rank in self._here.ranks}

    def longest(self) -> dict[str, float]:
        """Return the longest time in seconds, by phase, after which a rank left the phase or finished a step."""
        longest: dict[str, float] = {}
        for clock in self.clocks.values():
            for phase, seconds in clock.longest.items():
                longest[phase] = max(longest.get(phase, 0.0), seconds)
        return longest

    def protection(self) -> tuple[ShardProtection, ...]:
        """Return the protection status of each shard of this node (`OwnedShard.protection`)."""
        return tuple(shard.protection(self._plan.ranks[rank].holders) for rank, shard in self._shards.items())

    def silent_peers(self) -> tuple[NodeId, ...]:
        """Return the neighbours in the tree of agents that have stopped sending messages."""
        return tuple(sorted(self._rounds.silent))

    def faults(self, now: float) -> tuple[NodeFault, ...]:
        """Return the current faults of the ranks and of this node's part. `now` is the event loop's time."""
        since, deadline = self._rounds.silent_since, self._plan.timeouts.coordinator_deadline_seconds
        faults = (*self._faults.present, *self._stalls(now))
        if since is None or now - since <= deadline:
            return faults
        message = f"{self._node_id} has not reached the coordinator {self._plan.coordinator} for {deadline:g} s"
        return (*faults, NodeFault(code=FaultCode.COORDINATOR_UNREACHABLE, message=message, is_permanent=False))

    def round_status(self) -> RoundStatus | None:
        """Return the coordinator's state if it runs on this node; otherwise None."""
        return server.status() if (server := self._server()) is not None else None


def shortened(reports: Mapping[Rank, Rehearsed]) -> dict[Rank, Rehearsed]:
    """Return the rehearsals with the texts of a few ranks, because the texts of many would make a report too large."""
    # The control plane uses the texts of the first difference only.
    first = sorted(reports, key=lambda rank: (reports[rank].first_step, rank))
    by_verdict = ([rank for rank in first if reports[rank].verdict is verdict] for verdict in RehearsalVerdict)
    worded = {rank for ranks in by_verdict for rank in ranks[:WORDED_RANKS]}
    return {rank: each if rank in worded else _without_texts(each) for rank, each in reports.items()}


def _without_texts(each: Rehearsed) -> Rehearsed:
    difference = each.difference and structs.replace(each.difference, names=(), unkept=(), lines=())
    return structs.replace(each, difference=difference, message="", advice="")
