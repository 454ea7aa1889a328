"""Agents report holders that do not answer, and continue to commit steps without them.

Commits wait for a holder again once it has stored the committed step. Without the coordinator, no step is committed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import pytest

from everstep.protocol.agent_messages import NodeFault, ShardProtection
from everstep.protocol.ids import NodeId, Rank
from tests.integration.worker.agent import fleet as harness
from tests.integration.worker.agent.fleet import Fleet, until
from worker.core.tree import TreeReports
from worker.replication.tcp import TcpSession
from worker.shards.owned_shard import OwnedShard

pytestmark = pytest.mark.integration

MANY_STEPS = 100


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    short = msgspec.structs.replace(
        harness.TIMEOUTS, holder_deadline_seconds=0.3, coordinator_deadline_seconds=0.5, lease_seconds=0.6
    )
    monkeypatch.setattr(harness, "TIMEOUTS", short)


def protection(fleet: Fleet, rank: int) -> ShardProtection:
    member = fleet.control.member(fleet.nodes[rank].id)
    assert member is not None
    return member.protection[0]


async def test_a_holder_that_never_answers(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    # This test needs a longer deadline, because three agents share one event loop for a hundred steps and answer late.
    monkeypatch.setattr(harness, "TIMEOUTS", msgspec.structs.replace(harness.TIMEOUTS, holder_deadline_seconds=2.0))
    await fleet.launch()
    holder = fleet.nodes[1]
    member = holder.agent.lifecycle.member
    assert member is not None
    answers = asyncio.Event()
    serve = member.receiver.replica

    async def deaf(session: TcpSession) -> None:
        await answers.wait()
        await serve(session)

    member.receiver.replica = deaf  # type: ignore[method-assign]
    await holder.agent.listener.revoke()
    holder.agent.listener.admit(member.sessions.credentials, member.serve)
    await fleet.train(MANY_STEPS)
    assert fleet.ranks[0].word.committed >= MANY_STEPS, "the owner's own C advances"
    await until("the report", lambda: protection(fleet, 0).in_view == (fleet.nodes[0].id,))
    assert protection(fleet, 0).reason.startswith(f"{holder.id} is out of view: ")
    assert protection(fleet, 1).in_view == protection(fleet, 1).holders, "the others' shards are as protected as before"
    answers.set()
    steps = fleet.ranks[0].boundary
    await until("the holder to be back", lambda: protection_after_steps(fleet, holder.id))
    assert fleet.ranks[0].boundary > steps or protection(fleet, 0).reason == ""
    await fleet.nodes[0].gone()
    fleet.nodes[0].forget()
    fleet.nodes[0].start()
    await fleet.launch()
    assert fleet.plan is not None
    assert fleet.plan.base_step >= MANY_STEPS, "the holder that came back has what was committed since"
    assert fleet.ranks[0].restored == harness.payload(Rank(0), fleet.plan.base_step)[0]


async def test_the_coordinator_cannot_be_reached(fleet: Fleet) -> None:
    await fleet.launch()
    await fleet.train(2)
    coordinator = fleet.nodes[0].agent
    member = coordinator.lifecycle.member
    assert member is not None
    assert told_of_coordinator(fleet) == [[], [], []]
    await coordinator.listener.revoke()
    await until("the reports", lambda: [len(told) for told in told_of_coordinator(fleet)] == [0, 1, 1])
    assert told_of_coordinator(fleet)[1] == ["i-1 has not reached the coordinator i-0 for 0.5 s"]
    coordinator.listener.admit(member.sessions.credentials, member.serve)
    await until("silence", lambda: told_of_coordinator(fleet) == [[], [], []])
    await fleet.train(5)


def told_of_coordinator(fleet: Fleet) -> list[list[str]]:
    members = [fleet.control.member(node.id) for node in fleet.nodes]
    return [
        [fault.message for fault in member.faults if fault.code == "coordinator_unreachable"] if member else []
        for member in members
    ]


def protection_after_steps(fleet: Fleet, holder: str) -> bool:
    """Make one step if every rank can capture it. Return whether commits wait for the holder again."""
    if fleet.is_expected():
        for rank in fleet.ranks:
            rank.step()
    return holder in protection(fleet, 0).in_view


@pytest.mark.parametrize(
    ("tell", "words"), [(OwnedShard.record_slow_link, "slow"), (OwnedShard.record_broken_connection, "hard to reach")]
)
async def test_a_holder_in_trouble_is_told_with_its_shard_and_no_longer_when_it_is_not(
    fleet: Fleet, tell: Callable[[OwnedShard, NodeId, str], None], words: str
) -> None:
    await fleet.launch()
    holder, member = fleet.nodes[1], fleet.nodes[0].agent.lifecycle.member
    assert member is not None
    tell(member.shards[Rank(0)], holder.id, "what its link does")
    await until("the report", lambda: protection(fleet, 0).reason == f"{holder.id} is {words}: what its link does")
    assert protection(fleet, 0).in_view == protection(fleet, 0).holders
    tell(member.shards[Rank(0)], holder.id, "")
    await until("the next report", lambda: protection(fleet, 0).reason == "")


@pytest.mark.parametrize("number", [0, 1], ids=["of the coordinator", "of a member"])
async def test_rounds_that_a_bug_ends_begin_again_and_are_told(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    """A bug ends the task that sends a node's reports and votes.

    The agent logs the bug and restarts the task, so commits continue.
    """
    await fleet.launch()
    await fleet.train(2)
    node = fleet.nodes[number]
    assert node.agent.lifecycle.member is not None
    rounds, bugs = node.agent.lifecycle.member.rounds, [LookupError("a bug")]
    newest = rounds.newest_reports

    def look() -> TreeReports:
        if bugs:
            raise bugs.pop()
        return newest()

    monkeypatch.setattr(rounds, "newest_reports", look)
    await fleet.train(5)
    assert bugs == []
    assert "LookupError: a bug" in caplog.text
    told = [NodeFault(code="agent_error", message="rounds ended: LookupError('a bug')", is_permanent=False)]
    await until(
        "the report", lambda: (report := fleet.control.member(node.id)) is not None and list(report.faults) == told
    )
