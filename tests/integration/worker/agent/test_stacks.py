"""A real agent reads the stacks of real rank processes on request, also of a process that a signal has stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from control_plane.core import hangs
from control_plane.core.observed.facts import Standstill
from control_plane.core.observed.jobs import Pace, Suspicion
from control_plane.core.observed.nodes import Cause
from everstep.protocol.agent_messages import RankStacks, TakeStacks
from everstep.protocol.ids import Generation, NodeId, Rank
from tests.integration.worker.agent.fleet import JOB, RUN, TIMEOUTS, Fleet, until
from worker.ranks import stacks
from worker.ranks.shim import processes
from worker.ranks.shim.messages import RankRecord

pytestmark = pytest.mark.integration
SCRIPT = """
import signal
def read_batch():
    print('up', flush=True)
    signal.pause()
def train():
    read_batch()
train()
"""


@pytest.fixture
def rank_process(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        yield process
        process.kill()


def record(process: subprocess.Popen[str], generation: int) -> RankRecord:
    found = processes.find(process.pid)
    assert found is not None
    return RankRecord(
        run=RUN,
        generation=Generation(generation),
        rank=Rank(0),
        pid=process.pid,
        start_ticks=found.start_ticks,
        started_at_seconds=0.0,
        is_warm=False,
        stdout_path="",
        stderr_path="",
    )


async def look(fleet: Fleet, number: int) -> RankStacks:
    """Request the stacks of the ranks, and wait until a report contains them."""
    node = fleet.nodes[0]
    await fleet.send(node, TakeStacks(job=JOB, run=RUN, generation=Generation(fleet.generation), number=number))

    def shown() -> tuple[RankStacks, ...]:
        member = fleet.control.member(node.id)
        return tuple(each for each in (member.stacks if member is not None else ()) if each.number == number)

    await until(f"look {number}", shown)
    return shown()[0]


async def test_a_stopped_rank_is_found_and_let_be(fleet: Fleet, rank_process: subprocess.Popen[str]) -> None:
    await fleet.launch()
    node = fleet.nodes[0]
    node.shim.records = (record(rank_process, fleet.generation),)
    first = await look(fleet, 1)
    assert (first.error, first.same_seconds, first.is_stopped) == ("", 0.0, False)
    assert first.text.startswith(
        "MainThread\n    read_batch (train.py:5)\n    train (train.py:7)\n    <module> (train.py:8)"
    )
    os.kill(rank_process.pid, signal.SIGSTOP)
    await asyncio.to_thread(os.waitpid, rank_process.pid, os.WUNTRACED)
    second = await look(fleet, 2)
    assert second.is_stopped
    assert second.text == first.text
    assert second.same_seconds > 0
    assert second.cpu_seconds <= 0.02
    assert processes.tree_usage(rank_process.pid).is_stopped, "a look lets a stopped process stopped"
    assert await look(fleet, 1 + 1) == second, "asked again, the same look is shown again"

    member = fleet.control.member(node.id)
    assert member is not None
    late = msgspec.structs.replace(member, ranks=(msgspec.structs.replace(member.ranks[0], still_seconds=1000.0),))
    suspicion = Suspicion(since=0.0, began_at=600.0, number=2, asked_at=1000.0)
    watched = hangs.watch(1000.0, {NodeId(node.id): late}, Pace(), suspicion, TIMEOUTS, has_all_reports=True)
    assert watched.faults[0].cause is Cause.HANG
    fact = watched.faults[0].evidence
    assert isinstance(fact, Standstill)
    assert fact.stuck.ranks == (0,)


async def test_a_rank_that_has_no_process_yet_is_told_so(fleet: Fleet) -> None:
    """A rank has no process yet, because its template process compiles for minutes.

    The agent reports this, and does not report a hang.
    """
    await fleet.launch()
    taken = await look(fleet, 1)
    assert "no process of it has been started yet" in taken.error
    assert taken.same_seconds == 0.0


async def test_a_look_of_another_generation_is_not_taken(fleet: Fleet, rank_process: subprocess.Popen[str]) -> None:
    await fleet.launch()
    node = fleet.nodes[0]
    node.shim.records = (record(rank_process, fleet.generation),)
    await fleet.send(node, TakeStacks(job=JOB, run=RUN, generation=Generation(fleet.generation - 1), number=7))
    assert (await look(fleet, 1)).number == 1


async def test_how_long_a_rank_stands_still_is_reported(fleet: Fleet) -> None:
    await fleet.launch()

    def phase() -> str:
        member = fleet.control.member(fleet.nodes[0].id)
        return member.ranks[0].phase if member is not None else ""

    await until("the ranks' phase", lambda: phase() == "first_step")
    for rank in fleet.ranks:
        rank.step()

    def trains() -> bool:
        member = fleet.control.member(fleet.nodes[0].id)
        return member is not None and member.ranks[0].phase == "train" and "first_step" in member.longest

    await until("a step in the report", trains)


async def test_a_process_that_is_gone_is_told_with_the_reason(rank_process: subprocess.Popen[str]) -> None:
    rank_process.kill()
    await asyncio.to_thread(rank_process.wait)
    with pytest.raises(stacks.Unreadable, match=r"No such file or directory|process"):
        await stacks.stacks_of(rank_process.pid)


async def test_a_look_has_a_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    slow = tmp_path / "py-spy"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setattr(stacks, "find_py_spy", lambda: str(slow))
    with pytest.raises(stacks.Unreadable, match=r"did not finish within 0.1 s"):
        await stacks.stacks_of(os.getpid(), limit_seconds=0.1)
    monkeypatch.setattr(stacks, "find_py_spy", lambda: None)
    with pytest.raises(stacks.Unreadable, match="not installed"):
        await stacks.stacks_of(os.getpid())


@pytest.mark.security
@pytest.mark.parametrize("stream", ["1", "2"])
async def test_a_look_reads_no_more_than_its_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stream: str
) -> None:
    endless = tmp_path / "py-spy"
    endless.write_text(f"#!/bin/sh\nexec yes >&{stream}\n")
    endless.chmod(0o755)
    monkeypatch.setattr(stacks, "find_py_spy", lambda: str(endless))
    with pytest.raises(stacks.Unreadable, match=r"py-spy wrote more than 4,194,304 bytes"):
        await stacks.stacks_of(os.getpid(), limit_seconds=60)
