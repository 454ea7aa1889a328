"""Sends streaming responses of unknown length, until the source ends or the client disconnects or stops reading.

Invariant: data for a slow client waits only in its connection. The end of the response closes the source.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send


class LiveResponse(StreamingResponse):
    """A streaming response of unknown length, such as followed log lines."""

    def __init__(self, chunks: AsyncGenerator[bytes, None], media_type: str) -> None:
        # X-Accel-Buffering disables the buffering of an nginx proxy, so that each part reaches the client at once.
        headers: Mapping[str, str] = {
            "cache-control": "no-store",
            "x-accel-buffering": "no",
        }
        super().__init__(chunks, media_type=media_type, headers=headers)
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._chunks.aclose()
