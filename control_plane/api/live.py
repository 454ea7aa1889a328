"""Answers that go on: until their source ends, their reader leaves, or their reader stops reading (`control_plane.api.envelope`).

Invariant: what waits for a reader is bounded by the connection's own buffer; the source is closed in every case.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send


class LiveResponse(StreamingResponse):
    """An answer whose end is not known when it begins.

    Args:
        chunks: what is sent, as it comes.
        media_type: of all of it.
    """

    def __init__(self, chunks: AsyncGenerator[bytes, None], media_type: str) -> None:
        headers: Mapping[str, str] = {
            "cache-control": "no-store",
            "x-accel-buffering": "no",
        }  # the second: nginx passes on what it has
        super().__init__(chunks, media_type=media_type, headers=headers)
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the end; called once by the server."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._chunks.aclose()
