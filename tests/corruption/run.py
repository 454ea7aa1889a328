"""Plants corruptions of all kinds in all places, in an order that the seed decides."""

from __future__ import annotations

import asyncio
import logging
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.corruption.memory import Memory
from tests.corruption.objects import Objects
from tests.corruption.outcomes import Counts, small_chunks
from tests.corruption.wire import Wire
from worker.replication import transfers

KINDS = ("bit flip", "bit flip", "truncation", "dropped part", "swapped shards", "stale generation")
"""Kinds of corruptions. Bit flips occur twice, because they have the most places to hit."""


def planted(count: int, seed: int, progress: Callable[[int], None] = lambda _done: None) -> Counts:
    """Plant corruptions, and read the corrupted data.

    Args:
        count: number of corruptions.
        seed: decides every random choice.
        progress: called with the number of corruptions so far.
    """
    folder = Path(tempfile.mkdtemp(prefix="everstep-corruption-", dir="/dev/shm"))
    before, transfers.CLOSE_SECONDS = transfers.CLOSE_SECONDS, 0.05
    logging.disable(logging.WARNING)  # each refused transfer would log a warning
    try:
        with small_chunks():
            return asyncio.run(_planted(folder, count, random.Random(seed), progress))
    finally:
        logging.disable(logging.NOTSET)
        transfers.CLOSE_SECONDS = before
        shutil.rmtree(folder)


async def _planted(folder: Path, count: int, draw: random.Random, progress: Callable[[int], None]) -> Counts:
    counts = Counts()
    objects = Objects(folder / "objects", draw)
    memory = Memory(folder / "memory", draw)
    await memory.prepare()
    (folder / "wire").mkdir()
    wire = Wire(folder / "wire", draw)
    try:
        for number in range(count):
            kind = draw.choice(KINDS)
            match number % 6:
                case 0:
                    objects.open(kind, counts)
                case 1:
                    await objects.restore(kind, counts)
                case 2:
                    await memory.adopt(kind, counts)
                case 3:
                    await wire.chunks(kind, counts)
                case 4:
                    await wire.message(kind, counts)
                case 5:
                    objects.export(kind, counts)
            progress(number + 1)
    finally:
        await wire.close()
        objects.close()
    return counts
