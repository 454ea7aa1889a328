"""Other processes use a node's memory.

The job continues, and no later generation waits for this node.
"""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable

import pytest

import worker.shm.store
from everstep.protocol.agent_messages import Load, MemberPhase, MemberReport, Start
from everstep.protocol.ids import Generation
from everstep.protocol.slot import SlotHeader
from tests.integration.worker.agent.fleet import JOB, KEY_BYTES, PATIENCE_SECONDS, RUN, Fleet, until
from worker.shm.held_files import HeldFiles
from worker.shm.rank_page import RankPage
from worker.shm.slot_file import SlotFile

pytestmark = pytest.mark.integration

CROWDED = 1
"""Index of the node that has no memory."""


@pytest.fixture
def full(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Return an event. While it is set, the node `CROWDED` has no room for a slot."""
    is_full = asyncio.Event()
    create = SlotFile.create

    def created(name: str, files: HeldFiles, header: SlotHeader, cancelled: threading.Event) -> SlotFile:
        if is_full.is_set() and files is fleet.nodes[CROWDED].agent.files:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return create(name, files, header, cancelled)

    monkeypatch.setattr(SlotFile, "create", created)
    return is_full


def member_of(fleet: Fleet, number: int) -> MemberReport:
    member = fleet.control.member(fleet.nodes[number].id)
    assert member is not None
    return member


def reason_of(fleet: Fleet, number: int) -> str:
    return " ".join(shard.reason for shard in member_of(fleet, number).protection)


async def test_ranks_train_without_slots_and_have_them_when_there_is_room(fleet: Fleet, full: asyncio.Event) -> None:
    full.set()
    await fleet.prepare()
    await fleet.load()
    for node in fleet.nodes:
        await fleet.send(node, Start(job=JOB, run=RUN, generation=Generation(fleet.generation)))
    await until(
        "ranks", lambda: fleet.members(MemberPhase.RUNNING) and all(rank._page is not None for rank in fleet.ranks)
    )
    await steps_until(
        fleet,
        "the reason",
        lambda: reason_of(fleet, CROWDED).startswith("Protection waits for memory on its node: slots need "),
    )
    assert "other processes use the memory" in reason_of(fleet, CROWDED)
    assert fleet.ranks[CROWDED].slots is None
    assert [member_of(fleet, number).faults for number in range(3)] == [()] * 3, (
        "no fault: a new generation is not what it needs"
    )
    full.clear()
    await steps_until(fleet, "slots", lambda: fleet.ranks[CROWDED].slots is not None and fleet.is_expected())
    await fleet.train(fleet.ranks[0].boundary + 3)
    await until("the next report", lambda: reason_of(fleet, CROWDED) == "")


async def steps_until(fleet: Fleet, what: str, arrived: Callable[[], object]) -> None:
    """Make a step whenever an agent reports, until a condition is true. Steps need not be captured."""
    heard = fleet.control.heard
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not arrived():
                version = heard.version
                for rank in fleet.ranks:
                    rank.step()
                await heard.wait(version)
    except TimeoutError:
        raise AssertionError(f"waited {PATIENCE_SECONDS} s for {what}") from None


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (
            OSError(errno.ENOMEM, "Cannot allocate memory"),
            "memory_full",
            "the ranks' pages cannot be created: Cannot allocate memory",
        ),
        (LookupError("a bug"), "agent_error", "LookupError('a bug')"),
    ],
    ids=["no memory", "a bug"],
)
async def test_a_node_that_cannot_load_says_so(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, error: Exception, code: str, words: str
) -> None:
    def page(name: str, files: HeldFiles, *, generation: int) -> RankPage:
        if files is fleet.nodes[CROWDED].agent.files:
            raise error
        return RankPage(name, files, generation=generation)

    await fleet.prepare()
    with monkeypatch.context() as patched:
        patched.setattr(worker.shm.store, "RankPage", page)
        plan = fleet.make_plan()
        for node in fleet.nodes:
            await fleet.send(node, Load(plan=plan, key=bytes([1]) * KEY_BYTES))
        await until("the refusal", lambda: member_of(fleet, CROWDED).phase is MemberPhase.LOAD_FAILED)
    (fault,) = member_of(fleet, CROWDED).faults
    assert (fault.code, fault.message, fault.is_permanent) == (code, words, False)
    await fleet.launch()
    await fleet.train(3)
