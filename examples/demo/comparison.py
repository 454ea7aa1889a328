"""Are two runs of a job bit-identical? Read from what they left in S3, by nothing but this file.

A run's output is one folder per rank: `rank=<r>/state-rank<r>.safetensors` (model and optimizer shard) and
`rank=<r>/losses-rank<r>.json`.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunResult:
    """What a run ended with."""

    digest: str
    """SHA-256 over rank, name, dtype, shape and bytes of every tensor of model and optimizer."""
    losses: tuple[tuple[str, ...], ...]
    """By rank and step; exact, as hexadecimal floats."""


def read_run(folder: Path, world_size: int) -> RunResult:
    """Read a run's output.

    Args:
        folder: where `everstep jobs output` has put it.
        world_size: how many ranks must be there.

    Raises:
        FileNotFoundError: a rank's output is missing.
        ValueError: an output holds no tensors or no losses.
    """
    digest = hashlib.sha256()
    losses = []
    for rank in range(world_size):
        tensors = (folder / f"rank={rank}" / f"state-rank{rank}.safetensors").read_bytes()
        (header_bytes,) = struct.unpack_from("<Q", tensors)
        header = {
            name: entry for name, entry in json.loads(tensors[8 : 8 + header_bytes]).items() if name != "__metadata__"
        }
        if not header:
            raise ValueError(f"rank {rank} left no tensors in {folder}")
        for name in sorted(header):
            entry = header[name]
            begin, end = entry["data_offsets"]
            digest.update(json.dumps([rank, name, entry["dtype"], entry["shape"]]).encode())
            digest.update(tensors[8 + header_bytes + begin : 8 + header_bytes + end])
        seen = json.loads((folder / f"rank={rank}" / f"losses-rank{rank}.json").read_text())["losses"]
        if not seen:
            raise ValueError(f"rank {rank} left no losses in {folder}")
        losses.append(tuple(float(loss).hex() for loss in seen))
    return RunResult(digest.hexdigest(), tuple(losses))


def differences(run: RunResult, reference: RunResult) -> list[str]:
    """Return in which ways two runs differ, one sentence each; empty when they are bit-identical."""
    found = []
    if run.digest != reference.digest:
        found.append(f"final weights or optimizer state differ: {run.digest} against {reference.digest}")
    for rank, (mine, theirs) in enumerate(zip(run.losses, reference.losses, strict=True)):
        if len(mine) != len(theirs):
            found.append(f"rank {rank} has {len(mine)} losses against {len(theirs)}")
        unequal = [step for step, pair in enumerate(zip(mine, theirs, strict=False), start=1) if pair[0] != pair[1]]
        if unequal:
            found.append(f"rank {rank}: {len(unequal)} losses differ, the first at step {unequal[0]}")
    return found
