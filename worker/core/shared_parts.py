"""Decides which node uploads or downloads which parts of one S3 object. Pure.

The node that owns a shard and other nodes, its helpers, share one upload to S3 or one load from S3. The owner takes
parts from the beginning of the object, and helpers take parts from its end, until they meet:

    1  2  3  4  …                        … n-3  n-2  n-1  n
    owner ──▶            unassigned              ◀── helpers

Invariant: each part has exactly one state: unassigned, claimed by the owner, outstanding at one helper, finished by one
helper, or missing. A part is missing if a helper was lost, late or sent wrong bytes. The owner transfers each missing
part itself. A missing part is never assigned to a helper again, so a faulty helper costs time but no correctness.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from everstep.protocol.ids import NodeId, Rank
from everstep.protocol.plan import GenerationPlan

MAX_WINDOW = 4
"""Maximum number of parts that one helper node transfers at a time, each over its own connection to S3."""
MAX_LOAD_HELPERS = 3
"""Maximum number of nodes that help with the load of one shard."""
LATE_SECONDS = 10.0
"""Minimum seconds after which the owner gives up on a part that a helper node should have transferred.

The owner waits at least twice as long as its own slowest part took.
"""


@dataclass(frozen=True, slots=True)
class Outstanding:
    """An unfinished part of a shard that the owner asked a helper node to upload to S3 or to load from S3."""

    helper: NodeId
    since: float
    """Monotonic time at which the shard's owner requested the part from the helper node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedParts:
    """The parts of one upload or load, and the nodes that transfer them.

    The owner's agent holds one `SharedParts` per attempt to upload or load. Each method returns the next state.
    """

    part_count: int
    window: int = 1
    """Number of parts that one helper node transfers at a time, from 1 to `MAX_WINDOW`.

    For an object with few parts, `begin` sets less than `MAX_WINDOW`, so that each helper and the owner begin with
    equally many parts. Otherwise, the helpers would begin too many of the parts, and the owner would wait for them.
    """
    claimed: int = 0
    """Highest number of a part that the owner has begun. The owner transfers all parts up to this number."""
    lowest: int
    """The lowest number of any part that was assigned to a helper node; `part_count` + 1 before the first."""
    outstanding: Mapping[int, Outstanding] = field(default_factory=dict[int, Outstanding])
    finished: Mapping[int, NodeId] = field(default_factory=dict[int, NodeId])
    """The parts that helper nodes have transferred: by part number, the helper."""
    missing: frozenset[int] = frozenset()
    """Parts that a helper node should have transferred and has not finished. The owner transfers these parts."""
    excluded: frozenset[NodeId] = frozenset()
    """Helper nodes that receive no further parts.

    Their connection is lost, they are late, they declined to help, or they transferred wrong bytes.
    """

    @classmethod
    def begin(cls, part_count: int, helpers: Sequence[NodeId] = (), now: float = 0.0) -> SharedParts:
        """Return the state of a transfer before the owner has begun its first part.

        Each helper node already has its first parts: equally many, at most `MAX_WINDOW`. Without these first parts, the
        owner and the first helper to answer would transfer all parts of a small object.

        Args:
            part_count: number of parts; parts are numbered from 1.
            helpers: nodes that can begin at once. Other helpers receive their first parts from `assign`.
            now: monotonic time in seconds.

        Returns:
            The state in which the owner has not begun to transfer any part.
        """
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
        """Decide whether the owner of the shard transfers the next part of the S3 object, in ascending order.

        Args:
            number: 1 at the first call, then one more at each call.

        Returns:
            The new state, and whether the owner must transfer the part now. If False, a helper node does.
        """
        if number < self.lowest:
            return replace(self, claimed=number), True
        if number in self.missing:
            return replace(self, missing=self.missing - {number}), True
        return self, False

    def assign(self, helper: NodeId, now: float) -> tuple[SharedParts, int | None]:
        """Assign one more part of the S3 object to a helper node.

        Args:
            helper: node that transfers parts for the owner of the shard.
            now: monotonic time in seconds.

        Returns:
            The new state, and the number of the part. None if no part is left, or if the helper must first finish its
            assigned parts.
        """
        number = self.lowest - 1
        in_flight = sum(each.helper == helper for each in self.outstanding.values())
        if helper in self.excluded or number <= self.claimed or in_flight >= self.window:
            return self, None
        outstanding = {**self.outstanding, number: Outstanding(helper, now)}
        return replace(self, lowest=number, outstanding=outstanding), number

    def finish(self, helper: NodeId, number: int) -> SharedParts:
        """Record that a helper node has transferred a part of the S3 object.

        The call changes nothing if the part is not assigned to this helper any more, for example after a repeated
        answer.
        """
        part = self.outstanding.get(number)
        if part is None or part.helper != helper:
            return self
        outstanding = {each: other for each, other in self.outstanding.items() if each != number}
        return replace(self, outstanding=outstanding, finished={**self.finished, number: helper})

    def exclude(self, helper: NodeId) -> SharedParts:
        """Withdraw a helper node's unfinished parts of the S3 object, and assign no more parts to the helper.

        The parts that the helper has finished stay valid.
        """
        lost = {number for number, part in self.outstanding.items() if part.helper == helper}
        return replace(
            self,
            outstanding={number: part for number, part in self.outstanding.items() if number not in lost},
            missing=self.missing | lost,
            excluded=self.excluded | {helper},
        )

    def late(self, now: float, slowest_seconds: float) -> frozenset[NodeId]:
        """Return the helper nodes that should have finished their oldest assigned part by now.

        Args:
            now: monotonic time in seconds.
            slowest_seconds: longest time that one of the owner's own parts took, or has taken so far; 0 without parts.

        Returns:
            Helpers that the owner must exclude.
        """
        limit = max(LATE_SECONDS, 2 * slowest_seconds)
        return frozenset(part.helper for part in self.outstanding.values() if now - part.since > limit)

    def exclude_late(self, now: float, slowest_seconds: float) -> SharedParts:
        """Exclude each helper node that takes too long for its oldest unfinished part. See `late` for the arguments."""
        state = self
        for helper in self.late(now, slowest_seconds):
            state = state.exclude(helper)
        return state

    def reject(self, number: int) -> SharedParts:
        """Exclude the helper node that transferred part `number` with wrong content. The owner transfers this part."""
        helper = self.finished[number]
        finished = {each: other for each, other in self.finished.items() if each != number}
        return replace(self, finished=finished, missing=self.missing | {number}).exclude(helper)

    def take_missing(self) -> tuple[SharedParts, int | None]:
        """Assign to the owner a part of the S3 object that a helper node failed to transfer.

        Returns:
            The new state, and the number of the part; None as the number if no such part is left.
        """
        if not self.missing:
            return self, None
        number = min(self.missing)
        return replace(self, missing=self.missing - {number}), number

    def owed(self, helper: NodeId) -> list[int]:
        """Return the numbers of the parts that a helper node must still transfer, in descending order."""
        return sorted((number for number, part in self.outstanding.items() if part.helper == helper), reverse=True)

    def is_over(self, helper: NodeId) -> bool:
        """Return whether a helper node has no unfinished part of the S3 object, and is assigned no further part."""
        return not self.owed(helper) and (helper in self.excluded or self.lowest - 1 <= self.claimed)

    @property
    def is_settled(self) -> bool:
        """True if all parts that were assigned to helper nodes are transferred, so that the owner need not wait."""
        return not self.outstanding and not self.missing


def is_read_first(plan: GenerationPlan, rank: Rank) -> bool:
    """Return whether the plan names S3 as the first source of the shard of `rank`."""
    sources = plan.ranks[rank].sources
    return bool(sources) and sources[0].kind == "s3"


def reading_nodes(plan: GenerationPlan) -> tuple[NodeId, ...]:
    """Return the nodes that load at least one shard from S3 according to the plan, in the order of GROUP_RANK.

    These nodes share the reads of common objects (`worker.core.object_readers`). The result is empty after a relayout
    (a change of the number of ranks), because nodes then load shards on demand.
    """
    return tuple(node.node_id for node in plan.nodes if any(is_read_first(plan, rank) for rank in node.ranks))


def load_helpers(plan: GenerationPlan, rank: Rank, owner: NodeId) -> list[NodeId]:
    """Return the nodes that the owner of a shard asks for help with the load from S3.

    Nodes that load none of their own shards from S3 come first, because they finish early. The choice among them
    depends on the rank, so that the owners of several shards ask different nodes.

    Args:
        plan: plan of the generation, with the sources of each shard.
        rank: rank whose shard is loaded.
        owner: node that loads the shard.

    Returns:
        At most `MAX_LOAD_HELPERS` nodes, in order of preference.
    """
    others = [node.node_id for node in plan.nodes if node.node_id != owner]
    if not others:
        return []
    first = rank * MAX_LOAD_HELPERS % len(others)
    loading = frozenset(reading_nodes(plan))
    return sorted(others[first:] + others[:first], key=lambda node: node in loading)[:MAX_LOAD_HELPERS]


def home_of(plan: GenerationPlan, rank: Rank) -> NodeId | None:
    """Return the node that gets a lost shard of an earlier rank on behalf of all nodes: the shard's *home*.

    After a relayout (a change of the number of ranks), the shard of an earlier rank may be in the memory of no node.
    The home then rebuilds the shard by parity, or reads it from S3. The other nodes fetch it from the home.

    A shard that a node has in memory has no home, even if the node then loses it. A rebuild fetches such shards. If a
    fetch could cause another rebuild, two rebuilds could wait for each other forever.

    Each node is the home of a contiguous range of earlier ranks, in the order of ranks; all ranges are about equally
    long. Frameworks divide tensors in the order of ranks. A rank therefore mostly needs the earlier shards at its own
    relative position in this order, and its node is probably their home.

    Args:
        plan: a plan with a relayout.
        rank: rank of the earlier generation that owned the shard.

    Returns:
        A node of the plan. None if the plan names a node that has the shard in memory.
    """
    assert plan.relayout is not None, "only a relayout has earlier shards"
    if any(source.kind == "peer" for source in plan.relayout.shards[rank]):
        return None
    return plan.nodes[rank * len(plan.nodes) // plan.relayout.world_size].node_id
