"""A listing of a run in S3 is a fact for a limited time only."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from control_plane.cloud.errors import AccessDenied
from control_plane.loop.store_listings import OLDEST_SECONDS, StoreListings
from everstep.protocol.ids import RunId
from everstep.protocol.plan import ObjectReference
from tests.fakes.cloud import MemoryObjectStore

RUN, PREFIX = RunId("r"), ObjectReference(bucket="b", key="gpt/")


class Works:
    """Collects background work, which the test then runs."""

    def __init__(self) -> None:
        self.begun: list[Any] = []

    def begin_work(self, key: str, work: Any) -> None:
        self.begun.append(work)


async def test_an_old_listing_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    now, works, objects = datetime(2026, 1, 1, tzinfo=UTC), Works(), MemoryObjectStore("b")
    objects.put(ObjectReference(bucket="b", key="gpt/run=r/issued=1"), b"")
    listings = StoreListings(objects, works, lambda: now)  # type: ignore[arg-type]
    listings.refresh(RUN, PREFIX)
    await works.begun.pop()()
    found = listings.newest(RUN)
    assert found is not None
    assert (found.steps, found.obstacle) == ((), None)
    now += timedelta(seconds=OLDEST_SECONDS + 1)
    assert listings.newest(RUN) is None
    listings.refresh(RUN, PREFIX)
    monkeypatch.setattr(objects, "list", lambda prefix: (_ for _ in ()).throw(AccessDenied("denied")))
    await works.begun.pop()()
    denied = listings.newest(RUN)
    assert denied is not None
    assert denied.obstacle is AccessDenied("denied").obstacle


async def test_a_listing_that_ends_after_the_wait_does_not_count_in_the_next_wait() -> None:
    now, works, objects = datetime(2026, 1, 1, tzinfo=UTC), Works(), MemoryObjectStore("b")
    listings = StoreListings(objects, works, lambda: now)  # type: ignore[arg-type]
    listings.refresh(RUN, PREFIX)
    listings.forget(RUN)
    await works.begun.pop()()
    now += timedelta(hours=1)
    assert listings.newest(RUN) is None
