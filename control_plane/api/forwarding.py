"""Forwards requests that need a job's agents to the server that holds the lease of the job's fleet.

The agents are connected to that server, which verifies the caller's own credentials again. Its response returns
unchanged. If this server takes over the lease meanwhile, it ends the request, so that the caller can repeat it. A
forwarded request is not forwarded again.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import ip_address
from typing import Any, Final, cast

import httpx
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from control_plane.api.auth import Caller
from control_plane.api.deps import Services
from control_plane.api.errors import Unavailable, response
from control_plane.api.peers import FORWARDED
from everstep.protocol.ids import FleetName

log = logging.getLogger(__name__)

OF_AGENTS: Final = re.compile(
    r"/v1/training-jobs/(?P<job>[^/]{1,63})/(?:ranks/[^/]+/commands|snapshots(?:/.*)?|logs/follow)"
)
"""ExecuteCommand, HoldSnapshot, ReadSnapshot, ReleaseSnapshot, FollowLogs."""
_OF_ONE_CONNECTION: Final = frozenset(
    {
        *("accept-encoding", "connection", "content-length", "date", "expect", "keep-alive", "server", "te"),
        *("trailer", "transfer-encoding", "upgrade", FORWARDED),
    }
)
"""Headers of one connection, or of each server. Host is forwarded, because a browser's session is valid only there."""


_FORWARDED_FOR: Final = b"x-forwarded-for"


class Forwarding:
    """ASGI middleware that forwards requests, inside the middleware that authenticates callers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        holder = await _holder(scope) if scope["type"] == "http" else None
        if holder is None:
            await self._app(scope, receive, send)
            return
        fleet, url = holder
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body.extend(message.get("body", b""))
            if not message.get("more_body", False):
                break
        services: Services = scope["app"].state.services
        begun = asyncio.Event()
        answering = asyncio.create_task(_forward(scope, url, bytes(body), send, begun))
        leaving = asyncio.create_task(_disconnected(receive))
        taking_over = asyncio.create_task(services.peers.taken_over(fleet))
        tasks = answering, leaving, taking_over
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            has_left = leaving.done()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        failure = "this server has taken the fleet over" if answering.cancelled() else answering.result()
        if failure is not None and not has_left and not begun.is_set():
            refusal = Unavailable(
                f"The server that manages the job's fleet does not answer: {failure}.",
                hint="Retry in a moment. Another server takes the fleet over if that server has failed.",
            )
            await response(refusal, scope["state"]["request_id"])(scope, receive, send)


async def _holder(scope: Scope) -> tuple[FleetName, str] | None:
    """Return the fleet and the URL of the server for a request; None if this server answers it."""
    match = OF_AGENTS.fullmatch(scope["path"])
    services: Services = scope["app"].state.services
    if match is None or not services.registry.elsewhere or FORWARDED in Headers(scope=scope):
        return None
    caller: Caller = scope["state"]["caller"]
    return await services.caller_threads.run(services.peers.holder_of_job, match["job"], caller.project_filter)


async def _forward(scope: Scope, url: str, body: bytes, send: Send, begun: asyncio.Event) -> str | None:
    """Send a request to another server, and pass its response on. Set `begun` when the response begins.

    Return why the other server sent no response. None if its response began, even if the connection broke afterwards.
    """
    services: Services = scope["app"].state.services
    query = scope["query_string"].decode("latin-1")
    headers = [(name, value) for name, value in scope["headers"] if name.decode("latin-1") not in _OF_ONE_CONNECTION]
    headers += [(FORWARDED.encode(), scope["state"]["request_id"].encode()), (b"accept-encoding", b"identity")]
    # Send the client's address too, because the other server records it in the audit log.
    if scope.get("client") is not None:
        headers.append((_FORWARDED_FOR, scope["client"][0].encode()))
    target = f"{url}{scope.get('raw_path', scope['path'].encode()).decode('latin-1')}{f'?{query}' if query else ''}"
    try:
        async with services.peers.http().stream(scope["method"], target, headers=headers, content=body) as answer:
            kept = [(name, value) for name, value in answer.headers.raw if name.lower().decode() not in _NOT_PASSED]
            begun.set()
            await send({"type": "http.response.start", "status": answer.status_code, "headers": kept})
            async for part in answer.aiter_raw():
                await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
    except httpx.HTTPError as error:
        log.warning("the server at %s did not answer a forwarded request: %s", url, str(error) or type(error).__name__)
        return None if begun.is_set() else str(error) or type(error).__name__
    return None


_NOT_PASSED: Final = _OF_ONE_CONNECTION - {"content-length"} | {"x-amzn-requestid"}


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class LastHop:
    """ASGI middleware that believes only the last address of X-Forwarded-For, from a proxy in `trusted` (CIDR)."""

    # A proxy appends its client's address to what the client sent, so no earlier address proves anything.
    def __init__(self, app: ASGIApp, trusted: Sequence[str]) -> None:
        self._app: Any = ProxyHeadersMiddleware(cast(Any, app), list(trusted))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            values = [value for name, value in scope["headers"] if name == _FORWARDED_FOR]
            others = [(name, value) for name, value in scope["headers"] if name != _FORWARDED_FOR]
            last = values[-1].rpartition(b",")[2].strip() if values else b""
            with suppress(ValueError):
                others.append((_FORWARDED_FOR, str(ip_address(last.decode("latin-1"))).encode()))
            scope = {**scope, "headers": others}
        await self._app(scope, receive, send)
