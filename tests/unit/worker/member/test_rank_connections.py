"""Tests how an agent reacts to the messages of a rank.

The tests use `RankConnections` with real slots and pages, and with a connection that records messages.
"""

from __future__ import annotations

import asyncio
import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from everstep.protocol import slot
from everstep.protocol.agent_messages import RankValues
from everstep.protocol.codec import Message
from everstep.protocol.ids import Generation, NodeId, Rank, Step
from everstep.protocol.options import KeptOption, OptionsKept
from everstep.protocol.plan import GenerationPlan, ShardSource
from everstep.protocol.rank_messages import (
    ECHO_YES,
    RANK_WORD_BYTES,
    Abandoned,
    Arriving,
    Boundary,
    Captured,
    Capturing,
    Logged,
    LogRecord,
    PageChanged,
    Phase,
    RankHalf,
    RankHello,
    RankStanding,
    SlotsGranted,
    SlotsRefused,
    SlotsRequest,
    StopState,
    UnkeptCause,
    Vote,
    Welcome,
    write_rank_half,
)
from everstep.protocol.rehearsals import (
    MAX_REHEARSED_CHARACTERS,
    MAX_REHEARSED_NAMES,
    RehearsalVerdict,
    Rehearsed,
    ReplayDifference,
)
from everstep.protocol.rounds import Announcement
from everstep.protocol.slot import HEADER_BYTES, SlotHeader, SlotState
from tests.unit.worker.rank_plans import rank_plan
from worker.core.metric_outbox import MetricOutbox
from worker.core.own_metrics import PERIOD_SECONDS, NodeUsage
from worker.core.parity import CONTRIBUTION_BYTES
from worker.core.rounds import NONE, Shard
from worker.core.slots import Content
from worker.member import rank_slots
from worker.member.rank_connections import RankConnections
from worker.member.rank_slots import NO_LAYOUT
from worker.member.traffic import Traffic
from worker.replication.pacing import NodePacer
from worker.shards import owned_shard
from worker.shards.owned_shard import OwnedShard
from worker.shm import slot_file, store
from worker.shm.held_files import HeldFiles
from worker.shm.rank_page import RankPage
from worker.shm.slot_file import SlotFile
from worker.shm.store import SlotStore

PLAN = rank_plan()
RANK = Rank(0)
LAYOUT = bytes(range(16))
PEER = NodeId("i-peer")


class Line:
    """A fake of the agent's connection to a rank. It records the messages that the agent sends."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.has_slots = asyncio.Event()

    def send(self, message: Message) -> None:
        self.sent.append(message)
        if isinstance(message, SlotsGranted):
            self.has_slots.set()

    def close(self) -> None: ...


def announcement(committed: int, proposed: int) -> Announcement:
    return Announcement(
        generation=PLAN.generation, term=1, sequence=1, committed=Step(committed), proposed=Step(proposed)
    )


class Place:
    """The objects that an agent has for one rank: slots, page, shard, and a connection that records messages."""

    def __init__(
        self, root: Path, plan: GenerationPlan = PLAN, rank: Rank = RANK, peers: tuple[NodeId, ...] = ()
    ) -> None:
        self.store = SlotStore(HeldFiles(), memory_bytes=2**20)
        self.store.open_run(plan.job, plan.run)
        self.outbox = MetricOutbox()
        self.unix = 1_800_000_000.0
        self.usage = NodeUsage()
        self.sent_bytes = 0
        self.snapshot_seconds: list[float] = []
        self.kept: tuple[Content, ...] = ()
        self.reports: list[None] = []
        """One entry per immediate report to the control plane."""
        self.capacity_bytes = 4096
        """Capacity of the slots that the rank requests."""
        self.page = self.store.page(rank, PLAN.generation)
        self.shard = OwnedShard(
            rank=rank,
            generation=PLAN.generation,
            core=Shard.begin(Step(0), peers),
            base=None,
            store=self.store,
            page=self.page,
            now=lambda: self.unix,
            on_change=lambda: None,
        )
        self.shards = {rank: self.shard}
        self.traffic = Traffic(
            [rank],
            NodePacer(),
            replica_count=0,
            max_slowdown=0.01,
            on_distance=lambda _: None,
            on_pacing=lambda _: None,
        )
        self.lines = RankConnections(
            plan,
            self.shards,
            self.store,
            keep=lambda rank: self.kept,
            on_change=lambda: self.reports.append(None),
            on_round_change=lambda: None,
            traffic=self.traffic,
            outbox=self.outbox,
            slot_count=2,
            now=lambda: self.unix,
            usage=lambda: self.usage,
            sent_bytes=lambda: self.sent_bytes,
            on_snapshot=self.snapshot_seconds.append,
        )
        self.line = Line()

    def stand_at(self, boundary: int, standing: RankStanding = RankStanding.MOVING) -> None:
        self.stand(RankHalf(PLAN.generation, boundary=boundary, standing=standing))

    def stand(self, half: RankHalf) -> None:
        with (
            mmap.mmap(self.store.files.descriptor(self.page.name), RANK_WORD_BYTES) as page,
            memoryview(page) as view,
        ):
            write_rank_half(view, half)

    def propose(self, step: int) -> None:
        self.lines.apply_announcement(announcement(NONE, step))

    async def request(self) -> None:
        capacity = self.capacity_bytes
        self.lines.message(RANK, SlotsRequest(generation=PLAN.generation, layout_hash=LAYOUT, capacity_bytes=capacity))
        await self.line.has_slots.wait()

    async def has_refused(self) -> None:
        """Wait until the rank's request was refused for lack of memory."""
        await asyncio.sleep(0)
        await self.lines.background.idle()
        assert self.shard.refusal.startswith("Protection waits for memory on its node")
        self.shard.refusal = ""

    def say_late(self, step: int) -> None:
        self.lines.message(
            RANK, Abandoned(generation=PLAN.generation, step=Step(step), reason="late", cause=UnkeptCause.LATE)
        )


@pytest.fixture
def place(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Place]:
    place = Place(tmp_path / "slots", peers=getattr(request, "param", ()))
    yield place
    place.page.close(unlink=True)
    place.store.close()


HELLO = RankHello(job=PLAN.job, run=PLAN.run, generation=PLAN.generation, rank=RANK, pid=1)
BASE = Step(4)


def restoring(kind: str) -> GenerationPlan:
    """Return a plan that resumes from step 4, with one source of the given kind for the rank's shard."""
    source = ShardSource(kind=kind, origin_generation=Generation(1), step=BASE, digest=bytes(16), payload_bytes=3000)  # type: ignore[arg-type]
    return structs.replace(PLAN, base_step=BASE, ranks=(structs.replace(PLAN.ranks[0], sources=(source,)),))


class Loading(Place):
    """A rank that waits while its node loads the state to restore."""

    def __init__(self, root: Path, kind: str) -> None:
        super().__init__(root, restoring(kind))
        self.header = SlotHeader(
            job=PLAN.job,
            run=PLAN.run,
            owner_rank=RANK,
            origin_generation=Generation(1),
            step=BASE,
            state=SlotState.WRITING,
            capacity_bytes=4096,
            payload_bytes=3000,
            index_offset=2000,
            index_bytes=1000,
        )
        self.file = SlotFile.create("slot", self.store.files, self.header, threading.Event())
        self.shard.begin_load()

    def come(self, verified_bytes: int) -> None:
        self.lines.arrived(RANK, self.file, self.header, verified_bytes)

    def close(self) -> None:
        self.file.close()
        self.page.close(unlink=True)
        self.store.close()


@pytest.fixture
def loading(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Loading]:
    place = Loading(tmp_path / "slots", getattr(request, "param", "peer"))
    yield place
    place.close()


async def test_a_rank_that_waits_follows_what_arrives(loading: Loading) -> None:
    assert loading.lines.hello(HELLO, loading.line)  # type: ignore[arg-type]
    assert loading.line.sent == []
    loading.come(0)
    (arriving,) = loading.line.sent
    assert isinstance(arriving, Arriving)
    assert (arriving.base_slot_path, arriving.load, arriving.index_offset, arriving.index_bytes) == (
        loading.file.name,
        1,
        2000,
        1000,
    )
    loading.come(1000)
    assert loading.page.agent.verified == 1000
    assert isinstance(loading.line.sent[-1], PageChanged)
    late = Line()
    assert loading.lines.hello(HELLO, late)  # type: ignore[arg-type]
    assert late.sent == [arriving], "who comes later finds how far it is on the page"
    await loading.lines.close()


async def test_a_load_that_begins_anew_is_on_the_page_before_anything_is_written(loading: Loading) -> None:
    assert loading.lines.hello(HELLO, loading.line)  # type: ignore[arg-type]
    loading.come(1000)
    loading.shard.begin_load()
    assert (loading.page.agent.load, loading.page.agent.verified) == (2, 0)
    assert loading.store.page(RANK, PLAN.generation).agent.load == 2, "an agent that is restarted counts on"
    loading.come(500)
    arriving = loading.line.sent[-1]
    assert isinstance(arriving, Arriving)
    assert arriving.load == 2
    await loading.lines.close()


@pytest.mark.parametrize("loading", ["s3"], indirect=True)
async def test_ranks_meet_in_init_where_one_of_them_waits_for_s3(loading: Loading) -> None:
    assert loading.lines.hello(HELLO, loading.line)  # type: ignore[arg-type]
    loading.come(3000)
    assert loading.line.sent == []
    loading.lines.welcome_all()
    assert [type(message) for message in loading.line.sent] == [Welcome]
    await loading.lines.close()


async def test_slots_that_are_asked_for_during_a_load_are_made_behind_it(loading: Loading) -> None:
    assert loading.lines.hello(HELLO, loading.line)  # type: ignore[arg-type]
    loading.lines.message(RANK, SlotsRequest(generation=PLAN.generation, layout_hash=LAYOUT, capacity_bytes=4096))
    await asyncio.sleep(0)
    assert RANK not in loading.store.shards
    loading.lines.welcome_all()
    await loading.line.has_slots.wait()
    assert [type(message) for message in loading.line.sent] == [Welcome, SlotsGranted]
    await loading.lines.close()


async def begin(place: Place) -> None:
    """Connect the rank, let the rank request slots, and let it finish steps 1 and 2.

    The coordinator proposes step 1 before the rank has slots.
    """
    hello = RankHello(job=PLAN.job, run=PLAN.run, generation=PLAN.generation, rank=RANK, pid=1)
    place.lines.welcome_all()
    assert place.lines.hello(hello, place.line)  # type: ignore[arg-type]
    place.propose(1)
    await asyncio.sleep(0)
    place.stand_at(1)
    await place.request()
    place.stand_at(2)


@pytest.mark.parametrize("is_restarted", [False, True], ids=["the same agent", "another agent"])
async def test_a_rank_whose_slots_cannot_grow_has_them_when_there_is_room(
    place: Place, monkeypatch: pytest.MonkeyPatch, is_restarted: bool
) -> None:
    """A rank requests larger slots while the node has no memory, and gets them when there is room."""

    def refuse(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    await place.store.reserve(RANK, capacity_bytes=1024, layout_hash=LAYOUT, slot_count=2)
    place.lines.welcome_all()
    assert place.lines.hello(HELLO, place.line)  # type: ignore[arg-type]
    with monkeypatch.context() as patched:
        patched.setattr(slot_file, "populate", lambda *_, is_written: False)
        patched.setattr(os, "posix_fallocate", refuse)
        asked = asyncio.create_task(place.request())
        await place.has_refused()
        if is_restarted:
            place.store.close()
            place.store.open_run(PLAN.job, PLAN.run)
            place.propose(1)
            await place.has_refused()
    place.propose(2)
    async with asyncio.timeout(20):
        await asked
        await place.lines.background.idle()
    assert place.shard.refusal == ""
    assert place.page.agent.slot >= 0
    await place.lines.close()


async def test_a_rank_that_stands_at_a_step_that_was_proposed_while_it_moved_has_its_slot(place: Place) -> None:
    """The agent grants the slot of the last step when a message of the rank shows that the rank waits in `close`.

    The coordinator proposed the step while the rank was still training, and does not announce it again.
    """
    await begin(place)
    place.stand_at(3)
    place.propose(3)
    await place.lines.background.idle()
    assert place.shard.granted_slot == NONE, "it moves, and may be beyond it"
    place.stand_at(3, RankStanding.CLOSING)
    place.lines.message(
        RANK, Boundary(generation=PLAN.generation, boundary=Step(3), at_seconds=0.0, blocked_seconds=0.0)
    )
    await place.lines.background.idle()
    assert place.shard.granted_slot >= 0


TOO_LARGE = SlotsRequest(generation=PLAN.generation, layout_hash=LAYOUT, capacity_bytes=2**20)


async def ask(place: Place, request: SlotsRequest) -> object:
    """Send a request for slots, and return the answer."""
    place.lines.message(RANK, request)
    await place.lines.background.idle()
    return place.line.sent[-1]


async def test_a_state_that_never_fits_ends_the_job_before_anything_of_it_is_kept(place: Place) -> None:
    place.lines.welcome_all()
    assert place.lines.hello(HELLO, place.line)  # type: ignore[arg-type]
    assert isinstance(await ask(place, TOO_LARGE), SlotsRefused)
    (fault,) = place.lines.faults.present
    assert (fault.code, fault.is_permanent) == ("protection_does_not_fit", True)


async def test_shards_of_different_sizes_are_counted_as_they_are(tmp_path: Path) -> None:
    """The agent adds up the sizes of the node's shards, instead of multiplying the size of one shard."""
    place = Place(tmp_path / "slots", rank_plan(ranks_per_node=2))
    place.lines.welcome_all()
    assert place.lines.hello(HELLO, place.line)  # type: ignore[arg-type]
    place.shards |= {Rank(1): place.shard}
    large = structs.replace(TOO_LARGE, capacity_bytes=400_000)
    place.lines.slots.capacities[Rank(1)] = 100_000
    assert isinstance(await ask(place, large), SlotsGranted)
    place.lines.slots.capacities[Rank(1)] = 400_000
    assert isinstance(await ask(place, large), SlotsRefused)
    assert "2 slots · 1 copies · 808,192 bytes of shards per node need 1,616,384 bytes" in place.shard.refusal
    place.page.close(unlink=True)
    place.store.close()


async def test_a_refusal_with_parity_counts_the_shares(tmp_path: Path) -> None:
    """The memory that a refusal states includes the shares.

    A shard is divided into whole chunks among the shares of its stripe. The shards here are smaller than a chunk, so a
    share needs room for a whole shard.
    """
    plan = rank_plan(ranks_per_node=1)
    stripe = tuple(map(Rank, range(4)))
    place = Place(
        tmp_path / "slots", structs.replace(plan, ranks=tuple(structs.replace(r, stripe=stripe) for r in plan.ranks))
    )
    place.lines.welcome_all()
    assert place.lines.hello(HELLO, place.line)  # type: ignore[arg-type]
    assert isinstance(await ask(place, structs.replace(TOO_LARGE, capacity_bytes=400_000)), SlotsRefused)
    needed = 2 * (2 * (400_000 + HEADER_BYTES) + 3 * CONTRIBUTION_BYTES)
    assert place.shard.refusal.startswith(
        f"Protection.ParityGroupSize: 2 slots · shards and shares in groups of 4 nodes · {400_000 + HEADER_BYTES:,} bytes of "
        f"shards per node need {needed:,} bytes of host memory per node; "
    )
    place.page.close(unlink=True)
    place.store.close()


async def test_the_figure_of_a_refusal_counts_the_ranks_that_have_not_asked_yet(tmp_path: Path) -> None:
    """A refusal states the memory that all ranks of the node need.

    For each rank that has not requested slots, the agent assumes the size of the refused request.
    """
    place = Place(tmp_path / "slots", rank_plan(ranks_per_node=8))
    place.shards |= {Rank(rank): place.shard for rank in range(8)}
    place.lines.welcome_all()
    assert place.lines.hello(HELLO, place.line)  # type: ignore[arg-type]
    place.lines.slots.capacities |= {Rank(1): 300_000, Rank(2): 300_000}
    assert isinstance(await ask(place, structs.replace(TOO_LARGE, capacity_bytes=300_000)), SlotsRefused)
    assert "2 slots · 1 copies · 2,432,768 bytes of shards per node need 4,865,536 bytes" in place.shard.refusal
    place.page.close(unlink=True)
    place.store.close()


async def test_a_refusal_by_what_else_lies_on_the_node_says_figures_that_do_not_fit(place: Place) -> None:
    place.lines.welcome_all()
    assert place.lines.hello(HELLO, place.line)  # type: ignore[arg-type]
    await place.store.reserve(Rank(1), capacity_bytes=300_000, layout_hash=LAYOUT, slot_count=2)
    assert isinstance(await ask(place, structs.replace(TOO_LARGE, capacity_bytes=400_000)), SlotsRefused)
    assert (
        "with its other slots, need 1,400,000 bytes of host memory per node; 1,048,576 are available"
        in place.shard.refusal
    )


async def test_a_rank_whose_growth_is_refused_counts_with_the_slots_that_it_has(place: Place) -> None:
    place.lines.welcome_all()
    assert place.lines.hello(HELLO, place.line)  # type: ignore[arg-type]
    assert isinstance(await ask(place, structs.replace(TOO_LARGE, capacity_bytes=4096)), SlotsGranted)
    assert isinstance(await ask(place, TOO_LARGE), SlotsRefused)
    assert place.lines.slots.capacities == {RANK: 4096}


async def test_a_step_that_waits_for_slots_says_so_and_no_reason_of_before(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = asyncio.Event()

    async def for_ever(*_: object, **__: object) -> None:
        asked.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(place.store, "reserve", for_ever)
    place.shard.refusal = "no slot is free: one slot is being uploaded, another holds the committed step"
    place.lines.welcome_all()
    place.lines.message(RANK, SlotsRequest(generation=PLAN.generation, layout_hash=LAYOUT, capacity_bytes=4096))
    await asked.wait()
    place.propose(2)
    await asyncio.sleep(0)
    place.say_late(2)
    assert place.shard.core.reason == NO_LAYOUT
    await place.lines.close()


async def test_a_state_that_outgrows_its_node_costs_protection_and_not_the_job(place: Place) -> None:
    place.lines.welcome_all()
    assert place.lines.hello(HELLO, place.line)  # type: ignore[arg-type]
    assert isinstance(await ask(place, structs.replace(TOO_LARGE, capacity_bytes=4096)), SlotsGranted)
    place.shard.apply_announcement(announcement(3, NONE))
    assert isinstance(await ask(place, TOO_LARGE), SlotsRefused)
    assert not place.lines.faults.present
    place.lines.apply_announcement(
        Announcement(generation=PLAN.generation, term=1, sequence=4, committed=Step(3), proposed=Step(4))
    )
    await place.lines.background.idle()
    assert place.shard.core.proposed == 4
    assert "bytes of host memory per node" in place.shard.refusal, (
        "what is proposed meanwhile is abandoned for that reason"
    )
    assert isinstance(await ask(place, structs.replace(TOO_LARGE, capacity_bytes=4096)), SlotsGranted), (
        "it has become smaller again"
    )
    assert place.shard.refusal == ""


async def test_a_step_before_the_first_slots_is_no_reason_for_more_notice(place: Place) -> None:
    await begin(place)
    place.say_late(1)
    told = place.shard.round()
    assert (told.vote, told.is_late, told.reason) == (Vote.ABANDON, False, NO_LAYOUT)
    await place.lines.close()


async def test_a_step_proposed_while_slots_are_being_made_is_none_either(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve, asked, may_go_on = place.store.reserve, asyncio.Event(), asyncio.Event()

    async def slow(*arguments: Any, **more: Any) -> tuple[str, ...]:
        asked.set()
        await may_go_on.wait()
        return await reserve(*arguments, **more)

    monkeypatch.setattr(place.store, "reserve", slow)
    hello = RankHello(job=PLAN.job, run=PLAN.run, generation=PLAN.generation, rank=RANK, pid=1)
    place.lines.welcome_all()
    assert place.lines.hello(hello, place.line)  # type: ignore[arg-type]
    place.lines.message(RANK, SlotsRequest(generation=PLAN.generation, layout_hash=LAYOUT, capacity_bytes=4096))
    await asked.wait()
    place.propose(2)
    await asyncio.sleep(0)
    may_go_on.set()
    await place.line.has_slots.wait()
    place.stand_at(3)
    place.say_late(2)
    told = place.shard.round()
    assert (told.vote, told.is_late, told.reason) == (Vote.ABANDON, False, NO_LAYOUT)
    await place.lines.close()


@pytest.mark.parametrize("place", [(PEER,)], indirect=True)
async def test_no_slot_is_granted_before_the_holders_have_made_theirs(place: Place) -> None:
    await begin(place)
    place.propose(3)
    await asyncio.sleep(0)
    assert place.shard.granted_slot == NONE
    place.stand_at(4)
    place.say_late(3)
    told = place.shard.round()
    assert (told.vote, told.is_late, told.reason) == (Vote.ABANDON, False, f"{PEER} has not created its slots yet")
    place.propose(5)
    assert place.shard.reserved is not None
    place.shard.ready(PEER, *place.shard.reserved)
    await done(place)
    assert place.shard.granted_slot != NONE
    await place.lines.close()


@pytest.mark.parametrize("of", ["stop", "rehearsal"])
@pytest.mark.parametrize(
    ("standing", "states", "words"),
    [
        (RankStanding.MOVING, (StopState.NONE, StopState.NONE), 0),
        (RankStanding.MOVING, (StopState.NONE, StopState.CONFIRMED), 0),
        (RankStanding.STOPPED, (StopState.CONFIRMED, StopState.CONFIRMED), 2),
        (RankStanding.CLOSING, (StopState.NONE, StopState.NONE), 2),
        (RankStanding.MOVING, (StopState.NONE, StopState.ANNOUNCED), 1),
        (RankStanding.MOVING, (StopState.ANNOUNCED, StopState.CONFIRMED), 2),
        (RankStanding.MOVING, (StopState.ANNOUNCED, StopState.NONE), 2),
    ],
    ids=[
        "it trains",
        "it is on its way to a stop",
        "it stands",
        "it closes",
        "it may come to a stop",
        "it may wait at one",
        "it need not wait any more",
    ],
)
async def test_a_rank_is_woken_where_it_may_be_waiting(
    place: Place,
    monkeypatch: pytest.MonkeyPatch,
    of: str,
    standing: RankStanding,
    states: tuple[StopState, StopState],
    words: int,
) -> None:
    """Announcements and grants wake a rank that may be waiting for them.

    They do not wake a rank that trains, because it reads its page at the end of its step.
    """
    await begin(place)
    place.stand_at(2, standing)
    before = place.line.sent.count(PageChanged())
    # disable grants, so that only announcements can wake the rank
    monkeypatch.setattr(place.lines.slots, "grant_if_due", lambda _: None)
    for step, state in enumerate(states, start=3):
        place.lines.apply_announcement(
            structs.replace(announcement(NONE, step), **{of + "_step": Step(9), of + "_state": state})
        )
    assert place.line.sent.count(PageChanged()) - before == words


async def test_a_rank_that_stands_is_woken_when_its_slot_is_granted(place: Place) -> None:
    await begin(place)
    for step, standing in ((3, RankStanding.MOVING), (4, RankStanding.CLOSING)):
        place.stand_at(step - 1, standing)
        before = place.line.sent.count(PageChanged())
        await granted(place, step)
        assert place.line.sent.count(PageChanged()) - before == (0 if standing is RankStanding.MOVING else 2), (
            "heard of, and granted"
        )


async def test_a_step_heard_of_too_late_is(place: Place) -> None:
    await begin(place)
    place.propose(2)
    await asyncio.sleep(0)
    place.stand_at(3)
    place.say_late(2)
    told = place.shard.round()
    assert (told.vote, told.is_late, told.reason) == (Vote.ABANDON, True, "late")
    await place.lines.close()


async def test_a_rank_that_gives_up_step_after_step_says_why_until_one_is_kept(place: Place) -> None:
    await begin(place)
    for step in (2, 3, 4):
        place.propose(step)
        place.lines.message(RANK, Abandoned(generation=PLAN.generation, step=Step(step), reason=f"no step {step}"))
        assert place.shard.trouble == ("no step 4" if step == 4 else "")
    place.shard.apply_announcement(announcement(5, 6))
    assert place.shard.trouble == ""
    await place.lines.close()


@pytest.mark.parametrize("cause", list(UnkeptCause))
async def test_the_owner_reports_why_steps_are_not_kept(place: Place, cause: UnkeptCause) -> None:
    await begin(place)
    lasts, reported = [], [place.shard.reported]
    for step in (2, 3, 4):
        place.propose(step)
        message = Abandoned(generation=PLAN.generation, step=Step(step), reason="x", cause=cause)
        place.lines.message(RANK, message)
        protection = place.shard.protection((NodeId("i-own"),))
        assert protection.unkept is cause
        lasts.append(protection.lasts)
        reported.append(place.shard.reported)
    # A capture can fail once. A state that no restart could restore, and too little memory, also prevent later steps.
    expected = {UnkeptCause.STATE: 3, UnkeptCause.MEMORY: 3, UnkeptCause.CAPTURE: 1}.get(cause, 0)
    assert lasts.count(True) == expected
    assert lasts == sorted(lasts)
    if expected:
        assert reported[-expected] != reported[-expected - 1], "the agent reports a lasting cause immediately"
    place.shard.apply_announcement(announcement(5, 6))
    protection = place.shard.protection((NodeId("i-own"),))
    assert (protection.unkept, protection.lasts) == (None, False)
    await place.lines.close()


async def test_lateness_alone_is_no_trouble(place: Place) -> None:
    await begin(place)
    for step in (2, 3, 4, 5):
        place.propose(step)
        place.say_late(step)
    assert place.shard.trouble == ""
    await place.lines.close()


def captured(step: int, slot: int, payload_bytes: int = 4096) -> Captured:
    return Captured(
        generation=PLAN.generation,
        step=Step(step),
        slot=slot,
        layout_hash=LAYOUT,
        payload_bytes=payload_bytes,
        index_offset=payload_bytes - 96,
        index_bytes=96,
        seconds=0.25,
    )


FOUR_CHUNKS = 4 * slot.CHUNK_BYTES


async def written(place: Place, step: int) -> tuple[int, list[bytes]]:
    """Write a payload of four chunks into the granted slot. Return the slot and the digests of the chunks."""
    place.capacity_bytes, place.store.memory_bytes = FOUR_CHUNKS, 4 * FOUR_CHUNKS
    await begin(place)
    granted_slot = await granted(place, step)
    chunks = [bytes([number]) * slot.CHUNK_BYTES for number in range(4)]
    with place.store.shards[RANK][granted_slot].file.payload(0, FOUR_CHUNKS) as payload:
        payload[:] = b"".join(chunks)
    return granted_slot, [slot.digest(chunk) for chunk in chunks]


async def test_digests_of_a_ranks_copier_stand_for_the_agents_own(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    number, digests = await written(place, 3)
    monkeypatch.setattr(store, "_digest_chunks", None)  # if the agent computed digests itself, this call would fail
    place.lines.message(RANK, structs.replace(captured(3, number, FOUR_CHUNKS), chunk_digests=b"".join(digests)))
    place.lines.message(RANK, structs.replace(captured(3, number, FOUR_CHUNKS), chunk_digests=b"".join(digests)))
    await done(place)
    assert place.shard.core.vote is Vote.ACKED
    assert place.store.shards[RANK][number].file.header.payload_digest == slot.shard_digest(
        b"".join(digests), FOUR_CHUNKS
    )
    await place.lines.close()


async def test_the_owner_reports_the_digest_of_each_newly_sealed_state(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_slots, "state_count", lambda _: 2)
    await begin(place)
    states = []
    for step, content in ((3, b"a"), (4, b"b"), (5, b"a")):
        number = await granted(place, step)
        with place.store.shards[RANK][number].file.payload(0, 4096) as payload:
            payload[:] = content * 4000 + bytes([step]) * 96
        place.lines.message(RANK, captured(step, number))
        await done(place)
        states.append((step, slot.state_digest(b"", content * 4000)))
        assert place.shard.protection((NodeId("i-own"),)).states == tuple(states[-2:])
    assert states[0][1] == states[2][1] != states[1][1]
    await place.lines.close()


@pytest.mark.parametrize("spoil", [lambda own: own[:3], lambda own: [*own, own[0]], lambda _: [b"x"]])
async def test_digests_that_cannot_be_the_slots_are_the_agents_own(
    place: Place, spoil: Callable[[list[bytes]], list[bytes]]
) -> None:
    """A rank reports digests of too few or too many chunks, or bytes that are no digest.

    The agent computes the digests itself.
    """
    number, digests = await written(place, 3)
    place.lines.message(RANK, structs.replace(captured(3, number, FOUR_CHUNKS), chunk_digests=b"".join(spoil(digests))))
    await done(place)
    assert place.shard.core.vote is Vote.ACKED
    assert place.store.shards[RANK][number].file.header.payload_digest == slot.shard_digest(
        b"".join(digests), FOUR_CHUNKS
    )
    await place.lines.close()


async def test_what_a_rank_wrote_into_another_file_is_not_sealed_as_its_step(place: Place) -> None:
    number, digests = await written(place, 3)
    place.lines.message(
        RANK, structs.replace(captured(3, number, FOUR_CHUNKS), chunk_digests=b"".join([*digests[:3], digests[0]]))
    )
    assert place.shard.core.vote is Vote.ABANDON
    assert "replaced during the capture" in place.shard.core.reason
    assert place.store.shards[RANK][number].file.header.state is not SlotState.SEALED
    await place.lines.close()


async def test_what_a_rank_has_digested_wrongly_restores_nobody(place: Place) -> None:
    number, digests = await written(place, 3)
    place.lines.message(
        RANK, structs.replace(captured(3, number, FOUR_CHUNKS), chunk_digests=b"".join([digests[1], *digests[1:]]))
    )
    await done(place)
    assert not await place.store.verify(place.store.shards[RANK][number])
    assert place.shard.slot(Step(3)) is None
    await place.lines.close()


async def test_a_copy_that_was_told_of_on_its_way_is_digested_here(place: Place) -> None:
    number, digests = await written(place, 3)
    sizes = {"payload_bytes": FOUR_CHUNKS, "index_offset": FOUR_CHUNKS - 96}
    place.lines.message(RANK, capturing(3, number, FOUR_CHUNKS // 2, **sizes))
    slot_digests = place.store.shards[RANK][number].digests
    assert slot_digests is not None
    while slot_digests.known_count < 2:
        await slot_digests.changed.wait(slot_digests.changed.version, 5.0)
    place.lines.message(RANK, structs.replace(captured(3, number, FOUR_CHUNKS), chunk_digests=b"".join(digests)))
    await done(place)
    assert place.store.shards[RANK][number].file.header.payload_digest == slot.shard_digest(
        b"".join(digests), FOUR_CHUNKS
    )
    await place.lines.close()


async def granted(place: Place, step: int) -> int:
    """Propose a step, wait for its grant, and return the slot."""
    place.propose(step)
    while place.shard.granted_slot == NONE:
        await place.lines.background.next_end()
    return place.shard.granted_slot


async def done(place: Place) -> None:
    """Wait until all background work of earlier messages has ended."""
    await place.lines.background.idle()


async def test_a_step_that_is_proposed_again_finds_what_its_rank_captured_for_the_first_time(place: Place) -> None:
    """A rank reports a capture after the coordinator has withdrawn the proposal of the step.

    When the coordinator proposes the step again, the capture counts.
    """
    await begin(place)
    slot = await granted(place, 3)
    place.propose(NONE)
    place.lines.message(RANK, captured(3, slot))
    await place.shard.changed.wait(place.shard.changed.version, 5.0)
    assert place.shard.core.sealed == {3}
    place.lines.message(RANK, captured(3, slot))
    assert place.snapshot_seconds == [0.25], "said twice, counted once"
    place.propose(3)
    assert place.shard.core.vote is Vote.ACKED
    await place.lines.close()


async def test_a_step_that_is_proposed_again_is_granted_the_slot_that_its_rank_wrote(place: Place) -> None:
    """The coordinator withdraws a proposal and then proposes the same step again. The agent grants the same slot.

    Only then does the rank's report of its first capture arrive. The capture counts.
    """
    await begin(place)
    slot = await granted(place, 3)
    place.propose(NONE)
    assert await granted(place, 3) == slot
    place.lines.message(RANK, captured(3, slot))
    await place.shard.changed.wait(place.shard.changed.version, 5.0)
    assert place.shard.core.vote is Vote.ACKED
    await place.lines.close()


async def test_a_step_that_is_proposed_again_while_it_is_being_sealed_is_sealed(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    await begin(place)
    slot = await granted(place, 3)
    seal, asked, may_go_on = place.store._digest, asyncio.Event(), asyncio.Event()

    async def slow(*arguments: Any) -> bytes:
        asked.set()
        await may_go_on.wait()
        return await seal(*arguments)

    monkeypatch.setattr(place.store, "_digest", slow)
    place.propose(NONE)
    place.lines.message(RANK, captured(3, slot))
    await asked.wait()
    place.propose(3)
    await asyncio.sleep(0)
    may_go_on.set()
    await place.shard.changed.wait(place.shard.changed.version, 5.0)
    assert place.shard.core.vote is Vote.ACKED
    await place.lines.close()


@pytest.mark.parametrize("slot", [-1, 0, 1, 7])
async def test_what_was_captured_into_a_slot_that_is_granted_for_another_step_has_no_effect(
    place: Place, slot: int
) -> None:
    await begin(place)
    await granted(place, 3)
    place.lines.message(RANK, captured(2, slot))
    await done(place)
    await place.lines.close()
    assert place.shard.core.sealed == frozenset()


async def test_what_names_no_slot_has_no_effect_before_one_is_granted(place: Place) -> None:
    await begin(place)
    place.shard.apply_announcement(announcement(NONE, 3))
    place.lines.message(RANK, captured(3, NONE))
    await done(place)
    await place.lines.close()
    assert place.shard.core.sealed == frozenset()


def capturing(step: int, slot: int, final_bytes: int = 0, **other: int) -> Capturing:
    fields = {"payload_bytes": 4096, "index_offset": 4000, "index_bytes": 96, **other}
    return Capturing(
        generation=PLAN.generation, step=Step(step), slot=slot, layout_hash=LAYOUT, final_bytes=final_bytes, **fields
    )


async def test_what_is_being_captured_can_be_sent_and_is_sealed_when_it_is_captured(place: Place) -> None:
    await begin(place)
    slot = await granted(place, 3)
    assert place.shard.source(Step(3)) is None
    place.lines.message(RANK, capturing(3, slot, 100))
    assert place.shard.core.capturing == 3
    assert place.shard.source(Step(3)) is place.store.shards[RANK][slot]
    assert place.shard.slot(Step(3)) is None
    place.lines.message(RANK, captured(3, slot))
    place.lines.message(RANK, captured(3, slot))
    await done(place)
    assert (place.shard.core.sealed, place.shard.core.capturing, place.shard.core.vote) == ({3}, NONE, Vote.ACKED)
    place.lines.message(RANK, captured(3, slot))  # the message is repeated, as a rank does after it lost its connection
    assert place.lines.background.is_idle
    await place.lines.close()


async def test_a_capture_that_is_given_up_is_sent_no_further_and_never_sealed(place: Place) -> None:
    await begin(place)
    slot = await granted(place, 3)
    place.lines.message(RANK, capturing(3, slot, 4096))
    place.lines.message(
        RANK, Abandoned(generation=PLAN.generation, step=Step(3), reason="w changed outside an optimizer step")
    )
    assert (place.shard.core.vote, place.shard.core.capturing) == (Vote.ABANDON, NONE)
    assert place.shard.source(Step(3)) is None
    await done(place)
    assert place.shard.core.sealed == frozenset()
    await place.lines.close()


@pytest.mark.parametrize(
    "said",
    [
        lambda slot: capturing(2, slot, 4096),
        lambda slot: capturing(3, 1 - slot, 4096),
        lambda slot: capturing(3, NONE, 4096),
        lambda slot: capturing(3, 7, 4096),
        lambda slot: capturing(3, slot, 4097),
        lambda slot: capturing(3, slot, -1),
    ],
    ids=[
        "another step",
        "another slot",
        "no slot",
        "a slot that is none",
        "more than the payload",
        "less than nothing",
    ],
)
async def test_word_of_a_capture_that_nobody_asked_for_has_no_effect(
    place: Place, said: Callable[[int], Capturing]
) -> None:
    await begin(place)
    slot = await granted(place, 3)
    place.lines.message(RANK, said(slot))
    assert place.shard.core.capturing == NONE
    assert all(each.digests is None for each in place.store.shards[RANK])
    await place.lines.close()


@pytest.mark.parametrize(
    "sizes",
    [{"payload_bytes": 1 << 20}, {"payload_bytes": 0}, {"index_offset": -1}, {"index_bytes": 97}, {"index_bytes": -1}],
    ids=str,
)
async def test_a_payload_that_cannot_be_is_given_up(place: Place, sizes: dict[str, int]) -> None:
    await begin(place)
    slot = await granted(place, 3)
    place.lines.message(RANK, capturing(3, slot, **sizes))
    assert (place.shard.core.vote, place.shard.core.capturing) == (Vote.ABANDON, NONE)
    await place.lines.close()


async def test_a_step_that_is_proposed_again_in_mid_capture_is_followed_anew(place: Place) -> None:
    await begin(place)
    slot = await granted(place, 3)
    place.lines.message(RANK, capturing(3, slot, 4096))
    before = place.store.shards[RANK][slot].digests
    place.propose(NONE)
    assert await granted(place, 3) == slot
    place.lines.message(RANK, capturing(3, slot, 4096))
    after = place.store.shards[RANK][slot].digests
    assert after is not None
    assert after is not before
    place.lines.message(RANK, captured(3, slot))
    await done(place)
    assert place.shard.core.vote is Vote.ACKED
    await place.lines.close()


async def test_a_capture_that_goes_on_after_its_step_was_dropped_is_nothing_when_its_slot_is_granted_for_the_next(
    place: Place,
) -> None:
    await begin(place)
    slot = await granted(place, 3)
    place.lines.message(RANK, capturing(3, slot, 2000))
    place.propose(4)
    other = await granted(place, 4)
    place.lines.message(RANK, capturing(3, slot, 3000))
    assert place.shard.core.capturing == NONE
    place.lines.message(RANK, capturing(4, other, 3000))
    assert place.shard.core.capturing == 4
    await place.lines.close()


def pass_boundary(
    place: Place, step: int, at: float, blocked: float = 0.0, rank: Rank = RANK, first_passed: float = 0.0
) -> None:
    with (
        mmap.mmap(place.store.files.descriptor(place.page.name), RANK_WORD_BYTES) as page,
        memoryview(page) as view,
    ):
        write_rank_half(
            view, RankHalf(PLAN.generation, boundary=step, phase=Phase.TRAIN, first_passed=int(first_passed * 1e6))
        )
    place.lines.message(
        rank, Boundary(generation=PLAN.generation, boundary=Step(step), at_seconds=at, blocked_seconds=blocked)
    )


async def test_the_first_step_beyond_the_base_keeps_its_stamp_through_a_restart_of_the_agent(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    await begin(place)
    monkeypatch.setattr(owned_shard, "monotonic", lambda: 100.0)
    pass_boundary(place, 0, 95.0)
    place.shard.note_first(place.page.rank())
    assert place.shard.first_passed_at == 0.0
    pass_boundary(place, 1, 97.0, first_passed=97.0)
    place.shard.note_first(place.page.rank())
    pass_boundary(place, 2, 99.0, first_passed=97.0)
    place.shard.note_first(place.page.rank())
    assert (place.shard.first_passed_at, place.shard.passed) == (place.unix - 3.0, (2, place.unix - 1.0))
    again = OwnedShard(
        rank=RANK,
        generation=PLAN.generation,
        core=Shard.begin(Step(0), ()),
        base=None,
        store=place.store,
        page=place.page,
        now=lambda: place.unix,
        on_change=lambda: None,
    )
    again.pass_boundary(Step(3), 100.0)
    again.note_first(place.page.rank())
    assert again.first_passed_at == place.unix - 3.0, (
        "neither lost nor taken for the step that this agent hears of first"
    )
    await place.lines.close()


async def test_what_iterations_tell_of_saving_is_logged_beside_what_the_script_logs(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    await begin(place)
    clock = [100.0]
    monkeypatch.setattr(owned_shard, "monotonic", lambda: clock[0])
    pass_boundary(place, 2, 100.0)
    # no metric point yet: an iteration is measured from the end of the previous one, which is unknown here
    assert place.outbox.due(0.0) is None
    slot = await granted(place, 3)
    pass_boundary(place, 3, 102.0, blocked=0.25)
    # less than `PERIOD_SECONDS` have passed since the last point; step 3 is still being transferred
    pass_boundary(place, 4, 102.5)
    place.lines.message(RANK, captured(3, slot))
    clock[0] = 102.75
    await done(place)
    assert place.shard.core.vote is Vote.ACKED
    place.sent_bytes, place.usage = 7 * 1_000, NodeUsage(gpu_percent=55.0)
    pass_boundary(place, 5, 102.0 + PERIOD_SECONDS + 2)
    batch = place.outbox.due(0.0)
    assert batch is not None
    assert batch.run == PLAN.run
    assert [(point.generation, point.step, point.at_seconds) for point in batch.points] == [
        (PLAN.generation, step, place.unix) for step in (3, 5)
    ]
    assert place.lines.measurements.newest == batch.points[1].values
    assert batch.points[0].values == {"everstep/step_seconds": 2.0, "everstep/snapshot_blocked_seconds": 0.25}
    assert batch.points[1].values == {
        "everstep/step_seconds": 3.5,
        "everstep/snapshot_blocked_seconds": 0.0,
        "everstep/replicate_seconds": 0.75,
        "everstep/gpu_percent": 55.0,
        "everstep/replica_bytes_per_second": 1_000.0,
    }
    await place.lines.close()


async def test_an_iteration_is_none_without_a_snapshot_while_other_shards_of_the_job_are_sent(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    await begin(place)
    seen: list[bool] = []
    monkeypatch.setattr(place.traffic, "boundary", lambda *_, is_sending: seen.append(is_sending))
    pass_boundary(place, 2, 100.0)
    slot = await granted(place, 3)
    pass_boundary(place, 3, 101.0)
    place.lines.message(RANK, captured(3, slot))
    await done(place)
    assert place.shard.core.vote is Vote.ACKED
    pass_boundary(place, 4, 102.0)
    place.lines.apply_announcement(
        Announcement(generation=PLAN.generation, term=1, sequence=9, committed=Step(3), proposed=Step(9))
    )
    pass_boundary(place, 5, 103.0)
    assert seen == [False, False, True, False]
    await place.lines.close()


async def test_every_node_tells_what_it_measured_last_and_only_that_of_rank_0_keeps_it(tmp_path: Path) -> None:
    place = Place(tmp_path / "slots", rank=Rank(1))
    assert place.lines.measurements.newest == {}
    for step, at in ((1, 100.0), (2, 200.0)):
        pass_boundary(place, step, at, rank=Rank(1))
    assert place.lines.measurements.newest == {"everstep/step_seconds": 100.0, "everstep/snapshot_blocked_seconds": 0.0}
    pass_boundary(place, 3, 200.5, rank=Rank(1))  # less than `PERIOD_SECONDS` have passed since the last point
    assert place.lines.measurements.newest["everstep/step_seconds"] == 100.0
    logged = LogRecord(step=Step(3), values={"loss": 2.0}, at_seconds=1.0)
    place.lines.message(Rank(1), Logged(generation=PLAN.generation, records=(logged,)))
    assert place.lines.newest_values.report() == (RankValues(rank=Rank(1), values={"loss": 2.0}),)
    assert place.outbox.due(0.0) is None
    await place.lines.close()
    place.page.close(unlink=True)
    place.store.close()


@pytest.mark.parametrize("place", [(PEER,)], indirect=True)
async def test_who_holds_which_step_verified_and_since_when(place: Place) -> None:
    assert place.shard.verified == {}
    for step in (3, 4):
        place.shard.seal(Step(step))
    content = place.shard.content(Step(3))
    place.unix += 5
    place.shard.acknowledge(PEER, content)
    assert place.shard.verified == {None: (4, place.unix - 5), PEER: (3, place.unix)}
    place.unix += 5
    place.shard.acknowledge(PEER, content)  # the holder repeats its acknowledgement
    # an acknowledgement of another generation does not count
    place.shard.acknowledge(PEER, Content(Generation(PLAN.generation + 1), Step(9)))
    assert place.shard.verified[PEER] == (3, place.unix - 5)
    # the holder's inventory at its next connection shows that it has lost all its slots
    place.shard.inventory(PEER, ())
    assert place.shard.verified[PEER] == (NONE, place.unix)


async def test_a_boundary_that_its_rank_has_stamped_is_dated_in_unix_time(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    await begin(place)
    monkeypatch.setattr(owned_shard, "monotonic", lambda: 105.0)
    pass_boundary(place, 2, 102.5)
    assert place.shard.passed == (2, place.unix - 2.5)
    place.lines.message(RANK, Boundary(generation=PLAN.generation, boundary=Step(3)))
    assert place.shard.passed == (2, place.unix - 2.5), "it was not passed just now"
    await place.lines.close()


async def test_the_page_and_the_report_of_a_rank_contain_the_rehearsal(place: Place) -> None:
    def tell(state: StopState, steps: int = 2) -> None:
        place.lines.apply_announcement(
            structs.replace(announcement(NONE, 3), rehearsal_step=Step(4), rehearsal_state=state, rehearsal_steps=steps)
        )

    await begin(place)
    first = place.shard.round()
    assert (first.rehearsal_step, first.rehearsal_echo, first.heard_rehearsal, first.confirmed_rehearsal) == (
        *(NONE, 0),
        *(NONE, NONE),
    )
    tell(StopState.ANNOUNCED)
    half = RankHalf(PLAN.generation, boundary=2, rehearsal_step=4, rehearsal_echo=ECHO_YES)
    place.stand(half)
    agent = place.store.page(RANK, PLAN.generation).agent
    assert (agent.rehearsal, agent.rehearsal_state, agent.rehearsal_steps) == (4, StopState.ANNOUNCED, 2)
    told = place.shard.round()
    assert (told.rehearsal_step, told.rehearsal_echo, told.heard_rehearsal, told.confirmed_rehearsal) == (
        *(4, ECHO_YES),
        *(4, NONE),
    )
    tell(StopState.CONFIRMED, steps=0)  # by a coordinator whose agent restarted
    assert place.shard.round().confirmed_rehearsal == 4
    assert place.page.agent.rehearsal_steps == 2
    place.shard.seal(Step(3))  # no announcement: the fields keep their values
    assert (place.page.agent.rehearsal, place.page.agent.rehearsal_state) == (4, StopState.CONFIRMED)
    tell(StopState.NONE)
    assert (place.shard.round().heard_rehearsal, place.shard.round().confirmed_rehearsal) == (4, NONE)
    await place.lines.close()


@pytest.mark.parametrize("is_granted", [True, False], ids=["slot before the rehearsal", "slot after the rehearsal"])
async def test_a_rank_that_returns_from_a_rehearsal_keeps_its_committed_step_and_captures_the_next(
    place: Place, is_granted: bool
) -> None:
    """A rank rehearses after step 4: it closes its connection, connects again with the same pid, and requests slots.

    The slot of the committed step 3 stays sealed. The slot of step 6 is granted before, or when the rank is back.
    """
    await begin(place)
    number = await granted(place, 3)
    place.lines.message(RANK, captured(3, number))
    await done(place)
    place.kept = (place.shard.content(Step(3)),)
    sealed = place.shard.slot(Step(3))
    place.stand_at(4)
    confirmed = structs.replace(announcement(3, NONE), rehearsal_step=Step(4), rehearsal_state=StopState.CONFIRMED)
    place.lines.apply_announcement(confirmed)
    if is_granted:
        place.lines.apply_announcement(structs.replace(confirmed, proposed=Step(6)))
        await done(place)
    paths = [message.paths for message in place.line.sent if isinstance(message, SlotsGranted)]
    place.stand(RankHalf(PLAN.generation, boundary=4, phase=Phase.REHEARSE, limit=60))
    place.lines.lost(RANK, place.line)  # type: ignore[arg-type]
    place.line = Line()
    if not is_granted:
        place.lines.apply_announcement(structs.replace(confirmed, proposed=Step(6)))
        await done(place)

    assert place.lines.hello(HELLO, place.line)  # type: ignore[arg-type]
    (welcome,) = place.line.sent
    assert isinstance(welcome, Welcome)
    assert (welcome.base_step, welcome.word_path) == (0, place.page.name)
    page = RankPage(welcome.word_path, place.store.files, generation=PLAN.generation).agent
    assert (page.committed, page.rehearsal, page.rehearsal_state) == (3, 4, StopState.CONFIRMED)
    await place.request()
    await done(place)
    assert [message.paths for message in place.line.sent if isinstance(message, SlotsGranted)] == paths[-1:]
    place.stand_at(6)
    assert place.shard.granted_slot not in (number, NONE)
    place.lines.message(RANK, captured(6, place.shard.granted_slot))
    await done(place)
    assert (place.shard.core.proposed, place.shard.core.vote) == (6, Vote.ACKED)
    assert place.shard.slot(Step(3)) is sealed is not None
    assert place.lines.faults.present == ()
    await place.lines.close()


@pytest.mark.parametrize("is_captured", [True, False])
async def test_a_step_that_a_rank_left_unanswered_before_its_rehearsal_is_answered_after_it(
    place: Place, is_captured: bool
) -> None:
    """Step 4 is proposed when the rank rehearses after step 4. The rank captures it later, or reports it as late."""
    await begin(place)
    place.stand_at(3)
    number = await granted(place, 4)
    place.stand_at(4)
    place.lines.lost(RANK, place.line)  # type: ignore[arg-type]
    place.line = Line()
    assert place.lines.hello(HELLO, place.line)  # type: ignore[arg-type]
    await place.request()
    await done(place)
    assert (place.page.agent.proposed, place.page.agent.slot) == (4, number)
    if is_captured:
        place.lines.message(RANK, captured(4, number))
    else:
        place.say_late(4)
    await done(place)
    assert place.shard.core.vote is (Vote.ACKED if is_captured else Vote.ABANDON)
    assert place.shard.round().is_late is not is_captured
    await place.lines.close()


@pytest.mark.parametrize("place", [(PEER,)], indirect=True)
@pytest.mark.parametrize("is_sealed", [True, False], ids=["sealed", "being sealed"])
async def test_a_rank_that_has_forgotten_its_capture_does_not_write_into_the_slot_again(
    place: Place, is_sealed: bool
) -> None:
    """A rank captures step 4, rehearses after it, and returns before the holder has acknowledged the step.

    The rank then finds no slot for step 4, and reports step 4 as late after its next step. The capture counts.
    """
    place.shard.drop(PEER)  # the peer creates its slots later
    await begin(place)
    place.shard.answer(PEER)
    place.stand_at(3)
    number = await granted(place, 4)
    place.stand_at(4)
    place.lines.message(RANK, captured(4, number))
    if is_sealed:
        await done(place)
    place.lines.lost(RANK, place.line)  # type: ignore[arg-type]
    place.line = Line()
    assert place.lines.hello(HELLO, place.line)  # type: ignore[arg-type]
    assert (place.page.agent.proposed, place.page.agent.slot) == (4, NONE)
    await place.request()
    await done(place)
    assert place.page.agent.slot == NONE
    place.say_late(4)
    assert place.shard.core.vote is Vote.NONE
    place.shard.acknowledge(PEER, place.shard.content(Step(4)))
    assert (place.shard.core.vote, place.shard.slot(Step(4)) is not None) == (Vote.ACKED, True)
    await place.lines.close()


async def test_the_old_connection_of_a_rank_may_end_after_the_new_one_began(place: Place) -> None:
    await begin(place)
    old, place.line = place.line, Line()
    assert place.lines.hello(HELLO, place.line)  # type: ignore[arg-type]
    place.lines.lost(RANK, old)  # type: ignore[arg-type]
    await place.request()
    assert isinstance(place.line.sent[-1], SlotsGranted)
    await place.lines.close()


DIFFERENCE = ReplayDifference(step=Step(3), kind="tensor", source="script", names=("w",) * MAX_REHEARSED_NAMES)
LONG = "x" * (MAX_REHEARSED_CHARACTERS + 1)
REHEARSED = Rehearsed(
    generation=PLAN.generation,
    step=Step(2),
    steps=2,
    seconds=1.5,
    verdict=RehearsalVerdict.DIFFERS,
    difference=DIFFERENCE,
    message=LONG[1:],
)


async def test_the_newest_rehearsal_of_a_rank_is_reported_at_once(place: Place) -> None:
    await begin(place)
    place.reports.clear()
    for _ in range(2):  # a rank repeats its report when it connects again
        place.lines.message(RANK, REHEARSED)
        assert place.lines.rehearsed == {RANK: REHEARSED}
        assert len(place.reports) == 1
    later = structs.replace(REHEARSED, step=Step(9), verdict=RehearsalVerdict.PROVEN, difference=None)
    place.lines.message(RANK, structs.replace(later, generation=Generation(PLAN.generation + 1)))
    assert place.lines.rehearsed == {RANK: REHEARSED}
    place.lines.message(RANK, later)
    assert (place.lines.rehearsed, len(place.reports)) == ({RANK: later}, 2)
    await place.lines.close()


async def test_options_that_a_restore_replaced_are_reported_at_once(place: Place) -> None:
    await begin(place)
    place.reports.clear()
    options = (KeptOption(name="optimizer.lr", script="0.1", kept="0.2"),)
    place.lines.message(RANK, OptionsKept(generation=PLAN.generation, options=options))
    assert (place.lines.kept_options, len(place.reports)) == ({RANK: options}, 1)
    place.lines.message(RANK, OptionsKept(generation=Generation(PLAN.generation + 1), options=()))
    assert place.lines.kept_options == {RANK: options}
    await place.lines.close()


async def test_only_rank_0_reports_options(place: Place) -> None:
    other = Rank(RANK + 1)
    place.lines.shards = {**place.lines.shards, other: place.lines.shards[RANK]}
    place.lines.message(other, OptionsKept(generation=PLAN.generation, options=()))
    assert place.lines.kept_options == {}
    await place.lines.close()
