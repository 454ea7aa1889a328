"""A failed load reports whether a store was out of reach, or delivered wrong content."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from everstep.protocol.agent_messages import FaultCode, Obstacle
from everstep.protocol.ids import Generation, Rank, Step
from everstep.protocol.plan import ObjectReference, ShardSource
from worker.errors import BucketMissing, CorruptCheckpoint, LoadFailed, ObjectMissing, StoreDenied, StoreUnavailable
from worker.member.base_loading import BaseLoading


@pytest.mark.parametrize(
    ("error", "code", "obstacle"),
    [
        (StoreUnavailable("503"), FaultCode.SOURCE_UNAVAILABLE, Obstacle.NO_ANSWER),
        (TimeoutError("late"), FaultCode.SOURCE_UNAVAILABLE, Obstacle.NO_ANSWER),
        (StoreDenied("ExpiredToken"), FaultCode.SOURCE_UNAVAILABLE, Obstacle.DENIED),
        (BucketMissing("no bucket"), FaultCode.SOURCE_UNAVAILABLE, Obstacle.NO_BUCKET),
        (ObjectMissing("no key"), FaultCode.SOURCE_MISMATCH, None),
        (CorruptCheckpoint("other bytes"), FaultCode.SOURCE_MISMATCH, None),
    ],
)
async def test_only_an_unreachable_store_is_an_obstacle(
    error: Exception, code: FaultCode, obstacle: Obstacle | None
) -> None:
    async def load_s3(*_: Any, **__: Any) -> None:
        raise error

    loading = cast("BaseLoading", SimpleNamespace(_plan=SimpleNamespace(base_step=Step(3)), _load_s3=load_s3))
    source = ShardSource(
        kind="s3",
        origin_generation=Generation(1),
        step=Step(3),
        digest=b"d" * 16,
        payload_bytes=1,
        object=ObjectReference(bucket="b", key="k"),
    )
    with pytest.raises(LoadFailed) as failed:
        await BaseLoading._load_first(loading, Rank(0), [source])
    assert (failed.value.code, failed.value.obstacle, failed.value.is_permanent) == (code, obstacle, False)
