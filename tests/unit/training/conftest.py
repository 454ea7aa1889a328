"""Checks that no test of the training library leaves a session open."""

from collections.abc import Iterator

import pytest
from torch.optim.lr_scheduler import LRScheduler


@pytest.fixture(autouse=True)
def _every_session_is_closed() -> Iterator[None]:
    """Fail the test that leaves a session open: an open session wraps torch's classes for every later test."""
    step = vars(LRScheduler)["step"]
    yield
    assert vars(LRScheduler)["step"] is step, "this test left a session open: call session.close()"
