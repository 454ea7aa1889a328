"""Measures training while Everstep or DCP's `async_save` stores a checkpoint of the same state on the same S3 server.

One rank trains a GPT under FSDP2, on one of two cores. The other core is free for the upload, as cores are free on a
host whose GPUs train. The S3 server discards parts (`part_sink`), because a complete server would slow training more
than its clients do. `rank.uploading` describes the rank's blocks of steps.
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
"""Counted steps of a block. On a quiet machine, every upload ends within the first half of them."""
BYTES_PER_SECOND = 120e6
"""Rate at which the S3 server receives parts, over all connections. It makes uploads last for several steps."""
SIZE = ModelSize(layers=2, width=640, batch=2)
QUICK_SIZE = ModelSize(layers=1, width=128)
NODE_MIB = 512
PROGRAM = "benchmarks.durable.rank.uploading"


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadBlock:
    """Measurements of consecutive steps during which one system stored one checkpoint, or none (`FLOOR`)."""

    system: str
    state_bytes: int
    """Bytes of the state of all ranks."""
    steps: list[float]
    """Durations of rank 0's counted steps, in seconds. They do not contain the call that begins the checkpoint."""
    waits: list[float]
    """Seconds of each of rank 0's counted steps in which its training thread waited for a core, a lock or an event."""
    save_seconds: float
    """Seconds for which the checkpoint blocked the training thread, on the rank with the longest time."""
    upload_seconds: float
    """Seconds from the end of the checkpoint's step until all ranks' parts were stored. 0 without a checkpoint."""
    cpu_seconds: float
    """CPU time of all nodes and of the ranks' child processes, from the checkpoint's step to the block's end."""

    @property
    def is_whole(self) -> bool:
        """Whether the block has enough steps without the upload for a comparison.

        True if at least a third of `steps` began after the end of the upload.
        """
        return self.slowed_count <= len(self.steps) * 2 // 3

    @property
    def slowed_count(self) -> int:
        """Number of the first steps in `steps`: those that began before the upload ended."""
        return sum(begun < self.upload_seconds for begun in accumulate(self.steps[:-1], initial=self.save_seconds))

    def times(self, count: int) -> tuple[float, float]:
        """Return the seconds of the first `count` steps, and the seconds that they would take at the later steps' mean.

        The comparison is within one block, because the machine's speed changes from block to block.
        """
        return sum(self.steps[:count]), count * statistics.mean(self.steps[count:])

    def added_wait(self, count: int) -> float:
        """Return the seconds that the training thread waits in the first `count` steps beyond the later steps' mean."""
        return sum(self.waits[:count]) - count * statistics.mean(self.waits[count:])


def of_ranks(blocks: Sequence[Mapping[str, Any]]) -> UploadBlock:
    """Combine the measurements of all ranks for one block: steps during which one system stores a checkpoint."""
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
    """Train in one launch, in which Everstep and DCP store checkpoints in turn. The order of the systems rotates.

    Args:
        home: folder of the logs.
        environment: address and keys of the S3 server, which has the bucket `members.BUCKET`.
        rounds: number of blocks of each system.
        is_quick: True for a small model and few steps.

    Raises:
        BenchmarkFailed: a process ended.
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
    """Return how many first steps of each block count as the steps during the upload, for all systems alike.

    It is the median number of steps that began during an upload, of the system with the longest uploads. With a number
    of its own for each system, a longer upload with the same effect would look better.
    """
    counts = [
        statistics.median_high(block.slowed_count for block in blocks if block.system == system)
        for system in {block.system for block in blocks}
    ]
    return min(max(1, *counts), len(blocks[0].steps) - 1)


def slowdown_ratio(blocks: Sequence[UploadBlock], count: int) -> float:
    """Return the slowdown of training during the first `count` steps of each block, relative to the later steps.

    It is the sum of the added seconds of all blocks ÷ the sum of the seconds without an upload (`UploadBlock.times`).
    """
    times = [block.times(count) for block in blocks]
    return sum(during for during, _ in times) / sum(usual for _, usual in times) - 1


def added_wait(blocks: Sequence[UploadBlock], count: int) -> float:
    """Return the mean over the blocks of `UploadBlock.added_wait`, in seconds."""
    return statistics.mean(block.added_wait(count) for block in blocks)
