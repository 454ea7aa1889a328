"""Answers that go on: until their source ends, their reader leaves, or their reader stops reading.

Invariant: what waits for a reader is bounded by the connection's own buffer; a reader that takes nothing for `WRITE_SECONDS` is dropped, which it
sees as an answer that was cut off; the source is closed in every case.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from typing import Final

from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

log = logging.getLogger(__name__)

WRITE_SECONDS: Final = 20.0


class LiveResponse(StreamingResponse):
    """An answer whose end is not known when it begins.

    Args:
        chunks: what is sent, as it comes.
        media_type: of all of it.
        write_seconds: how long a reader may take nothing.
    """

    def __init__(self, chunks: AsyncGenerator[bytes, None], media_type: str, *, write_seconds: float = WRITE_SECONDS) -> None:
        headers: Mapping[str, str] = {"cache-control": "no-store", "x-accel-buffering": "no"}  # the second: nginx passes on what it has
        super().__init__(chunks, media_type=media_type, headers=headers)
        self._chunks = chunks
        self._write_seconds = write_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the end; called once by the server."""

        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(self._write_seconds):
                await send(message)

        try:
            await super().__call__(scope, receive, send_in_time)
        except TimeoutError:
            # Returning without the end of the body makes the server close the connection: the reader, if it comes back, knows that there was more.
            log.info("request %s: its reader took nothing for %.0f s and is dropped", scope["state"]["request_id"], self._write_seconds)
        finally:
            await self._chunks.aclose()
