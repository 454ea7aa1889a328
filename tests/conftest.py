"""For every test."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import pytest
import pytest_randomly
from hypothesis import HealthCheck, settings

from tests.warm_parent import WarmParent


def _seed_torch(seed: int) -> None:
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(seed)


settings.register_profile("everstep", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])  # a busy machine is no bug
settings.load_profile("everstep")


def pytest_configure(config: pytest.Config) -> None:
    """Keep pytest-randomly from importing DeepSpeed, which registers a seeder with it: seconds at every start, also of tests without torch."""
    pytest_randomly.entrypoint_reseeds = [_seed_torch]


@pytest.fixture(scope="session")
def warm_parent() -> Iterator[WarmParent]:
    """Where tests that train get their ranks from."""
    with contextlib.closing(WarmParent()) as parent:
        yield parent
