"""Events: what happened, oldest first, read-only."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query

from control_plane.api import schemas, views
from control_plane.api.auth import Reader
from control_plane.api.deps import MaxResults, NextToken, Router, ServicesDep, page_position, page_token
from control_plane.db import events

router = Router(prefix="/v1/events", tags=["Events"])


@router.get("", operation_id="ListEvents")
def list_events(
    caller: Reader,
    services: ServicesDep,
    training_job_name: Annotated[str | None, Query(alias="TrainingJobName", max_length=63)] = None,
    fleet_name: Annotated[str | None, Query(alias="FleetName", max_length=63)] = None,
    after_event_id: Annotated[int, Query(alias="AfterEventId", ge=0)] = 0,
    max_results: MaxResults = 100,
    next_token: NextToken = None,
) -> schemas.ListEventsResponse:
    """List events, oldest first. To see what is new later, ask again with the last `EventId` as `AfterEventId`."""
    after_id = after_event_id if next_token is None else page_position(next_token, int)[0]
    with services.database.read() as session:
        page = events.page(
            session, job_name=training_job_name, fleet_name=fleet_name, project=caller.project_filter, after_id=after_id, limit=max_results + 1
        )
    last = page[max_results - 1] if len(page) > max_results else None
    return schemas.ListEventsResponse(
        events=[views.event(record) for record in page[:max_results]], next_token=None if last is None else page_token(last.id)
    )
