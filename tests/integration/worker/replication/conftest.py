"""Fixtures: a temporary folder on tmpfs, and a pair of nodes that store their slots in it."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.worker.replication.pair import Pair


@pytest.fixture
def tmpfs() -> Iterator[Path]:
    folder = Path("/dev/shm") / f"everstep-test-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    folder.mkdir(mode=0o700)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
async def make(tmpfs: Path) -> AsyncIterator[Callable[..., Pair]]:
    pairs: list[Pair] = []

    def build(**options: Any) -> Pair:
        pairs.append(Pair(tmpfs, **options))
        return pairs[-1]

    yield build
    for each in pairs:
        await each.close()


@pytest.fixture
async def pair(make: Callable[..., Pair]) -> Pair:
    made = make()
    made.listen()
    return made
