"""The defaults of the API, which its documentation states, are stored with a new job."""

from __future__ import annotations

import pytest

from control_plane.api.schemas.common import Request
from control_plane.api.schemas.jobs import CheckpointConfig, ElasticConfig, RetryStrategy
from control_plane.api.spec_fields import stored
from control_plane.core.observed.specs import OnTotalLoss


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            CheckpointConfig(),
            {
                "checkpoint_every_steps": 0,
                "checkpoint_on_notice": True,
                "checkpoint_trash_hours": 24,
                "third_slot": False,
            },
        ),
        (ElasticConfig(), {"patience_seconds": 60}),
        (RetryStrategy(), {"max_attempts": 3, "max_repeated_minutes": 30, "on_total_loss": OnTotalLoss.WAIT}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_new_job_stores_the_documented_defaults(config: Request, expected: dict[str, object]) -> None:
    assert stored(config) == expected
