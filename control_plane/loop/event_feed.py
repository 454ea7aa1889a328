"""Delivers new entries of the event history to followers, the open event streams of API clients.

                    every poll, while there are followers
    table event ──▶ newest events, in memory  ──▶ followers that are up to date
              └───▶ one page per read         ──▶ followers that are behind

For a slow follower, the server remembers only the position and buffers no events.

Invariant: a follower receives each event after its position once and in order, if its token permits the event. It
receives no event after its token has expired or was revoked.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from functools import partial
from typing import Protocol, TypeVar

from sqlalchemy.exc import SQLAlchemyError

from control_plane.db import events, tokens
from control_plane.db.events import EventFilter, EventRecord
from control_plane.db.session import Database

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedOptions:
    """Intervals and limits of an event feed."""

    poll_seconds: float = 0.2
    heartbeat_seconds: float = 10.0
    """Seconds after which a follower without new events receives an empty batch."""
    follower_limit: int = 256
    followers_per_token_limit: int = 32
    """Limit of open streams per API token, so that one caller cannot use up `follower_limit`."""
    recent_limit: int = 1_000
    page_limit: int = 500
    """Limit of events per read of the table and per batch."""


class Run(Protocol):
    """Runs a blocking function of an API call in a thread."""

    def __call__(self, work: Callable[[], T]) -> Awaitable[T]:
        """Return what `work` returns, or raise its error."""
        ...


class TooManyFollowers(Exception):
    """Too many streams are open, in total or for the caller's token."""


class End(StrEnum):
    """Reason why a stream ends.

    - TOKEN: the token was revoked or has expired.
    - SESSION: the browser's session has ended.
    - SERVER: the server stops. The follower can continue from its position on any control-plane server.
    """

    TOKEN = "token"
    SESSION = "session"
    SERVER = "server"


@dataclass(frozen=True, slots=True, kw_only=True)
class Interest:
    """A follower's identity (its token), and the filter for the events that it requests and may see."""

    token_id: str
    ends_at: datetime | None
    """None for clients other than browsers."""
    project: str | None
    """None: all projects."""
    job_name: str | None
    fleet_name: str | None

    def has(self, event: EventRecord) -> bool:
        """Return whether the follower requests this event and may see it."""
        # `events.page` applies the same filter in SQL.
        return (
            (self.project is None or event.project == self.project)
            and (self.job_name is None or event.job_name == self.job_name)
            and (self.fleet_name is None or event.fleet_name == self.fleet_name)
        )


@dataclass(frozen=True, slots=True)
class Batch:
    """New events for an API client that follows events. A batch without events is a heartbeat."""

    events: tuple[EventRecord, ...]
    position: int
    """The follower has received all events up to this id that match its filter, and can resume after it."""


@dataclass(eq=False, slots=True)
class _Follower:
    interest: Interest
    end: End | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class EventFeed:
    """All event streams of one server. Runs on the server's event loop; reads the database in threads.

    Only the poll, which all followers share, uses a thread of the loops.
    """

    def __init__(
        self, database: Database, now: Callable[[], datetime], run: Run, options: FeedOptions | None = None
    ) -> None:
        """Create a feed without followers. `run` runs a follower's read of the database in the turn of its caller."""
        self._database = database
        self._now = now
        self._run = run
        self._options = options or FeedOptions()
        self._followers: set[_Follower] = set()
        self._recent: deque[EventRecord] = deque()
        self._complete_after = 0
        """`_recent` contains all events with a higher id that the server has read."""
        self._newest: int | None = None
        """None until the first poll for a follower has finished."""
        self._polling: asyncio.Task[None] | None = None
        self._is_closed = False

    async def follow(self, interest: Interest, after_id: int | None) -> AsyncGenerator[Batch | End, None]:
        """Yield new events until the stream ends or the caller stops iterating.

        The first batch is empty and contains the position; an `End` with the reason comes last. With `after_id` None,
        only future events are delivered.

        Raises TooManyFollowers at the first iteration if a limit is reached.
        """
        of_token = sum(follower.interest.token_id == interest.token_id for follower in self._followers)
        if len(self._followers) >= self._options.follower_limit or of_token >= self._options.followers_per_token_limit:
            raise TooManyFollowers
        me = _Follower(interest, End.SERVER if self._is_closed else None)
        self._followers.add(me)
        try:
            if self._polling is None and not self._is_closed:
                self._polling = asyncio.create_task(self._poll())
            position = await self._run(self._read_newest) if after_id is None else after_id
            yield Batch((), position)
            while me.end is None:
                me.changed.clear()
                batch = await self._after(position, me)
                if me.end is not None:
                    # The stream ended during the read, for example because its token was revoked. Yield no events.
                    break
                if not batch.events and batch.position == position:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(self._options.heartbeat_seconds):
                            await me.changed.wait()
                        continue
                position = batch.position
                yield batch
            assert me.end is not None
            yield me.end
        finally:
            self._followers.discard(me)

    async def idle(self) -> None:
        """Wait until no task polls the event table. The polling ends after the last follower has left."""
        if self._polling is not None:
            await asyncio.wait((self._polling,))

    def close(self) -> None:
        """End all open and future streams, because the server stops. Idempotent."""
        self._is_closed = True
        for follower in self._followers:
            self._tell(follower, End.SERVER)
        if self._polling is not None:
            self._polling.cancel()

    async def _after(self, position: int, me: _Follower) -> Batch:
        newest, limit = self._newest, self._options.page_limit
        if newest is None or position >= newest:
            return Batch((), position)
        if position < self._complete_after:
            is_good, page = await self._run(partial(self._read_page, position, me.interest))
            if not is_good:
                self._tell(me, End.TOKEN)
            # This page was read after the poll that found `newest`, so it may contain newer events. The position must
            # not precede them, because the follower would receive them again.
            return Batch(page, page[-1].id if len(page) == limit else max([newest, *(event.id for event in page[-1:])]))
        found = tuple(event for event in self._recent if event.id > position and me.interest.has(event))
        return Batch(found[:limit], found[limit - 1].id if len(found) > limit else newest)

    async def _poll(self) -> None:
        try:
            while self._followers and not self._is_closed:
                asked = frozenset(follower.interest.token_id for follower in self._followers)
                try:
                    good, found, newest = await asyncio.to_thread(self._look, self._newest, asked)
                except SQLAlchemyError as error:
                    log.warning("could not read the event table; the next poll retries: %s", error)
                else:
                    self._take(asked - good, found, newest)
                await asyncio.sleep(self._options.poll_seconds)
        finally:
            self._polling = None
            self._newest = None
            self._recent.clear()

    def _take(self, ended: frozenset[str], found: tuple[EventRecord, ...], newest: int) -> None:
        """Apply the result of one poll of the event table: first end the streams with invalid tokens, then deliver."""
        now = self._now()
        for follower in self._followers:
            interest = follower.interest
            if interest.token_id in ended:
                self._tell(follower, End.TOKEN)
            elif interest.ends_at is not None and interest.ends_at <= now:
                self._tell(follower, End.SESSION)
        if self._newest is None:
            self._complete_after = newest
        elif newest == self._newest:
            return
        self._newest = newest
        self._recent.extend(found)
        while len(self._recent) > self._options.recent_limit:
            self._complete_after = self._recent.popleft().id
        for follower in self._followers:
            follower.changed.set()

    def _tell(self, follower: _Follower, end: End) -> None:
        follower.end = follower.end or end
        follower.changed.set()

    def _look(
        self, after_id: int | None, token_ids: frozenset[str]
    ) -> tuple[frozenset[str], tuple[EventRecord, ...], int]:
        with self._database.read() as session:
            good = tokens.good_ids(session, token_ids, self._now())
            if after_id is None:
                return good, (), events.newest_id(session)
            found = events.page(session, events.EventFilter(after_id=after_id), limit=self._options.page_limit)
            return good, found, found[-1].id if found else after_id

    def _read_newest(self) -> int:
        with self._database.read() as session:
            return events.newest_id(session)

    def _read_page(self, after_id: int, interest: Interest) -> tuple[bool, tuple[EventRecord, ...]]:
        with self._database.read() as session:
            is_good = bool(tokens.good_ids(session, [interest.token_id], self._now()))
            which = EventFilter(
                job_name=interest.job_name, fleet_name=interest.fleet_name, project=interest.project, after_id=after_id
            )
            return is_good, events.page(session, which, limit=self._options.page_limit)
