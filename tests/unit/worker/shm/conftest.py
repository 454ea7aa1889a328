"""Provides the files that a node's agents hold."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from worker.shm.held_files import HeldFiles


@pytest.fixture
def files() -> Iterator[HeldFiles]:
    held = HeldFiles()
    yield held
    held.close()
