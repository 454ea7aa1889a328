"""Streaming responses of unknown length.

A response ends when its source ends, or when the client disconnects or stops reading. `control_plane.api.envelope`
detects clients that stop reading.

Invariant: at most the connection's own buffer is queued for a slow client. The source is closed in every case.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send


class LiveResponse(StreamingResponse):
    """A streaming response without a known end.

    Args:
        chunks: yields the parts of the body.
        media_type: media type of the body.
    """

    def __init__(self, chunks: AsyncGenerator[bytes, None], media_type: str) -> None:
        headers: Mapping[str, str] = {
            "cache-control": "no-store",
            "x-accel-buffering": "no",
        }  # the second header disables nginx's buffering
        super().__init__(chunks, media_type=media_type, headers=headers)
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response until its end. The server calls it once."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._chunks.aclose()
