"""Events: list them in pages, or follow them as a stream.

    GET /v1/events/stream      text/event-stream, https://html.spec.whatwg.org/multipage/server-sent-events.html

    retry: 1000                first line of the stream
    id: 17                     the reader's position; a reconnection continues there, even if no event was sent
    (an empty line)
    id: 18
    data: {"EventId": 18, …}   an Event of the contract, as ListEvents returns it
    : alive                    a comment, sent when the server has sent no event for a while
    event: end
    data: {"Code": …, "Message": …}   the last line: why the service ends the stream

Invariant: a reader that reconnects with the last id it has read receives each later event exactly once.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterable
from functools import partial
from typing import Annotated, Final

from fastapi import Query, Request
from fastapi.responses import StreamingResponse
from pydantic import AwareDatetime

from control_plane.api import errors, page_tokens
from control_plane.api.alike import shaped
from control_plane.api.auth import Caller, Reader
from control_plane.api.deps import (
    MaxResults,
    NextToken,
    Services,
    ServicesDep,
    SortOrder,
    TrainingJobNameFilter,
    page_of,
    same_order,
)
from control_plane.api.live import LiveResponse
from control_plane.api.router import Router
from control_plane.api.routes.jobs import JobCondition, job_condition
from control_plane.api.schemas import common as common_schemas
from control_plane.api.schemas import events as events_schemas
from control_plane.db import events
from control_plane.db.events import EventFilter, EventRecord
from control_plane.loop.event_feed import Batch, End, Interest, TooManyFollowers

EVENT_STREAM: Final = "text/event-stream"
PIECE_BYTES: Final = 64 * 1024
SHORT_BATCH: Final = 8
"""Number of events that the event loop encodes itself, as in most batches of new events."""
_ENDS: Final = {
    End.TOKEN: ("AccessDeniedException", "The token was revoked or has expired."),
    End.SESSION: ("AccessDeniedException", "The session has expired: sign in again."),
    End.SERVER: (
        "ServiceUnavailableException",
        "The server is stopping. Reconnect with the last event id; no event is lost.",
    ),
}

FleetNameFilter = Annotated[str | None, Query(alias="FleetName", max_length=63)]

router = Router(prefix="/v1/events", tags=["Events"])


@router.get("", operation_id="ListEvents")
def list_events(
    caller: Reader,
    services: ServicesDep,
    training_job_name: TrainingJobNameFilter = None,
    fleet_name: FleetNameFilter = None,
    after_event_id: Annotated[int, Query(alias="AfterEventId", ge=0, le=common_schemas.MAX_WHOLE_NUMBER)] = 0,
    time_after: Annotated[AwareDatetime | None, Query(alias="TimeAfter")] = None,
    time_before: Annotated[AwareDatetime | None, Query(alias="TimeBefore")] = None,
    max_results: MaxResults = 100,
    next_token: NextToken = None,
    sort_order: Annotated[SortOrder, Query(alias="SortOrder")] = SortOrder.ASCENDING,
) -> events_schemas.ListEventsResponse:
    """List events, oldest first, or newest first with SortOrder Descending.

    To poll for new events, pass the last `EventId` as `AfterEventId`.
    """
    is_ascending = sort_order is SortOrder.ASCENDING
    position = (
        None if next_token is None else page_tokens.position(next_token, same_order(sort_order), page_tokens.whole)[1]
    )
    with services.database.read() as session:
        of_job = job_condition(session, training_job_name, caller)
        which = EventFilter(
            job_name=of_job.job_name,
            fleet_name=fleet_name,
            project=of_job.project,
            after_id=position if position is not None and is_ascending else after_event_id,
            before_id=None if is_ascending else position,
            after=time_after,
            before=time_before,
        )
        page = events.page(session, which, limit=max_results + 1, is_ascending=is_ascending)
    shown, more = page_of(page, max_results, lambda record: (sort_order, record.id))
    return events_schemas.ListEventsResponse(
        events=[shaped(record, events_schemas.Event) for record in shown], next_token=more
    )


@router.get(
    "/stream",
    operation_id="StreamEvents",
    response_class=StreamingResponse,
    responses={200: {"description": "A stream of events.", "content": {EVENT_STREAM: {"schema": {"type": "string"}}}}},
)
async def stream_events(
    request: Request,
    caller: Reader,
    services: ServicesDep,
    training_job_name: TrainingJobNameFilter = None,
    fleet_name: FleetNameFilter = None,
    after_event_id: Annotated[int | None, Query(alias="AfterEventId", ge=0, le=common_schemas.MAX_WHOLE_NUMBER)] = None,
) -> LiveResponse:
    """Stream events as server-sent events.

    The stream starts after the header `Last-Event-ID`, else after AfterEventId, else with the next new event. `data` is
    an Event as ListEvents returns it, and `id` is its EventId. An event named `end` contains the reason when the
    service ends the stream. After any other disconnect, reconnect with the last id to receive each later event once.
    The service disconnects a reader that reads nothing for 20 seconds. Raises ThrottlingException if too many streams
    are open.
    """
    of_job = await services.caller_threads.run(_condition, services, training_job_name, caller)
    interest = Interest(
        token_id=caller.token.id,
        ends_at=caller.ends_at,
        project=of_job.project,
        job_name=of_job.job_name,
        fleet_name=fleet_name,
    )
    # Disable the token check of `api.open_answers`. The event feed (`loop.event_feed`) checks the token itself, and
    # sends the reason before it ends the stream.
    request.state.token_id = None
    batches = services.feed.follow(interest, _last_event_id(request, after_event_id))
    try:
        first = await anext(batches)
    except TooManyFollowers as error:
        raise errors.Throttled(
            "This server already serves its maximum number of event streams.",
            hint="Retry in a moment, or use ListEvents.",
        ) from error
    return LiveResponse(_frames(services, first, batches), EVENT_STREAM)


def _condition(services: Services, text: str | None, caller: Caller) -> JobCondition:
    with services.database.read() as session:
        return job_condition(session, text, caller)


def _last_event_id(request: Request, otherwise: int | None) -> int | None:
    """Return the id of the last event that the reader has received.

    Browsers send it in the header `Last-Event-ID` when they reconnect, so the header overrides the position in the URL.
    """
    header = request.headers.get("last-event-id")
    if not header:
        return otherwise
    # Check the length first, because int() raises for very long digit strings.
    is_number = header.isascii() and header.isdigit() and len(header) <= len(str(common_schemas.MAX_WHOLE_NUMBER))
    if not is_number or int(header) > common_schemas.MAX_WHOLE_NUMBER:
        raise errors.invalid("Last-Event-ID", "must be an id that this stream has sent", "{field}: {message}.")
    return int(header)


def _encoded(records: Iterable[EventRecord]) -> list[bytes]:
    """Return the frames of events, joined to pieces of about `PIECE_BYTES`."""
    pieces: list[bytes] = []
    piece = b""
    for record in records:
        event = shaped(record, events_schemas.Event).model_dump_json(by_alias=True, exclude_none=True)
        piece += f"id: {record.id}\ndata: {event}\n\n".encode()
        if len(piece) >= PIECE_BYTES:
            pieces.append(piece)
            piece = b""
    return [*pieces, piece] if piece else pieces


async def _frames(
    services: Services, first: Batch | End, rest: AsyncGenerator[Batch | End, None]
) -> AsyncGenerator[bytes, None]:
    try:
        yield b"retry: 1000\n"
        position = None
        batch = first
        while isinstance(batch, Batch):
            if batch.events:
                # Nothing else runs while many events are encoded on the event loop, or sent one by one: as long as the
                # buffers of a connection have room, sending does not wait.
                is_short = len(batch.events) <= SHORT_BATCH
                encode = partial(_encoded, batch.events)
                for piece in encode() if is_short else await services.caller_threads.finish(encode):
                    yield piece
                    await asyncio.sleep(0)
                position = batch.events[-1].id
            if batch.position != position:
                position = batch.position
                yield f"id: {position}\n\n".encode()
            elif not batch.events:
                yield b": alive\n\n"
            batch = await anext(rest)
        code, message = _ENDS[batch]
        yield f"event: end\ndata: {json.dumps({'Code': code, 'Message': message})}\n\n".encode()
    finally:
        await rest.aclose()
