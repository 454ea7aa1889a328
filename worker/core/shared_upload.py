"""Decides which node sends which parts of one multipart upload. Pure.

The owner of a shard and the holders of its replicas share one upload. The owner takes parts from the beginning of the
object, and helpers take parts from its end, until they meet:

    1  2  3  4  …                        … n-3  n-2  n-1  n
    owner ──▶            unassigned              ◀── helpers

Invariant: each part has exactly one state: unassigned, claimed by the owner, outstanding at one helper, stored by one
helper, or missing. The owner sends each missing part itself. A part never returns to the helpers, so a helper that is
lost, late or wrong costs time but no correctness.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from everstep.protocol.ids import NodeId

MAX_WINDOW = 4
"""Maximum number of parts that one helper sends at a time, one per connection (`everstep.bulk.CONNECTIONS`)."""
LATE_SECONDS = 10.0
"""Minimum seconds after which the owner gives up on a part that a helper should have sent.

The limit grows with the owner's own slowest part.
"""


@dataclass(frozen=True, slots=True)
class Outstanding:
    """A part that the owner has requested from a helper and that the helper has not stored yet."""

    helper: NodeId
    since: float
    """Monotonic time of the request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedUpload:
    """The parts of one upload and the nodes that send them.

    The owner's agent holds one object per attempt, and replaces it with the result of each method.
    """

    part_count: int
    window: int = 1
    """Number of parts that one helper sends at a time: an equal share of the object, from 1 to `MAX_WINDOW`.

    With more parts at a time, the helpers would take the last parts of a small object and finish after the owner.
    """
    claimed: int = 0
    """The owner has claimed all parts from 1 to this number."""
    lowest: int
    """The lowest part number that a helper has received; `part_count` + 1 before the first."""
    outstanding: Mapping[int, Outstanding] = field(default_factory=dict[int, Outstanding])
    stored: Mapping[int, NodeId] = field(default_factory=dict[int, NodeId])
    """Number of each stored part, with the helper that stored the part."""
    missing: frozenset[int] = frozenset()
    """Parts that a helper should have sent and has not stored. The owner sends these parts."""
    excluded: frozenset[NodeId] = frozenset()
    """Helpers that receive no further parts.

    Their connection is lost, they are late, they declined to help, or they stored wrong bytes.
    """

    @classmethod
    def begin(cls, part_count: int, helpers: Sequence[NodeId] = (), now: float = 0.0) -> SharedUpload:
        """Return the state before the first part.

        Each helper already has its first parts: an equal share of the object, at most `MAX_WINDOW` parts. Otherwise
        the owner and the first helper to answer would divide a small object between them.

        Args:
            part_count: number of the last part, because numbers begin with 1.
            helpers: nodes that hold replicas of the shard.
            now: monotonic time in seconds.

        Returns:
            The state in which the owner has claimed no part.
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

    def claim(self, number: int) -> tuple[SharedUpload, bool]:
        """Claim the next part in ascending order for the owner.

        Args:
            number: 1 at the first call, then one more at each call.

        Returns:
            The new state, and whether the owner must send the part now. If False, a helper is sending the part.
        """
        if number < self.lowest:
            return replace(self, claimed=number), True
        if number in self.missing:
            return replace(self, missing=self.missing - {number}), True
        return self, False

    def assign(self, helper: NodeId, now: float) -> tuple[SharedUpload, int | None]:
        """Assign one more part to a helper.

        Args:
            helper: node that holds a replica of the shard.
            now: monotonic time in seconds.

        Returns:
            The new state, and the number of the part. None if no part is left, or if the helper must first store its
            assigned parts.
        """
        number = self.lowest - 1
        in_flight = sum(each.helper == helper for each in self.outstanding.values())
        if helper in self.excluded or number <= self.claimed or in_flight >= self.window:
            return self, None
        outstanding = {**self.outstanding, number: Outstanding(helper, now)}
        return replace(self, lowest=number, outstanding=outstanding), number

    def store(self, helper: NodeId, number: int) -> SharedUpload:
        """Record that a helper has stored a part.

        A part that is not outstanding at this helper changes nothing: it is a repeated answer, or the owner already
        sends the part.
        """
        part = self.outstanding.get(number)
        if part is None or part.helper != helper:
            return self
        outstanding = {each: other for each, other in self.outstanding.items() if each != number}
        return replace(self, outstanding=outstanding, stored={**self.stored, number: helper})

    def exclude(self, helper: NodeId) -> SharedUpload:
        """Withdraw all outstanding parts from a helper, and assign no more. Its stored parts remain valid."""
        lost = {number for number, part in self.outstanding.items() if part.helper == helper}
        return replace(
            self,
            outstanding={number: part for number, part in self.outstanding.items() if number not in lost},
            missing=self.missing | lost,
            excluded=self.excluded | {helper},
        )

    def exclude_late(self, now: float, slowest_seconds: float) -> SharedUpload:
        """Exclude each helper whose oldest part is late.

        Args:
            now: monotonic time in seconds.
            slowest_seconds: longest time that one of the owner's own parts took, or has taken so far; 0 without parts.

        Returns:
            The new state.
        """
        limit = max(LATE_SECONDS, 2 * slowest_seconds)
        state = self
        for helper in {part.helper for part in self.outstanding.values() if now - part.since > limit}:
            state = state.exclude(helper)
        return state

    def reject(self, number: int) -> SharedUpload:
        """Record that a stored part has wrong content. The owner sends the part, and the helper is excluded."""
        helper = self.stored[number]
        stored = {each: other for each, other in self.stored.items() if each != number}
        return replace(self, stored=stored, missing=self.missing | {number}).exclude(helper)

    def take_missing(self) -> tuple[SharedUpload, int | None]:
        """Claim a missing part for the owner. The number in the result is None if no part is missing."""
        if not self.missing:
            return self, None
        number = min(self.missing)
        return replace(self, missing=self.missing - {number}), number

    def owed(self, helper: NodeId) -> list[int]:
        """Return the outstanding parts of a helper, in descending order."""
        return sorted((number for number, part in self.outstanding.items() if part.helper == helper), reverse=True)

    @property
    def is_settled(self) -> bool:
        """True if the owner need not wait for any helper: no part is outstanding or missing."""
        return not self.outstanding and not self.missing
