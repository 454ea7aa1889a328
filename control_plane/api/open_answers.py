"""Ends long responses when the access token of their request becomes invalid.

Streams such as FollowLogs would otherwise outlive a revocation. From the second part of a response on, the token is
checked every `TOKEN_CHECK_SECONDS`. While the database does not answer, responses continue.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Final

from sqlalchemy.exc import SQLAlchemyError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from control_plane.api.caller_threads import Workers

log = logging.getLogger(__name__)

TOKEN_CHECK_SECONDS: Final = 1.0


class WhileTokenIsGood:
    """ASGI middleware that ends a response when the token of its request becomes invalid.

    `app` stores the token's id in the request's state. `is_good` receives the ASGI scope and a token id, and may block.
    """

    def __init__(
        self, app: ASGIApp, is_good: Callable[[Scope, str], bool], poll_seconds: float = TOKEN_CHECK_SECONDS
    ) -> None:
        self._app = app
        self._is_good = is_good
        self._look_seconds = poll_seconds
        self._threads = Workers(1, "token-check")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answering = asyncio.current_task()
        assert answering is not None
        watch: asyncio.Task[bool] | None = None

        async def send_watched(message: Message) -> None:
            nonlocal watch
            token_id = scope.get("state", {}).get("token_id")
            if watch is None and token_id is not None and message.get("more_body"):
                watch = asyncio.create_task(self._watch(scope, token_id, answering))
            await send(message)

        try:
            await self._app(scope, receive, send_watched)
        except asyncio.CancelledError:
            if watch is None or not watch.done() or answering.uncancel():
                raise
            log.info("a response to %s ended because its token expired or was revoked", scope["path"])
        finally:
            if watch is not None:
                watch.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await watch

    async def _watch(self, scope: Scope, token_id: str, answering: asyncio.Task[object]) -> bool:
        is_good = True
        while is_good:
            await asyncio.sleep(self._look_seconds)
            try:
                is_good = await self._threads.run(self._is_good, scope, token_id)
            except SQLAlchemyError as error:
                log.warning(
                    "could not check the token of a response to %s; the next check follows: %s", scope["path"], error
                )
        return answering.cancel()
