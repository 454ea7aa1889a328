"""Nodes load the shards of an earlier launch from each other. They never wait for each other forever."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.protocol.ids import Rank
from tests.corruption.group import STEPS
from tests.corruption.outcomes import Outcome, small_chunks
from tests.corruption.relayout import EarlierLoads

pytestmark = pytest.mark.integration
SECONDS = 20.0


@pytest.fixture(autouse=True)
def _small_chunks() -> Iterator[None]:
    with small_chunks():
        yield


async def test_two_nodes_that_lose_their_shards_do_not_wait_for_each_others_rebuild(tmp_path: Path) -> None:
    """The two shards belong to one stripe, so neither of them can be rebuilt.

    Each of the two nodes would rebuild its own shard if another node requested the shard.
    """
    loads = EarlierLoads(tmp_path, random.Random(0))
    await loads.prepare()
    plan = loads.plan(STEPS[-1])
    assert plan is not None
    for rank in (Rank(0), Rank(1)):
        loads.group.slot(rank, STEPS[-1]).file.empty()
    async with asyncio.timeout(SECONDS):
        assert await loads.loaded(loads.group.nodes[Rank(2)], Rank(0), plan) == (Outcome.REFUSED, "")
        assert await loads.loaded(loads.group.nodes[Rank(0)], Rank(2), plan) == (Outcome.HARMLESS, "")
    await loads.close()
