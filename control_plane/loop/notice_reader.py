"""Reads AWS events from an SQS queue, stores the notices among them, and triggers a poll of AWS for each event.

The reader deletes a message after it has stored the notice, or recorded that it cannot process the message. A message
that the queue delivers again has no further effect. Polls of AWS continue if the queue fails.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import suppress

from control_plane.cloud.errors import CloudError, MalformedEvent
from control_plane.cloud.notices import CloudEvent, EventQueue, QueuedMessage, parse
from control_plane.core.notices import OVER_SECONDS
from control_plane.db import events, nodes, notices
from control_plane.db.notices import NoticeRecord, NoticeSource
from control_plane.loop.cloud_watch import CloudWatch
from control_plane.loop.context import LoopContext
from control_plane.loop.repeating import pause
from everstep.protocol.ids import NodeId

log = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 60.0
"""Longest pause after an error of the queue. The pause doubles with each error."""
MAX_DELIVERIES = 5
"""Deliveries after which the reader records and deletes a message that it cannot process."""
EXCERPT_CHARACTERS = 300


class NoticeReader:
    """The loop that reads one queue of events. Each server has one reader. Several servers may share a queue."""

    def __init__(self, queue: EventQueue, context: LoopContext, cloud: CloudWatch) -> None:
        self._queue = queue
        self._context = context
        self._cloud = cloud
        self._stop = asyncio.Event()

    async def run(self, stop: asyncio.Event) -> None:
        """Read messages from the queue until `stop` is set."""
        self._stop = stop
        pause_seconds = FIRST_PAUSE_SECONDS
        while not stop.is_set():
            try:
                await self.read()
                pause_seconds = FIRST_PAUSE_SECONDS
            except CloudError as error:
                log.warning(
                    "could not read the queue of events; polls of AWS continue; the next attempt follows in %.0f s: %s",
                    pause_seconds,
                    error,
                )
            except Exception:
                log.exception("could not process events; the queue delivers them again")
            else:
                continue
            await pause(pause_seconds, until=stop)
            pause_seconds = min(2 * pause_seconds, LONGEST_PAUSE_SECONDS)

    async def read(self) -> int:
        """Process one batch of messages, and return their number. Raises CloudError if the queue or EC2 failed."""
        messages = await self._received()
        is_news, is_close = False, False
        for message in messages:
            taken = await asyncio.to_thread(self._take, message)
            is_news = is_news or taken is not None
            is_close = is_close or (taken is not None and taken.is_scheduled_change)
        if is_close:
            self._cloud.poll_details()
        elif is_news:
            self._cloud.poll_now()
        if is_news:
            self._cloud.event_arrived()
            self._context.registry.hint()
        return len(messages)

    async def _received(self) -> tuple[QueuedMessage, ...]:
        """Wait for messages in a daemon thread, which is abandoned if the server stops meanwhile."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[tuple[QueuedMessage, ...]] = loop.create_future()

        def settle(settled: Callable[[], None]) -> None:
            with suppress(RuntimeError):  # The server has stopped and closed its event loop.
                loop.call_soon_threadsafe(lambda: None if answer.done() else settled())

        def receive() -> None:
            try:
                messages = self._queue.receive()
            except Exception as error:
                failed = error
                settle(lambda: answer.set_exception(failed))
            else:
                settle(lambda: answer.set_result(messages))

        # A server that stops does not wait for its long poll, because its leases and port must be free immediately. The
        # queue later redelivers the messages of the abandoned poll.
        threading.Thread(target=receive, name="events", daemon=True).start()
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait((answer, stopping), return_when=asyncio.FIRST_COMPLETED)
            return answer.result() if answer.done() else ()
        finally:
            answer.cancel()
            stopping.cancel()

    def _take(self, message: QueuedMessage) -> CloudEvent | None:
        try:
            event = parse(message.body)
            if event is not None and event.kind is not None:
                self._store(event)
        except MalformedEvent as error:
            self._refuse(message, str(error))
            event = None
        except CloudError:
            raise
        except Exception as error:
            if message.delivery_count < MAX_DELIVERIES:
                raise
            log.exception(
                "could not process message %s in %d deliveries; deleted it", message.message_id, message.delivery_count
            )
            self._refuse(message, repr(error))
            event = None
        self._queue.delete([message.receipt])
        return event

    def _store(self, event: CloudEvent) -> None:
        assert event.kind is not None  # `_take` calls this method only for events with a kind.
        now = self._context.now()
        if event.ends_at is not None and (now - event.ends_at).total_seconds() > OVER_SECONDS:
            log.info("ignored the event '%s' of %s, because it is too old", event.detail_type, event.at)
            return
        ids = self._in_block(event.capacity_reservation_id) if event.capacity_reservation_id else event.instance_ids
        with self._context.database.write() as session:
            for node_id in ids:
                notice = NoticeRecord(
                    node_id=node_id,
                    kind=event.kind,
                    event_id=event.event_id,
                    source=NoticeSource.EVENT,
                    message=event.message,
                    ends_at=event.ends_at,
                )
                if notices.record(session, notice, now):
                    fleet = nodes.get(session, node_id).fleet_name
                    events.add(session, "NoticeReceived", event.message, now, fleet_name=fleet, node_id=node_id)

    def _in_block(self, reservation: str) -> tuple[NodeId, ...]:
        with self._context.database.read() as session:
            known = [NodeId(node.id) for node in nodes.of_fleet(session)]
        found = self._context.operator.describe_instances(known)
        return tuple(node_id for node_id in known if found[node_id].capacity_reservation_id == reservation)

    def _refuse(self, message: QueuedMessage, why: str) -> None:
        excerpt = message.body[:EXCERPT_CHARACTERS].encode("unicode_escape").decode()
        with self._context.database.write() as session:
            words = f"message {message.message_id} of the queue of events is dropped: {why}: {excerpt}"
            events.add(session, "EventRefused", words, self._context.now())
