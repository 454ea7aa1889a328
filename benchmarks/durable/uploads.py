"""Measures training while Everstep or DCP's `async_save` stores a checkpoint of the same state on the same S3 server.

One rank trains a GPT under FSDP2 on one of two cores; the other is free for the upload. The S3 server discards parts
(`part_sink`). `rank.uploading` describes the blocks of steps.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from benchmarks.data_plane.launches import tmpfs_folder
from benchmarks.durable import members
from benchmarks.durable.rank.sizes import SETTLE_STEPS, ModelSize

RANKS = 1
FLOOR, EVERSTEP, DCP = "floor", "everstep", "dcp"
SYSTEMS = (FLOOR, EVERSTEP, DCP)
STEPS, QUICK_STEPS = 24, 6
"""Steps that count per block. On a quiet machine, every upload ends within the first half."""
BYTES_PER_SECOND = 120e6
"""Bytes per second of parts over all connections, so that uploads last for several steps."""
SIZE = ModelSize(layers=2, width=640, batch=2)
QUICK_SIZE = ModelSize(layers=1, width=128)
NODE_MIB = 512
PROGRAM = "benchmarks.durable.rank.uploading"


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadBlock:
    """Steps during which one system stored one checkpoint, or none (`FLOOR`)."""

    system: str
    state_bytes: int
    """Bytes of all ranks."""
    steps: list[float]
    """Rank 0's counted steps, without the call that begins the checkpoint."""
    waits: list[float]
    """Seconds of each counted step of rank 0 in which its training thread waited for a core, a lock or an event."""
    save_seconds: float
    """Blocked time of training on the slowest rank."""
    upload_seconds: float
    """Seconds from the checkpoint's step until all parts were stored. 0 without a checkpoint."""
    cpu_seconds: float
    """CPU seconds of all nodes and ranks' child processes, from the checkpoint's step to the block's end."""

    @property
    def is_whole(self) -> bool:
        """Whether at least a third of `steps` began after the upload, enough for a comparison."""
        return self.slowed_count <= len(self.steps) * 2 // 3

    @property
    def slowed_count(self) -> int:
        """Steps that began before the upload ended."""
        return sum(begun < self.upload_seconds for begun in accumulate(self.steps[:-1], initial=self.save_seconds))

    def times(self, count: int) -> tuple[float, float]:
        """Return the seconds of the first `count` steps, and those at the later steps' mean."""
        # Within one block, because the machine's speed changes from block to block.
        return sum(self.steps[:count]), count * statistics.mean(self.steps[count:])

    def added_wait(self, count: int) -> float:
        """Return the seconds of waits in the first `count` steps beyond the later steps' mean."""
        return sum(self.waits[:count]) - count * statistics.mean(self.waits[count:])


def of_ranks(blocks: Sequence[Mapping[str, Any]]) -> UploadBlock:
    """Combine all ranks' measurements of one block."""
    first = blocks[0]
    stored = max(block["stored_at"] for block in blocks)
    return UploadBlock(
        system=first["system"],
        state_bytes=sum(block["state_bytes"] for block in blocks),
        steps=[later - earlier for earlier, later in pairwise([first["resumed_at"], *first["ended_at"]])],
        waits=first["waited"],
        save_seconds=max(block["save_seconds"] for block in blocks),
        upload_seconds=stored - first["saved_at"] if stored else 0.0,
        cpu_seconds=sum(block["helper_seconds"] for block in blocks),
    )


def measure(home: Path, environment: Mapping[str, str], *, rounds: int, is_quick: bool = False) -> list[UploadBlock]:
    """Train in one launch, in which Everstep and DCP store checkpoints in turn, in a rotating order.

    The S3 server of `environment` has the bucket `members.BUCKET`. Raises BenchmarkFailed if a process ended.
    """
    order = [system for number in range(rounds) for system in _rotated(number)]
    steps = QUICK_STEPS if is_quick else STEPS
    with (
        tmpfs_folder() as memory,
        members.meeting_port() as port,
        members.started(RANKS, memory, home, mebibytes=NODE_MIB, environment=environment) as nodes,
    ):
        task = {
            "size": asdict(QUICK_SIZE if is_quick else SIZE),
            "order": order,
            "steps": steps,
        }
        nodes.open(1, RANKS, every_steps=SETTLE_STEPS + steps)
        environments = [{**environment, **nodes.environment(rank, RANKS, 1, port)} for rank in range(RANKS)]
        with members.ranks([PROGRAM, json.dumps(task)], environments, home) as talks:
            nodes.load()
            answers = [talk.answer() for talk in talks]
        nodes.close()
    return [of_ranks(blocks) for blocks in zip(*answers, strict=True)]


def _rotated(number: int) -> Iterator[str]:
    begin = number % len(SYSTEMS)
    yield from SYSTEMS[begin:] + SYSTEMS[:begin]


def compared_count(blocks: Sequence[UploadBlock]) -> int:
    """Return how many first steps of each block count as during the upload, for all systems alike."""
    # Of the system with the longest uploads. With a number of its own, a longer upload with the same effect would
    # look better.
    counts = [
        statistics.median_high(block.slowed_count for block in blocks if block.system == system)
        for system in {block.system for block in blocks}
    ]
    return min(max(1, *counts), len(blocks[0].steps) - 1)


def slowdown_ratio(blocks: Sequence[UploadBlock], count: int) -> float:
    """Return the added seconds of the first `count` steps ÷ their seconds without an upload (`UploadBlock.times`)."""
    times = [block.times(count) for block in blocks]
    return sum(during for during, _ in times) / sum(usual for _, usual in times) - 1


def added_wait(blocks: Sequence[UploadBlock], count: int) -> float:
    """Return the mean of `UploadBlock.added_wait`."""
    return statistics.mean(block.added_wait(count) for block in blocks)
