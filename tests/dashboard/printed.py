"""Writes log lines of simulated ranks in the form in which agents store them.

Each node has chunks of lines. The times are invented: the lines of a launch are spread evenly from its start to its
end, and the last lines of a failed rank follow. A lost node stores neither its newest lines nor the entry that marks
the end of its log.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Final

from control_plane.db import jobs
from everstep.protocol.ids import NO_RANK, NodeId, Rank
from everstep.protocol.log_chunks import ChunkHead, ChunkName, LogLine, encode_head, encode_lines
from everstep.protocol.plan import ObjectReference
from tests.sim.world import BUCKET, World

EVERY_STEPS: Final = 10
LOST_LINES: Final = 2
"""Number of newest lines that a lost node had not stored yet."""


def print_run(world: World, name: str, last_words: Mapping[int, str]) -> None:
    """Store the logs of all launches of a job.

    Args:
        world: the simulated fleet.
        name: name of the job.
        last_words: last lines of rank 0 in each failed launch, by the number of the launch.
    """
    record = world.job(name)
    with world.database.read() as session:
        launches = {each.number: each for each in jobs.planned(session, record.run_id)}
        lineage = jobs.lineage(session, record.run_id)
    reached = {each.generation_before: each.reached_step for each in world.incidents(name)}
    ends = [each.planned_at for each in lineage[1:]] + [record.ended_at]
    # `lineage` is empty for a job that has never been launched, although `ends` then has an element.
    for entry, over_at in zip(lineage, ends, strict=False):
        if entry.started_at is None:
            continue
        launch = launches[entry.number]
        steps = reached.get(launch.number) or record.boundary
        end = (over_at or world.now) - timedelta(seconds=1)
        numbers = range(launch.plan.base_step, max(launch.plan.base_step, steps) + 1, EVERY_STEPS)
        for node in launch.plan.nodes:
            lines: list[LogLine] = []
            for rank in node.ranks:
                # Each line follows the fraction (0 to 1) of the launch's time that had passed when the rank printed it.
                said = [
                    (0.0, f"\x1b[2mrank {rank} of launch {launch.number}:\x1b[0m loading data"),
                    *(((step - numbers.start + 1) / (numbers.stop - numbers.start), _step(step)) for step in numbers),
                ]
                failure = last_words.get(launch.number, "").splitlines() if rank == 0 else []
                lines += _spread(rank, said, failure, entry.started_at, end)
            lines.sort(key=lambda line: line.at_ms)
            is_lost = node.node_id not in world.agents
            whole = lines[:-LOST_LINES] if is_lost else lines
            if over_at is not None and not is_lost:
                whole.append(LogLine(at_ms=lines[-1].at_ms, rank=NO_RANK, stream="end", text="", end=0))
            if whole:  # a lost node may have stored no line
                put_chunk(world, name, launch.number, node.node_id, 0, whole)


def put_chunk(world: World, name: str, generation: int, node_id: NodeId, first: int, lines: list[LogLine]) -> None:
    """Store a chunk of printed lines of one node. `first` is the number of the chunk's first line on the node."""
    chunk = ChunkName(node_id, first, lines[0].at_ms)
    data = encode_head(ChunkHead(first=first, positions={})) + encode_lines(lines)
    world.objects.put(_place(world, name, f"gen={generation}/{chunk.path}"), data)


def say(world: World, name: str, texts: list[str], first: int) -> None:
    """Store new lines of rank 0 for the current launch. `first` is the number of the first line on its node."""
    plan = world.plan(name)
    node = next(node for node in plan.nodes if 0 in node.ranks)
    at_ms = int(world.now.timestamp() * 1000)
    lines = [LogLine(at_ms=at_ms, rank=Rank(0), stream="stdout", text=text, end=1) for text in texts]
    put_chunk(world, name, plan.generation, node.node_id, first, lines)


def _place(world: World, name: str, path: str) -> ObjectReference:
    prefix = world.job(name).spec.log_uri.removeprefix(f"s3://{BUCKET}/")
    return ObjectReference(bucket=BUCKET, key=f"{prefix}{path}")


def _step(step: int) -> str:
    return f"step {step:5d}  loss {1.7 + 6.5 * math.exp(-step / 180):.4f}"


def _spread(
    rank: Rank, said: list[tuple[float, str]], failure: list[str], begin: datetime, end: datetime
) -> list[LogLine]:
    def at_ms(part: float) -> int:
        return int((begin + part * (end - begin)).timestamp() * 1000) + rank

    lines = [LogLine(at_ms=at_ms(part), rank=rank, stream="stdout", text=text, end=1) for part, text in said]
    return lines + [LogLine(at_ms=at_ms(1.0) + 1, rank=rank, stream="stderr", text=text, end=1) for text in failure]
