from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.control_plane.loop.world import World


@pytest.fixture
def world(tmp_path: Path, database_url: str) -> Iterator[World]:
    made = World(tmp_path, database_url=database_url)
    yield made
    made.close()
