"""For every test."""

from __future__ import annotations

import sys

import pytest
import pytest_randomly


def _seed_torch(seed: int) -> None:
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(seed)


def pytest_configure(config: pytest.Config) -> None:
    """Keep pytest-randomly from importing DeepSpeed, which registers a seeder with it: seconds at every start, also of tests without torch."""
    pytest_randomly.entrypoint_reseeds = [_seed_torch]
