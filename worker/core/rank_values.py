"""The newest values that the script logged on each rank of a node, for charts with one line per rank.

Invariant: a report contains at most `MAX_NAMES` values per rank, and none for jobs of more than `MAX_SERIES` ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

from everstep.protocol.agent_messages import MAX_SERIES, RankValues
from everstep.protocol.ids import Rank
from everstep.protocol.rank_messages import LogRecord

MAX_NAMES = 32
"""Maximum number of logged names per rank. Values of further names are not reported."""


class NewestValues:
    """The newest logged values of the ranks of one generation on this node."""

    def __init__(self, world_size: int) -> None:
        self._is_reported = world_size <= MAX_SERIES
        self._values: dict[Rank, dict[str, float]] = {}

    def record(self, rank: Rank, records: Sequence[LogRecord]) -> None:
        """Keep the newest value of each name. `records` are in the order of the log calls."""
        if not self._is_reported:
            return
        held = self._values.setdefault(rank, {})
        for record in records:
            for name, value in record.values.items():
                if name in held or len(held) < MAX_NAMES:
                    held[name] = value

    def report(self) -> tuple[RankValues, ...]:
        """Return the values for the agent's report, in rank order."""
        return tuple(RankValues(rank=rank, values=dict(held)) for rank, held in sorted(self._values.items()) if held)
