"""Measures training while Everstep or DCP's `async_save` stores a checkpoint of the same state on the same S3 server.

Two ranks train a GPT under FSDP2. `rank.uploading` describes their blocks of steps.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.data_plane.launches import tmpfs_folder
from benchmarks.durable import members
from benchmarks.durable.rank.sizes import SETTLE_STEPS, ModelSize

RANKS = 2
FLOOR, EVERSTEP, DCP_FILES, DCP_S3 = "floor", "everstep", "dcp_files", "dcp_s3"
SYSTEMS = (FLOOR, EVERSTEP, DCP_FILES, DCP_S3)
STEPS, QUICK_STEPS = 24, 6
"""Counted steps while a system stores one checkpoint. On a quiet machine, every upload ends within these steps."""
SIZE = ModelSize(layers=2, width=512, batch=4)
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
    """Durations of rank 0's counted steps, in seconds."""
    save_seconds: float
    """Seconds for which the checkpoint blocked the training thread, on the rank with the longest time."""
    upload_seconds: float
    """Seconds from the end of the checkpoint's step until all ranks' parts were stored. 0 without a checkpoint."""
    cpu_seconds: float
    """CPU time of all nodes and of DCP's processes during the block."""

    @property
    def seconds(self) -> float:
        """Total duration in seconds of the steps in `steps`."""
        return sum(self.steps)

    @property
    def is_whole(self) -> bool:
        """Whether the upload of the checkpoint took no longer than the counted steps (`steps`) together."""
        return self.upload_seconds <= self.seconds

    @property
    def during(self) -> list[float]:
        """Durations of the steps that began before the upload ended; of all steps if no checkpoint was stored."""
        begun, found = 0.0, []
        for step in self.steps:
            if begun < self.upload_seconds or self.system == FLOOR:
                found.append(step)
            begun += step
        return found


def of_ranks(blocks: Sequence[Mapping[str, Any]]) -> UploadBlock:
    """Combine the measurements of all ranks for one block: steps during which one system stores a checkpoint."""
    first = blocks[0]
    stored = max(block["stored_at"] for block in blocks)
    return UploadBlock(
        system=first["system"],
        state_bytes=sum(block["state_bytes"] for block in blocks),
        steps=[later - earlier for earlier, later in pairwise([first["saved_at"], *first["ended_at"]])],
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
            "folder": str(memory),
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


def added_seconds(blocks: Sequence[UploadBlock], system: str) -> float:
    """Return by how many seconds (median) a system's checkpoint prolongs the steps that run during the checkpoint."""
    return _seconds(blocks, system) - _seconds(blocks, FLOOR)


def slowdown_ratio(blocks: Sequence[UploadBlock], system: str) -> float:
    """Return the relative change of the median step time while a checkpoint of a system is uploaded."""
    usual = [step for block in blocks if block.system == FLOOR for step in block.steps]
    slowed = [step for block in blocks if block.system == system for step in block.during]
    return statistics.median(slowed) / statistics.median(usual) - 1


def _seconds(blocks: Sequence[UploadBlock], system: str) -> float:
    return statistics.median(block.seconds for block in blocks if block.system == system)
