"""Tests which progress a holder of a share reports to a member that waits for contributions of other members."""

from __future__ import annotations

import asyncio
from asyncio import Task
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest

from everstep.protocol.codec import Message
from everstep.protocol.ids import FIRST_STEP, Generation, JobName, Rank, RunId, Step
from everstep.protocol.parity import Contribution
from everstep.protocol.peer_messages import BeginShard, EndShard, PreparingShard, ShardDigests
from everstep.protocol.slot import payload_chunk_digests, payload_digest
from worker.core.slots import Content
from worker.replication.contributions import PREPARING_SECONDS, Contributions
from worker.replication.streams import Receiver, Streams
from worker.replication.transfers import ShardRejected
from worker.replication.transport import Session
from worker.shm.held_files import HeldFiles
from worker.shm.shares import Shares
from worker.shm.store import SlotStore
from worker.tasks import end

CONTENT = Content(Generation(1), Step(7))
HOLDER, WAITING, SLOW = Rank(0), Rank(1), (Rank(2), Rank(3))
SHARD = b"the only chunk of rank 1, which belongs to the share of rank 2"
LAYOUT = b"l" * 16


@dataclass
class Recorder:
    """A fake session with the waiting member, which records the holder's messages."""

    sent: list[Message] = field(default_factory=list)

    async def send(self, *messages: Message) -> None:
        self.sent += messages


def contribution(rank: Rank) -> Contribution:
    return Contribution(
        rank=rank,
        payload_bytes=len(SHARD),
        digest=payload_digest(SHARD),
        layout_hash=LAYOUT,
        index_offset=0,
        index_bytes=0,
    )


def announced(rank: Rank, step: Step) -> tuple[BeginShard, Callable[[], Awaitable[ShardDigests | EndShard]]]:
    """Return the message that announces a member's shard, and a function that returns the shard's digests."""
    begin = BeginShard(
        transfer=1,
        owner_rank=rank,
        origin_generation=CONTENT.origin,
        step=step,
        payload_bytes=len(SHARD),
        capacity_bytes=len(SHARD),
        index_offset=0,
        index_bytes=0,
        layout_hash=LAYOUT,
        committed=FIRST_STEP,
    )
    rest: list[ShardDigests | EndShard] = [
        ShardDigests(transfer=1, first=0, chunk_digests=payload_chunk_digests(SHARD)),
        EndShard(transfer=1, digest=payload_digest(SHARD)),
    ]

    async def following() -> ShardDigests | EndShard:
        return rest.pop(0)

    return begin, following


def opened(folder: Path, *, slot_count: int = 2) -> Contributions:
    """Return the contributions to the share of rank 0. All other members are connected."""
    store = SlotStore(HeldFiles(), memory_bytes=1 << 26)
    store.open_run(JobName("gpt"), RunId("ab" * 16))
    shares = Shares(store, {HOLDER: (HOLDER, WAITING, *SLOW)}, keep=lambda owner, committed: (), slot_count=slot_count)
    contributions = Contributions(shares)
    for rank in (WAITING, *SLOW):
        contributions.connect(rank)
    return contributions


def taking(contributions: Contributions, session: Recorder, rank: Rank, step: Step = CONTENT.step) -> Task[bytes]:
    """Begin to receive the contribution of a member to the share of a step."""
    begin, following = announced(rank, step)
    return asyncio.create_task(
        contributions.take(
            cast(Session, session), Streams(), Receiver(), begin, following, on_emptied=lambda ranks: None
        )
    )


async def test_members_that_progress_in_different_intervals_delay_nobody(tmp_path: Path) -> None:
    """Members that progress at different rates do not delay each other.

    On a slow link, a chunk takes longer than the interval of the holder's progress messages.
    """
    contributions, session = opened(tmp_path), Recorder()
    shares = contributions.shares
    for rank in SLOW:
        assert await shares.begin(CONTENT, contribution(rank), shard_bytes=len(SHARD), committed=FIRST_STEP)
    waiting = taking(contributions, session, WAITING)
    for number in range(8):
        await asyncio.sleep(1.5 * PREPARING_SECONDS)
        contributions.progress(SLOW[number % 2])
    assert [type(message) for message in session.sent].count(PreparingShard) >= 2
    before = len(session.sent)
    for _ in range(4):
        await asyncio.sleep(1.5 * PREPARING_SECONDS)
        contributions.progress(SLOW[0])
    assert len(session.sent) <= before + 1, "a silent member is not waited for"
    await end(waiting)
    await shares.close()


async def test_a_member_whose_share_gave_way_is_waited_for_until_it_offers_the_newer_step(tmp_path: Path) -> None:
    contributions, session = opened(tmp_path, slot_count=1), Recorder()
    early = taking(contributions, Recorder(), SLOW[0])
    await asyncio.sleep(PREPARING_SECONDS)
    assert contributions.shares.accumulation(HOLDER, CONTENT) is not None
    waiting = taking(contributions, session, WAITING, Step(CONTENT.step + 1))
    with pytest.raises(ShardRejected, match="abandoned"):
        await early
    await asyncio.sleep(3 * PREPARING_SECONDS)
    assert PreparingShard() in session.sent
    await end(waiting)
    await contributions.shares.close()
