"""What ranks print, through real agents: shipped, passed on while somebody follows, and numbered the same by an agent that was restarted."""

from __future__ import annotations

import pytest

from everstep.protocol.agent_messages import LogLines, SendLines
from everstep.protocol.ids import Generation, Rank
from everstep.protocol.log_chunks import LogLine, decode_chunk, parse_name
from tests.integration.worker.agent.fleet import BUCKET, RUN, Fleet, until
from worker.rank_files import RankFiles

pytestmark = pytest.mark.integration


def say(fleet: Fleet, rank: int, *lines: str) -> None:
    files = RankFiles(fleet.nodes[rank].state_dir, RUN, Generation(fleet.generation), Rank(rank))
    files.make()
    with files.stdout.open("a") as file:
        file.writelines(f"{line}\n" for line in lines)


def stored(fleet: Fleet, rank: int, generation: int = 1) -> list[LogLine]:
    """What the store has of a node, in order; numbers go on from chunk to chunk."""
    prefix, found = f"logs/gen={generation}/", []
    objects = fleet.objects.objects[BUCKET]
    names = [name for key in objects if key.startswith(prefix) and (name := parse_name(key.removeprefix(prefix))) is not None]
    for name in sorted(names):
        if name.node_id == fleet.nodes[rank].id:
            head, lines, _ = decode_chunk(objects[prefix + name.path])
            assert head is not None
            assert head.first == len(found)
            found += lines
    return found


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
        await node.stop()  # in the middle of reading or of shipping
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
