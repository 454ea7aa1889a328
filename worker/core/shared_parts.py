"""Decides which node uploads or downloads which parts of one S3 object.

    1  2  3  4  …                        … n-3  n-2  n-1  n
    owner ──▶            unassigned              ◀── helpers

Invariant: each part is unassigned, claimed by the owner, outstanding at one helper, finished by one helper, or missing.
A part is missing if its helper was lost, late or sent wrong bytes. The owner transfers it itself, so a faulty helper
costs time, but not correctness.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from everstep.protocol.ids import NodeId, Rank
from everstep.protocol.plan import GenerationPlan

MAX_WINDOW = 4
"""Maximum number of parts that one helper transfers at a time, each over its own connection to S3."""
MAX_LOAD_HELPERS = 3
LATE_SECONDS = 10.0
"""Minimum seconds until a helper's part is late; at least twice the time of the owner's own slowest part."""


@dataclass(frozen=True, slots=True)
class Outstanding:
    """An unfinished part that the owner asked a helper to transfer."""

    helper: NodeId
    since: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedParts:
    """The parts of one attempt to upload or load, and their nodes. Each method returns the next state."""

    part_count: int
    window: int = 1
    claimed: int = 0
    """Highest number of a part that the owner has begun. The owner transfers all parts up to this number."""
    lowest: int
    """The lowest number of any part that was assigned to a helper; `part_count` + 1 before the first."""
    outstanding: Mapping[int, Outstanding] = field(default_factory=dict[int, Outstanding])
    finished: Mapping[int, NodeId] = field(default_factory=dict[int, NodeId])
    missing: frozenset[int] = frozenset()
    """Parts that a helper has failed to transfer and the owner has not begun."""
    excluded: frozenset[NodeId] = frozenset()

    @classmethod
    def begin(cls, part_count: int, helpers: Sequence[NodeId] = (), now: float = 0.0) -> SharedParts:
        """Return the state before the owner's first part. Each helper already has equally many first parts."""
        # Without these first parts, the owner and the first helper to answer would transfer all parts of a
        # small object.
        share = min(MAX_WINDOW, part_count // (len(helpers) + 1))
        outstanding = {
            part_count - index * share - each: Outstanding(helper, now)
            for index, helper in enumerate(helpers)
            for each in range(share)
        }
        return cls(
            part_count=part_count,
            window=max(1, share),
            lowest=part_count + 1 - len(outstanding),
            outstanding=outstanding,
        )

    def claim(self, number: int) -> tuple[SharedParts, bool]:
        """Return the new state, and whether the owner must transfer part `number`; numbers begin at 1."""
        if number < self.lowest:
            return replace(self, claimed=number), True
        if number in self.missing:
            return replace(self, missing=self.missing - {number}), True
        return self, False

    def assign(self, helper: NodeId, now: float) -> tuple[SharedParts, int | None]:
        """Assign a part to a helper at `now` (monotonic).

        The number is None if no part is left or the helper is busy.
        """
        number = self.lowest - 1
        in_flight = sum(each.helper == helper for each in self.outstanding.values())
        if helper in self.excluded or number <= self.claimed or in_flight >= self.window:
            return self, None
        outstanding = {**self.outstanding, number: Outstanding(helper, now)}
        return replace(self, lowest=number, outstanding=outstanding), number

    def finish(self, helper: NodeId, number: int) -> SharedParts:
        """Record that a helper has transferred a part. A part that is not assigned to it any more changes nothing."""
        part = self.outstanding.get(number)
        if part is None or part.helper != helper:
            return self
        outstanding = {each: other for each, other in self.outstanding.items() if each != number}
        return replace(self, outstanding=outstanding, finished={**self.finished, number: helper})

    def exclude(self, helper: NodeId) -> SharedParts:
        """Withdraw a helper's unfinished parts, and assign no more parts to it. Its finished parts stay valid."""
        lost = {number for number, part in self.outstanding.items() if part.helper == helper}
        return replace(
            self,
            outstanding={number: part for number, part in self.outstanding.items() if number not in lost},
            missing=self.missing | lost,
            excluded=self.excluded | {helper},
        )

    def late(self, now: float, slowest_seconds: float) -> frozenset[NodeId]:
        """Return the helpers whose oldest part is late at `now`, given the seconds of the owner's slowest part."""
        limit = max(LATE_SECONDS, 2 * slowest_seconds)
        return frozenset(part.helper for part in self.outstanding.values() if now - part.since > limit)

    def exclude_late(self, now: float, slowest_seconds: float) -> SharedParts:
        """Exclude each helper that is `late`."""
        state = self
        for helper in self.late(now, slowest_seconds):
            state = state.exclude(helper)
        return state

    def reject(self, number: int) -> SharedParts:
        """Exclude the helper that transferred part `number` with wrong content."""
        helper = self.finished[number]
        finished = {each: other for each, other in self.finished.items() if each != number}
        return replace(self, finished=finished, missing=self.missing | {number}).exclude(helper)

    def take_missing(self) -> tuple[SharedParts, int | None]:
        """Assign a missing part to the owner. The number is None if no part is missing."""
        if not self.missing:
            return self, None
        number = min(self.missing)
        return replace(self, missing=self.missing - {number}), number

    def owed(self, helper: NodeId) -> list[int]:
        """Return the numbers of the parts that a helper must still transfer, in descending order."""
        return sorted((number for number, part in self.outstanding.items() if part.helper == helper), reverse=True)

    def is_over(self, helper: NodeId) -> bool:
        """Return whether a helper has no unfinished part, and is assigned no further part."""
        return not self.owed(helper) and (helper in self.excluded or self.lowest - 1 <= self.claimed)

    @property
    def is_settled(self) -> bool:
        """True if all parts that were assigned to helpers are transferred."""
        return not self.outstanding and not self.missing


def is_read_first(plan: GenerationPlan, rank: Rank) -> bool:
    """Return whether the plan names S3 as the first source of the shard of `rank`."""
    sources = plan.ranks[rank].sources
    return bool(sources) and sources[0].kind == "s3"


def reading_nodes(plan: GenerationPlan) -> tuple[NodeId, ...]:
    """Return the nodes that load a shard from S3 by plan, in the order of GROUP_RANK; empty after a relayout."""
    return tuple(node.node_id for node in plan.nodes if any(is_read_first(plan, rank) for rank in node.ranks))


def load_helpers(plan: GenerationPlan, rank: Rank, owner: NodeId) -> list[NodeId]:
    """Return at most `MAX_LOAD_HELPERS` nodes that `owner` asks for help with the load of a shard from S3."""
    others = [node.node_id for node in plan.nodes if node.node_id != owner]
    if not others:
        return []
    # The choice depends on the rank, so that the owners of several shards ask different nodes. Nodes that load
    # nothing from S3 come first, because they finish early.
    first = rank * MAX_LOAD_HELPERS % len(others)
    loading = frozenset(reading_nodes(plan))
    return sorted(others[first:] + others[:first], key=lambda node: node in loading)[:MAX_LOAD_HELPERS]


def home_of(plan: GenerationPlan, rank: Rank) -> NodeId | None:
    """Return the node that rebuilds a lost earlier shard, or reads it from S3, for all nodes: its *home*.

    A shard that a node has in memory has no home (None), even if it is lost later: a fetch that causes another rebuild
    could let two rebuilds wait for each other forever.
    """
    assert plan.relayout is not None, "only a relayout has earlier shards"
    if any(source.kind == "peer" for source in plan.relayout.shards[rank]):
        return None
    # Frameworks divide tensors in the order of ranks, so a rank mostly needs the earlier shards at its own relative
    # position.
    return plan.nodes[rank * len(plan.nodes) // plan.relayout.world_size].node_id
