"""Plants corruptions of all kinds in all places, in an order that the seed decides."""

from __future__ import annotations

import asyncio
import logging
import random
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

from tests.corruption.memory import Memory
from tests.corruption.objects import Objects
from tests.corruption.outcomes import Counts, small_chunks
from tests.corruption.parity import Contributions, Rebuilds
from tests.corruption.relayout import EarlierLoads
from tests.corruption.shared import SharedLoads
from tests.corruption.wire import Wire
from worker.replication import transfers

KINDS = ("bit flip", "bit flip", "truncation", "dropped part", "swapped shards", "stale generation")
"""Kinds of corruptions. Bit flips occur twice, because they have the most places to hit."""

MAX_SECONDS = 60.0
"""Time limit of one corruption. A node that waits forever is a bug, too."""


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
    memory = Memory(draw)
    (folder / "wire").mkdir()
    wire = Wire(folder / "wire", draw)
    rebuilds = Rebuilds(folder / "rebuilds", draw)
    contributions = Contributions(folder / "contributions", draw)
    earlier = EarlierLoads(folder / "earlier", draw)
    shared = SharedLoads(folder / "shared", draw)
    places: list[Callable[[str, Counts], Awaitable[None] | None]] = [
        objects.open,
        objects.restore,
        objects.export,
        memory.adopt,
        wire.chunks,
        wire.message,
        rebuilds.rebuild,
        contributions.contribute,
        earlier.load,
        shared.load,
    ]
    try:
        await memory.prepare()
        for each in (rebuilds, contributions, earlier, shared):
            await each.prepare()
        for number in range(count):
            planting = places[number % len(places)](draw.choice(KINDS), counts)
            if planting is not None:
                async with asyncio.timeout(MAX_SECONDS):
                    await planting
            progress(number + 1)
    finally:
        await wire.close()
        for each in (rebuilds, contributions, earlier, shared):
            await each.close()
        objects.close()
    return counts
