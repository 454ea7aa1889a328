"""Lines that ranks print: real agents upload them, forward them to live readers, and number them.

A restarted agent gives the lines the same numbers.
"""

from __future__ import annotations

import asyncio
import shutil
import threading
from pathlib import Path

import pytest

from everstep.protocol.agent_messages import (
    AgentReport,
    ExitClass,
    LogLines,
    MemberPhase,
    OutputCause,
    Release,
    SendLines,
)
from everstep.protocol.ids import Generation, NodeId, Rank
from everstep.protocol.log_chunks import LogLine, decode_chunk, parse_name, parse_tail
from everstep.protocol.plan import ObjectReference
from tests.integration.worker.agent.fleet import BUCKET, RUN, Fleet, ScriptedRank, until
from worker.errors import StoreUnavailable
from worker.logs.outputs import STILL_SECONDS
from worker.ranks.files import RankFiles, source_of
from worker.storage.object_store import StoredObject

pytestmark = pytest.mark.integration


def say(fleet: Fleet, rank: int, *lines: str) -> None:
    say_as(fleet, rank, rank, *lines)


def say_as(fleet: Fleet, index: int, rank: int, *lines: str) -> None:
    files = RankFiles(fleet.nodes[index].state_dir, RUN, Generation(fleet.generation), Rank(rank))
    files.make()
    with files.stdout.open("a") as file:
        file.writelines(f"{line}\n" for line in lines)


def stored(fleet: Fleet, rank: int, generation: int = 1) -> list[LogLine]:
    """Return the lines of a node that are stored in S3, and check that their numbers have no gap."""
    prefix, found = f"logs/gen={generation}/", []
    objects = fleet.objects.objects[BUCKET]
    names = [
        name
        for key in list(objects)
        if key.startswith(prefix) and (name := parse_name(key.removeprefix(prefix))) is not None
    ]
    for name in sorted(names):
        if name.node_id == fleet.nodes[rank].id:
            head, lines, _ = decode_chunk(objects[prefix + name.path])
            assert head is not None
            assert head.first == len(found)
            found += lines
    return found


def tails(fleet: Fleet, node_id: NodeId) -> list[list[LogLine]]:
    """Return the copies of a node's newest lines that its peers keep."""
    objects = fleet.objects.objects[BUCKET]
    found = [
        key
        for key in list(objects)
        if (name := parse_tail(key.removeprefix("logs/gen=1/"))) is not None and name.node_id == node_id
    ]
    return [decode_chunk(objects[key])[1] for key in found]


def texts(lines: list[LogLine]) -> list[str]:
    return [line.text for line in lines]


async def test_lines_are_in_the_store_while_ranks_run_and_their_end_when_they_are_gone(fleet: Fleet) -> None:
    await fleet.launch()
    for rank in range(3):
        say(fleet, rank, f"hello from {rank}")
    await until("lines", lambda: all(texts(stored(fleet, rank)) == [f"hello from {rank}"] for rank in range(3)))
    say(fleet, 1, "the last")
    await fleet.nodes[1].shim.end(Rank(1))
    await until("the end", lambda: [line.stream for line in stored(fleet, 1)] == ["stdout", "stdout", "end"])
    assert [line.stream for line in stored(fleet, 0)] == ["stdout"]
    await fleet.prepare()
    await until("all ends", lambda: all(stored(fleet, rank)[-1].stream == "end" for rank in range(3)))
    kept = [RankFiles(node.state_dir, RUN, Generation(1), Rank(rank)).stdout for rank, node in enumerate(fleet.nodes)]
    await until("room on the nodes", lambda: not any(path.exists() for path in kept))


async def test_a_restarted_agent_goes_on_with_the_same_numbers(fleet: Fleet) -> None:
    await fleet.launch()
    node = fleet.nodes[0]
    said = []
    for number in range(4):
        said += [f"line {number}", f"line {number}, again"]
        say(fleet, 0, *said[-2:])
        await node.stop()  # stop the agent while it reads or uploads lines
        node.start()
        await fleet.connected()
    await until("all lines, once", lambda: texts(stored(fleet, 0)) == said)


async def test_who_follows_is_sent_lines_and_nobody_else(fleet: Fleet) -> None:
    await fleet.launch()
    say(fleet, 0, "before")
    await until("a line", lambda: stored(fleet, 0))
    assert fleet.control.lines == []
    await fleet.send(fleet.nodes[0], SendLines(run=RUN))
    await until("what was printed before", lambda: fleet.control.lines)
    (before,) = fleet.control.lines
    assert (before.first, texts(list(before.lines))) == (0, ["before"])
    number = 0

    def is_sent() -> bool:
        nonlocal number
        number += 1
        say(fleet, 0, f"live {number}")
        return len(fleet.control.lines) > 1

    await until("a live line", is_sent)
    first: LogLines = fleet.control.lines[1]
    await until("the same in the store", lambda: len(stored(fleet, 0)) >= first.first + len(first.lines))
    assert stored(fleet, 0)[first.first : first.first + len(first.lines)] == list(first.lines)
    assert first.first > 0


class SlowStore:
    """An object store in which uploads of outputs wait until the test lets them continue."""

    def __init__(self, fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked, self.taken = threading.Event(), threading.Event()
        self.keys: list[str] = []
        put_file = fleet.objects.put_file

        def put(reference: ObjectReference, path: Path, size: int | None = None) -> StoredObject:
            if reference.key.startswith("output/"):
                self.keys.append(reference.key)
                self.asked.set()
                assert self.taken.wait(30)
            return put_file(reference, path, size)

        monkeypatch.setattr(fleet.objects, "put_file", put)


async def leave_output(fleet: Fleet) -> Path:
    """Write a file of 64 MiB as an output of rank 0, and start the next generation. Return the file's path."""
    await fleet.launch()
    files = RankFiles(fleet.nodes[0].state_dir, RUN, Generation(1), Rank(0))
    files.make()
    with (files.output_dir / "model").open("wb") as file:
        file.truncate(64 << 20)
    await fleet.prepare()
    return files.output_dir / "model"


async def test_unstored_outputs_of_an_ended_generation_are_reported_until_the_release(fleet: Fleet) -> None:
    await fleet.launch()
    node = fleet.nodes[0]
    files = RankFiles(node.state_dir, RUN, Generation(1), Rank(0))
    files.make()
    (files.output_dir / "latest").symlink_to("/etc")
    await fleet.launch()

    def reported() -> list[tuple[int | None, str]]:
        member = fleet.control.member(node.id)
        return [] if member is None else [(each.generation, each.path) for each in member.unstored]

    await until("the report", lambda: reported() == [(1, "latest")])
    await fleet.release()
    assert node.agent.lifecycle.reported_faults == ()


async def test_files_in_the_source_directory_are_stored_or_named_although_a_launch_follows_at_once(
    fleet: Fleet,
) -> None:
    await fleet.launch()
    node = fleet.nodes[0]
    (source_of(node.state_dir, RUN) / "checkpoint.pt").write_text("1")
    RankFiles(node.state_dir, RUN, Generation(1), Rank(0)).make()
    await fleet.launch()

    def reported() -> list[tuple[str, OutputCause]]:
        member = fleet.control.member(node.id)
        return [] if member is None else [(each.path, each.cause) for each in member.unstored]

    await until("the report", lambda: reported() == [("checkpoint.pt", OutputCause.NOT_KEPT)])
    assert not (source_of(node.state_dir, RUN) / "checkpoint.pt").exists()


async def test_a_node_is_released_only_after_the_control_plane_has_recorded_its_unstored_outputs(fleet: Fleet) -> None:
    await fleet.launch()
    node = fleet.nodes[0]
    files = RankFiles(node.state_dir, RUN, Generation(1), Rank(0))
    files.make()
    (files.output_dir / "latest").symlink_to("/etc")
    await fleet.send(node, Release(run=RUN, unstored_count=0))

    def reported() -> list[str]:
        member = fleet.control.member(node.id)
        return [] if member is None else [each.path for each in member.unstored]

    await until("the report", lambda: reported() == ["latest"])
    await node.agent.departure.begin(Release(run=RUN, unstored_count=0), then=lambda membership: None)
    assert node.agent.promise.run == RUN
    await fleet.send(node, Release(run=RUN, unstored_count=1))
    await until("the release", lambda: fleet.control.member(node.id) is None)


async def test_a_node_is_released_when_what_its_ranks_left_is_stored(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, node, now, look_count = SlowStore(fleet, monkeypatch), fleet.nodes[0], 0.0, 0
    node.agent.rank_outputs.poll_seconds = 0.01

    def look() -> float:
        nonlocal look_count
        look_count += 1
        return now

    node.agent.rank_outputs.monotonic = look
    output = await leave_output(fleet)
    await asyncio.to_thread(store.asked.wait, 30)
    for later in (0.0, STILL_SECONDS + 7):  # the agent extends its time limit by eight seconds for an output of 64 MiB
        now, before = later, look_count
        # send the command to release the node again, as the control plane does
        await fleet.send(node, Release(run=RUN))
        await until("two more looks", lambda before=before: look_count > before + 2)  # type: ignore[misc]
    assert (fleet.control.member(node.id) is not None, output.exists()) == (True, True), (
        "it is given to nobody else meanwhile"
    )
    store.taken.set()
    await until("the release", lambda: fleet.control.member(node.id) is None)
    assert "output/gen=1/rank=0/model" in fleet.objects.objects[BUCKET]
    await until("the end of its files", lambda: not output.exists())


async def test_outputs_that_are_given_up_are_told(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, node, now = SlowStore(fleet, monkeypatch), fleet.nodes[0], 0.0
    node.agent.rank_outputs.poll_seconds = 0.01
    node.agent.rank_outputs.monotonic = lambda: now
    output = await leave_output(fleet)
    await asyncio.to_thread(store.asked.wait, 30)
    told: list[str] = []
    report = node.agent.reports.report

    def heard() -> AgentReport:
        made = report()
        told.extend(fault.code for fault in (made.member.faults if made.member is not None else ()))
        return made

    monkeypatch.setattr(node.agent.reports, "report", heard)
    await fleet.send(node, Release(run=RUN))
    await until("the release to begin", lambda: node.agent.departure.has_begun)
    now = STILL_SECONDS + 9
    await until("the release", lambda: fleet.control.member(node.id) is None)
    assert set(told) == {"output_missing"}
    assert "before all output of its ranks is in S3" in caplog.text
    assert not output.exists()
    store.taken.set()


async def test_what_was_stored_at_the_exit_is_not_sent_again_at_the_release(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SlowStore(fleet, monkeypatch)
    store.taken.set()
    await fleet.launch()
    files = RankFiles(fleet.nodes[0].state_dir, RUN, Generation(1), Rank(0))
    files.make()
    (files.output_dir / "model").write_text("weights")
    for number, node in enumerate(fleet.nodes):
        await node.shim.end(Rank(number), ExitClass.SUCCESS)
    await until("the end", lambda: fleet.members(MemberPhase.EXITED))
    await fleet.release()
    assert store.keys == ["output/gen=1/rank=0/model"]
    assert not files.output_dir.exists()


@pytest.mark.parametrize("per_node", [1, 2])
async def test_a_lost_node_takes_no_line_of_a_committed_step_with_it(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, per_node: int
) -> None:
    """A node is lost after a commit. S3 nevertheless receives every line that the node's ranks printed before the
    committed step.

    This also holds if the node had uploaded no line, and if its holder's agent was restarted after the commit.
    """
    put_file, step = fleet.objects.put_file, ScriptedRank.step
    fleet.per_node = per_node
    lost, holder = fleet.nodes[1], fleet.nodes[2]

    def put(reference: ObjectReference, path: Path, size: int | None = None) -> StoredObject:
        if f"node={lost.id}/" in reference.key:
            raise StoreUnavailable("the store cannot be reached from here")
        return put_file(reference, path, size)

    def print_and_step(rank: ScriptedRank) -> None:
        say_as(fleet, rank.rank // per_node, rank.rank, f"rank {rank.rank} step {rank.boundary + 1}")
        step(rank)

    monkeypatch.setattr(fleet.objects, "put_file", put)
    monkeypatch.setattr(ScriptedRank, "step", print_and_step)
    await fleet.launch()
    await fleet.train(5)
    committed = min(rank.word.committed for rank in fleet.ranks)
    await lost.gone()
    shutil.rmtree(lost.state_dir)
    await holder.stop()
    holder.start()
    fleet.nodes = [fleet.nodes[0], holder]
    await fleet.prepare()
    await until("the tail", lambda: tails(fleet, lost.id))
    (lines,) = tails(fleet, lost.id)
    for rank in range(per_node, 2 * per_node):
        printed = [line.text for line in lines if line.rank == rank]
        assert printed[:committed] == [f"rank {rank} step {number}" for number in range(1, committed + 1)]
    assert len(set(texts(lines))) == len(lines)
