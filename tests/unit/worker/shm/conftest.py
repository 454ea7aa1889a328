"""Provides a folder on tmpfs, and removes it after the test."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def tmpfs() -> Iterator[Path]:
    folder = Path("/dev/shm") / f"everstep-test-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    folder.mkdir(mode=0o700)
    yield folder
    shutil.rmtree(folder)
