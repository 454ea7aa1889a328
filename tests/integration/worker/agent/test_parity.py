"""A group of agents with parity in memory: one lost node is rebuilt bit-identically, a second loss needs S3.

Each state has several chunks and another size than the states of other ranks.
"""

from __future__ import annotations

import random
from functools import lru_cache

import pytest

from everstep.protocol.agent_messages import ShardProtection
from everstep.protocol.slot import CHUNK_BYTES
from tests.integration.worker.agent import fleet as harness
from tests.integration.worker.agent.fleet import Fleet, Node, payload

pytestmark = pytest.mark.integration


@lru_cache(maxsize=64)
def state(rank: int, step: int) -> bytes:
    """Return a state of two to four chunks, of which no two are equal."""
    return random.Random(1000 * rank + step).randbytes((2 + rank) * CHUNK_BYTES - 4096 * (rank + 1))


@pytest.fixture
def group(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> Fleet:
    """A fleet of three nodes in one group with parity."""
    monkeypatch.setattr(harness, "state", state)
    monkeypatch.setattr(harness, "CAPACITY_BYTES", 4 * CHUNK_BYTES)
    for node in fleet.nodes:
        node.agent.store.memory_bytes = 1 << 28
    fleet.has_parity = True
    return fleet


def protection(fleet: Fleet, rank: int) -> ShardProtection:
    member = fleet.control.member(fleet.nodes[rank].id)
    assert member is not None
    return member.protection[0]


async def lose(node: Node) -> None:
    """Lose a machine with its memory, and start another machine in its place."""
    await node.gone()
    for path in [*node.slots.rglob("*.slot-*"), *node.slots.rglob("*.word"), node.state_dir / "promise"]:
        path.unlink()
    node.start()
    node.agent.store.memory_bytes = 1 << 28


def check_restored(fleet: Fleet, step: int) -> None:
    assert fleet.plan is not None
    assert fleet.plan.base_step == step
    for rank in fleet.ranks:
        assert rank.restored == payload(rank.rank, step)[0]


async def test_a_lost_node_is_rebuilt_and_the_job_continues(group: Fleet) -> None:
    await group.launch()
    await group.train(3)
    for rank in range(3):
        assert protection(group, rank).in_view == protection(group, rank).holders
    await lose(group.nodes[1])
    await group.launch()
    assert group.plan is not None
    base = group.plan.base_step
    assert base >= 3
    check_restored(group, base)
    restored = [member.restored_from for node in group.nodes if (member := group.control.member(node.id)) is not None]
    assert restored == [("local",), ("parity",), ("local",)]
    await group.train(base + 2)
    await lose(group.nodes[2])
    await group.launch()
    check_restored(group, group.plan.base_step)
    assert group.plan.base_step >= base + 2
