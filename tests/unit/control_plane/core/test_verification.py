"""Tests the wait for a store that cannot be read, and the words about a damaged checkpoint (`core.verification`)."""

from __future__ import annotations

import pytest

from control_plane.core.verification import (
    FIRST_PAUSE_SECONDS,
    LONGEST_PAUSE_SECONDS,
    Blocked,
    Damage,
    DamageKind,
    blocked,
)
from everstep.protocol.agent_messages import Obstacle


def test_each_failed_attempt_doubles_the_pause_up_to_the_limit() -> None:
    wait: Blocked | None = None
    pauses = []
    for attempt in range(30):
        wait = blocked(wait, Obstacle.DENIED, "", 100.0 + attempt)
        pauses.append(wait.next_attempt_at - 100.0 - attempt)
        assert (wait.since, wait.attempt_count) == (100.0, attempt + 1)
    doubled = [FIRST_PAUSE_SECONDS * 2**attempt for attempt in range(30)]
    assert pauses == [min(pause, LONGEST_PAUSE_SECONDS) for pause in doubled]
    assert blocked(None, Obstacle.DENIED, "", 100.0, longest_seconds=0.5).next_attempt_at == 100.5


@pytest.mark.parametrize(("rank", "words"), [(None, "gone"), (3, "rank 3: gone")])
def test_a_damage_names_the_rank_of_a_shard(rank: int | None, words: str) -> None:
    assert str(Damage(kind=DamageKind.MISSING, rank=rank, detail="gone")) == words
