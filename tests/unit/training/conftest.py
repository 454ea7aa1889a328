"""Checks that no test of the training library leaves a session open."""

from collections.abc import Iterator

import pytest
from torch.optim.lr_scheduler import LRScheduler


@pytest.fixture(autouse=True)
def _every_session_is_closed() -> Iterator[None]:
    """Fail each test that leaves a session open, because the session would affect torch's classes in later tests."""
    step = vars(LRScheduler)["step"]
    yield
    assert vars(LRScheduler)["step"] is step, "this test left a session open: call session.close()"
