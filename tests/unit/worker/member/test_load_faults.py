"""A failed load reports whether a store was out of reach, or delivered wrong content."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from everstep.protocol.agent_messages import FaultCode, Obstacle
from everstep.protocol.ids import Generation, NodeId, Rank, Step
from everstep.protocol.plan import GenerationPlan, ObjectReference, PlanNode, ShardSource
from worker.errors import BucketMissing, CorruptCheckpoint, LoadFailed, ObjectMissing, StoreDenied, StoreUnavailable
from worker.member.base_loading import BaseLoading


class FailingLoad(BaseLoading):
    """Loads the only shard of an earlier launch from S3, which fails."""

    def __init__(self, error: Exception, source: ShardSource) -> None:
        relayout = SimpleNamespace(shards={Rank(0): [source]})
        self.plan = cast("GenerationPlan", SimpleNamespace(base_step=source.step, relayout=relayout))
        self.here = cast("PlanNode", SimpleNamespace(node_id=NodeId("i-own")))
        self._error = error

    async def _load_from_home(self, *_: object) -> bool:
        return False

    async def _load_s3(self, *_: object, **__: object) -> None:
        raise self._error


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
    source = ShardSource(
        kind="s3",
        origin_generation=Generation(1),
        step=Step(3),
        digest=b"d" * 16,
        payload_bytes=1,
        object=ObjectReference(bucket="b", key="k"),
    )
    with pytest.raises(LoadFailed) as failed:
        await FailingLoad(error, source).load_earlier(Rank(0))
    assert (failed.value.code, failed.value.obstacle, failed.value.is_permanent) == (code, obstacle, False)
