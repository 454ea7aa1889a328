from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sim.world import InTurn, World


@pytest.fixture(autouse=True)
async def in_turn(engine: str) -> None:
    """Run calls to the executor inline with SQLite, and in threads with PostgreSQL."""
    if engine == "sqlite":
        asyncio.get_running_loop().set_default_executor(InTurn())


@pytest.fixture
def world(tmp_path: Path, database_url: str) -> Iterator[World]:
    made = World(tmp_path, database_url=database_url)
    yield made
    made.close()
