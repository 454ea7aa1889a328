"""Sends streaming responses of unknown length.

A response ends when its source (the iterator of its body's parts) ends, or when the client disconnects or stops
reading. `control_plane.api.envelope` detects clients that stop reading.

Invariant: the server buffers data for a slow client only in the client's connection. When the response ends for any
reason, it closes the source.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send


class LiveResponse(StreamingResponse):
    """A streaming response whose length is unknown when it begins, such as followed log lines."""

    def __init__(self, chunks: AsyncGenerator[bytes, None], media_type: str) -> None:
        # X-Accel-Buffering disables the buffering of an nginx proxy, so that each part reaches the client at once.
        headers: Mapping[str, str] = {
            "cache-control": "no-store",
            "x-accel-buffering": "no",
        }
        super().__init__(chunks, media_type=media_type, headers=headers)
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all parts of the body, until the source or the client ends the response. The server calls it once."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._chunks.aclose()
