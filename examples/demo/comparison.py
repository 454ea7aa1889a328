"""Checks whether two runs of a job are bit-identical, using only their output files.

A run's output has one directory per rank, with two files: `rank=<r>/state-rank<r>.safetensors` (shard of the model and
the optimizer) and `rank=<r>/losses-rank<r>.json`.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunResult:
    """The final state and the losses of a run."""

    digest: str
    """SHA-256 over rank, name, dtype, shape and bytes of every tensor of model and optimizer."""
    losses: tuple[tuple[str, ...], ...]
    """Losses by rank and step, as hexadecimal floats, which are exact."""


def read_run(folder: Path, world_size: int) -> RunResult:
    """Read the output of a run.

    Args:
        folder: directory to which `everstep jobs output` has downloaded the files.
        world_size: number of ranks.

    Raises:
        FileNotFoundError: the output of a rank is missing.
        ValueError: an output contains no tensors or no losses.
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
            raise ValueError(f"the output of rank {rank} in {folder} contains no tensors")
        for name in sorted(header):
            entry = header[name]
            begin, end = entry["data_offsets"]
            digest.update(json.dumps([rank, name, entry["dtype"], entry["shape"]]).encode())
            digest.update(tensors[8 + header_bytes + begin : 8 + header_bytes + end])
        seen = json.loads((folder / f"rank={rank}" / f"losses-rank{rank}.json").read_text())["losses"]
        if not seen:
            raise ValueError(f"the output of rank {rank} in {folder} contains no losses")
        losses.append(tuple(float(loss).hex() for loss in seen))
    return RunResult(digest.hexdigest(), tuple(losses))


def differences(run: RunResult, reference: RunResult) -> list[str]:
    """Return the differences between two runs, one sentence each; empty if the runs are bit-identical."""
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
