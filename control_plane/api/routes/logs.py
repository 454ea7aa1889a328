"""Log lines of a job, merged over all ranks and nodes, in pages and as a stream. Each line appears once.

FollowLogs first reads stored lines from S3, then forwards the lines that agents send. Agents number the lines of a
node. If a number is missing, FollowLogs reads from S3 again. A number can be missing because of a delayed line, a
restarted agent or a lost node.

Invariant: a page token (`api.log_tokens`) encodes a `Cursor` of `loop.log_reader`. A reader that continues from a token
neither skips nor repeats a line.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncGenerator, Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Final

from fastapi import Query
from fastapi.responses import StreamingResponse
from pydantic import AwareDatetime

from control_plane.api import log_tokens
from control_plane.api.alike import shaped
from control_plane.api.auth import Caller, Reader
from control_plane.api.deps import Services, ServicesDep, TrainingJobNamePath
from control_plane.api.errors import Throttled
from control_plane.api.event_stream import MEDIA_TYPE, message
from control_plane.api.live import LiveResponse
from control_plane.api.router import Router
from control_plane.api.routes.jobs import find_job
from control_plane.api.schemas import logs as logs_schemas
from control_plane.db import jobs, tokens
from control_plane.loop.log_feed import WAITING_LIMIT, LogFollower, TooManyLogFollowers
from control_plane.loop.log_reader import (
    Cursor,
    GenerationFacts,
    LogEvent,
    LogFilter,
    LogReader,
    Page,
    advanced,
    facts_of,
    of_line,
)
from control_plane.loop.records import prefix_of
from everstep.protocol.agent_messages import SEND_LINES_SECONDS, LogLines, SendLines
from everstep.protocol.ids import NodeId, Rank, RunId
from everstep.protocol.plan import ObjectReference

router = Router(prefix="/v1/training-jobs/{TrainingJobName}/logs", tags=["Results"])

FOLLOW_LINES: Final = 1_000
"""Maximum number of lines in one event of the FollowLogs stream."""
ALIVE_SECONDS: Final = 10.0

RankFilter = Annotated[int | None, Query(alias="Rank", ge=0, le=2**31 - 1)]
GenerationFilter = Annotated[int | None, Query(alias="Generation", ge=1, le=2**31 - 1)]
StartTime = Annotated[AwareDatetime | None, Query(alias="StartTime")]
TextFilter = Annotated[str, Query(alias="FilterPattern", max_length=256)]
LogToken = Annotated[str | None, Query(alias="NextToken", max_length=log_tokens.MAX_CHARACTERS)]


@router.get("/events", operation_id="GetLogEvents")
def get_log_events(
    training_job_name: TrainingJobNamePath,
    caller: Reader,
    services: ServicesDep,
    rank: RankFilter = None,
    generation: GenerationFilter = None,
    start_time: StartTime = None,
    end_time: Annotated[AwareDatetime | None, Query(alias="EndTime")] = None,
    filter_pattern: TextFilter = "",
    start_from_head: Annotated[bool, Query(alias="StartFromHead")] = False,
    limit: Annotated[int, Query(alias="Limit", ge=1, le=10_000)] = 1_000,
    next_token: LogToken = None,
) -> logs_schemas.GetLogEventsResponse:
    """Read the lines that a job's ranks printed, merged by time over all ranks, generation by generation.

    Without NextToken, the response has the newest lines, or with StartFromHead the oldest. FilterPattern selects the
    lines that contain its text. Pass NextForwardToken as NextToken for later lines, and NextBackwardToken for earlier
    lines. A page may be short or empty although further lines exist. If no further lines exist now, the response
    returns the token that the request passed. Lines that a lost node could not upload appear as one event of the stream
    `gap`.
    """
    wanted = _filter(rank, generation, start_time, end_time, filter_pattern)
    facts = _facts(services, training_job_name, caller)
    reader = _reader(services, facts)
    if next_token is None:
        page = (
            reader.forward(reader.head(wanted), wanted, limit)
            if start_from_head
            else reader.backward(reader.tail(wanted), wanted, limit)
        )
    else:
        is_back, cursor = log_tokens.decode(next_token, facts.generations)
        page = reader.backward(cursor, wanted, limit) if is_back else reader.forward(cursor, wanted, limit)
    return logs_schemas.GetLogEventsResponse(
        events=[_event(event) for event in page.events],
        next_forward_token=log_tokens.encode(page.last, facts.generations),
        next_backward_token=log_tokens.encode(page.first, facts.generations, is_back=True),
    )


@router.get(
    "/follow",
    operation_id="FollowLogs",
    response_class=StreamingResponse,
    responses={
        200: {
            "description": "A stream of events.",
            "model": logs_schemas.FollowLogsStream,
            "content": {MEDIA_TYPE: {}},
        }
    },
)
async def follow_logs(
    training_job_name: TrainingJobNamePath,
    caller: Reader,
    services: ServicesDep,
    rank: RankFilter = None,
    generation: GenerationFilter = None,
    start_time: StartTime = None,
    filter_pattern: TextFilter = "",
    start_from_head: Annotated[bool, Query(alias="StartFromHead")] = False,
    next_token: LogToken = None,
) -> LiveResponse:
    """Follow the lines that a job's ranks print.

    The stream starts after NextToken, or at the beginning with StartFromHead or StartTime, else with the next new line.
    Each event has lines and a token from which a new call continues, for example after a disconnect. Agents send lines
    as they are printed; if an agent is unreachable, the lines come from the object store. Every line appears once. The
    stream ends after the last line of an ended job. Raises ThrottlingException if too many streams are open.
    """
    wanted = _filter(rank, generation, start_time, None, filter_pattern)
    facts = await services.caller_threads.run(_facts, services, training_job_name, caller)
    cursor = None if next_token is None else log_tokens.decode(next_token, facts.generations)[1]
    follow = services.registry.lines.follow(RunId(facts.run), caller.token.id)
    try:
        follower = follow.__enter__()
    except TooManyLogFollowers as error:
        raise Throttled(
            "This server already serves its maximum number of log streams.",
            hint="Retry in a moment, or use GetLogEvents.",
        ) from error

    async def chunks() -> AsyncGenerator[bytes, None]:
        try:
            async for events, token in _follow(
                services,
                caller,
                facts,
                follower,
                wanted,
                cursor,
                is_from_head=start_from_head or start_time is not None,
            ):
                batch = logs_schemas.LogEvents(events=[_event(event) for event in events], next_forward_token=token)
                yield message("LogEvents", batch.model_dump_json(by_alias=True, exclude_none=True).encode())
        finally:
            follow.__exit__(None, None, None)

    return LiveResponse(chunks(), MEDIA_TYPE)


@dataclass(frozen=True, slots=True)
class _Facts:
    """Facts about a job and its generations, from which `loop.log_reader` derives where the job's lines are in S3."""

    run: str
    place: ObjectReference
    generations: tuple[GenerationFacts, ...]
    alive: frozenset[str]
    has_ended: bool
    reporters: Mapping[int, Collection[str]]
    """The nodes that may still send lines of a generation (`jobs.reporters`), for the newest two generations."""
    workers: frozenset[str]
    """The nodes that work for the run."""


def _facts(services: Services, text: str, caller: Caller) -> _Facts:
    with services.database.read() as session:
        job = find_job(session, text, caller)
        generations, alive, has_ended = facts_of(session, job)
        reporters = {
            each.number: frozenset(jobs.reporters(session, job.run_id, each.number, services.now()))
            for each in generations[-2:]
        }
        workers = frozenset(jobs.workers(session, job.run_id))
        return _Facts(job.run_id, prefix_of(job.spec.log_uri), generations, alive, has_ended, reporters, workers)


def _reader(services: Services, facts: _Facts) -> LogReader:
    return LogReader(
        services.objects,
        facts.place,
        facts.generations,
        facts.alive,
        facts.has_ended,
        services.now,
        services.caller_threads.is_closed,
    )


async def _follow(
    services: Services,
    caller: Caller,
    facts: _Facts,
    follower: LogFollower,
    wanted: LogFilter,
    cursor: Cursor | None,
    *,
    is_from_head: bool,
) -> AsyncGenerator[tuple[tuple[LogEvent, ...], str], None]:
    """Yield the lines of a log in batches, and wait for new lines until the job ends.

    Each batch comes with the page token from which a new call continues after the batch.
    """
    reader, pauses = _reader(services, facts), services.log_pauses
    follower.listen_to(facts.workers.union(*facts.reporters.values()))
    if cursor is None:
        cursor = await services.caller_threads.run(reader.head if is_from_head else reader.tail, wanted)
    yield (), log_tokens.encode(cursor, facts.generations)
    asked = spoken = time.monotonic() - SEND_LINES_SECONDS
    asked_of: int | None = None
    """Generation whose nodes have received SendLines. None before the first message."""
    ahead: deque[tuple[NodeId, LogLines]] = deque(maxlen=WAITING_LIMIT)
    """Messages whose lines follow a missing line.

    The generator yields these lines after it has read the missing line from the store.
    """
    while True:
        newest = facts.generations[-1].number if facts.generations else None
        if newest != asked_of or time.monotonic() - asked > SEND_LINES_SECONDS / 3:
            asked, asked_of = time.monotonic(), newest
            for node_id in services.registry.connected():
                if any(node_id in generation.ranks for generation in facts.generations[-1:]):
                    services.registry.send(node_id, SendLines(run=RunId(facts.run)))
        page: Page = await services.caller_threads.run(reader.forward, cursor, wanted, FOLLOW_LINES)
        if page.events or time.monotonic() - spoken > ALIVE_SECONDS:
            spoken = time.monotonic()
            yield page.events, log_tokens.encode(page.last, facts.generations)
        is_more = len(page.events) >= FOLLOW_LINES or page.last.generation != cursor.generation
        cursor = page.last
        if page.is_over:
            return
        if is_more:
            continue
        # Before the first generation, wait only `catch_up_seconds`: a read is cheap, because S3 has no lines yet.
        again, until, is_missing = (
            deque(ahead),
            time.monotonic() + (pauses.stored_seconds if facts.generations else pauses.catch_up_seconds),
            False,
        )
        ahead.clear()
        while (left := until - time.monotonic()) > 0 and not (
            is_missing and left < pauses.stored_seconds - pauses.catch_up_seconds
        ):
            taken = (
                again.popleft()
                if again
                else await follower.take(min(left, pauses.catch_up_seconds) if is_missing else left)
            )
            if taken is None:
                continue
            node_id, sent = taken
            planned = next((known.ranks for known in facts.generations if known.number == sent.generation), None)
            if planned is None and sent.generation > cursor.generation:
                # The received lines belong to a new generation, whose nodes this call does not know yet. The next
                # iteration reads the generation's plan, and then its lines from S3.
                is_missing = True
                continue
            if not planned or node_id not in facts.reporters.get(sent.generation, ()):
                continue
            position = cursor.positions.get(node_id, 0)
            if sent.generation != cursor.generation or sent.first > position:
                if sent.generation >= cursor.generation:
                    is_missing = True
                    ahead.append(taken)
                continue
            new = [of_line(line, node_id, sent.generation) for line in sent.lines[position - sent.first :]]
            if not new:
                continue
            cursor = advanced(cursor, node_id, sent.first + len(sent.lines))
            ranks = next((known.ranks for known in facts.generations if known.number == cursor.generation), {})
            shown = tuple(event for event in new if event.kind != "end" and wanted.has(event, ranks))
            if shown:
                spoken = time.monotonic()
                yield shown, log_tokens.encode(cursor, facts.generations)
            if sent.lines[-1].stream == "end":
                break
        ahead.extend(again)
        is_good, facts = await services.caller_threads.run(_again, services, caller, facts.run)
        if not is_good:
            return
        follower.listen_to(facts.workers.union(*facts.reporters.values()))
        reader.update(facts.generations, facts.alive, facts.has_ended)


def _again(services: Services, caller: Caller, run_id: str) -> tuple[bool, _Facts]:
    with services.database.read() as session:
        is_good = bool(tokens.good_ids(session, [caller.token.id], services.now()))
    return is_good and (caller.ends_at is None or services.now() < caller.ends_at), _facts(services, run_id, caller)


def _filter(
    rank: int | None, generation: int | None, start: datetime | None, end: datetime | None, text: str
) -> LogFilter:
    return LogFilter(
        rank=None if rank is None else Rank(rank),
        generation=generation,
        start_ms=None if start is None else int(start.timestamp() * 1000),
        end_ms=None if end is None else int(end.timestamp() * 1000),
        text=text,
    )


def _event(event: LogEvent) -> logs_schemas.LogEvent:
    return shaped(event, logs_schemas.LogEvent, timestamp=datetime.fromtimestamp(event.at_ms / 1000, UTC))
