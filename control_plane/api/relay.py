"""Relays an agent's connection to the server that manages the agent's fleet, with the agent's own token.

If the relaying server takes the fleet over, it closes the agent's connection. The agent then connects again, and
reports to this server.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from fastapi import WebSocket
from starlette.websockets import WebSocketDisconnect
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, WebSocketException

from control_plane.api.caller_threads import Workers
from control_plane.api.peers import CONNECT_SECONDS, FORWARDED, Peers
from everstep.protocol.codec import MAX_MESSAGE_BYTES
from everstep.protocol.ids import FleetName

log = logging.getLogger(__name__)

TRY_AGAIN: Final = 1013
"""Close code that makes an agent connect again later."""
ELSEWHERE: Final = "another replica of the control plane serves this fleet"
NO_CODE: Final = frozenset({1005, 1006, 1015})
"""Close codes that RFC 6455 forbids in a close frame."""


async def relay(
    websocket: WebSocket,
    peers: Peers,
    fleet: FleetName,
    secret: str,
    hello: bytes,
    *,
    silence_seconds: float,
    threads: Workers,
) -> tuple[int, str]:
    """Relay an agent's connection after its Hello until either side ends it.

    Return close code and reason for the agent. After `silence_seconds` without an answer to a ping, the other server
    counts as lost, because TCP alone would not detect a hung server; the code is then `TRY_AGAIN`. Raises
    WebSocketDisconnect if the agent has disconnected.
    """
    url = "" if FORWARDED in websocket.headers else await threads.run(peers.url_of, fleet)
    if not url:
        return TRY_AGAIN, ELSEWHERE
    try:
        async with connect(
            f"ws{url.removeprefix('http')}/v1/agents/connect",
            additional_headers={"Authorization": f"Bearer {secret}", FORWARDED: "agent"},
            ssl=peers.tls if url.startswith("https:") else None,
            compression=None,
            max_size=MAX_MESSAGE_BYTES,
            open_timeout=CONNECT_SECONDS,
            close_timeout=CONNECT_SECONDS,
            ping_interval=silence_seconds / 3,
            ping_timeout=silence_seconds,
            proxy=None,
        ) as holder:
            log.info("the server relays an agent's connection (fleet %s) to %s", fleet, url)
            await holder.send(hello)
            return await _pass_frames(websocket, holder, peers, fleet)
    except (OSError, WebSocketException) as error:
        log.warning("the server at %s does not accept an agent's connection: %s", url, error)
        return TRY_AGAIN, ELSEWHERE


async def _pass_frames(
    websocket: WebSocket, holder: ClientConnection, peers: Peers, fleet: FleetName
) -> tuple[int, str]:
    directions = [
        asyncio.create_task(_to_holder(websocket, holder)),
        asyncio.create_task(_to_agent(websocket, holder)),
        asyncio.create_task(_taken_over(peers, fleet)),
    ]
    try:
        done, _ = await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in directions:
            task.cancel()
        await asyncio.gather(*directions, return_exceptions=True)
    return next(task for task in directions if task in done).result()


async def _to_holder(websocket: WebSocket, holder: ClientConnection) -> tuple[int, str]:
    while True:
        message = await websocket.receive()
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message.get("code", 1006))
        try:
            await holder.send(message["bytes"] if message.get("bytes") is not None else message["text"])
        except ConnectionClosed as end:
            return _code_of(end)


async def _to_agent(websocket: WebSocket, holder: ClientConnection) -> tuple[int, str]:
    try:
        while True:
            await websocket.send_bytes(await holder.recv(decode=False))
    except ConnectionClosed as end:
        return _code_of(end)


async def _taken_over(peers: Peers, fleet: FleetName) -> tuple[int, str]:
    await peers.taken_over(fleet)
    return TRY_AGAIN, "this server has taken the fleet over"


def _code_of(end: ConnectionClosed) -> tuple[int, str]:
    """Return the managing server's close code and reason, or `TRY_AGAIN` if the connection broke without them."""
    if end.rcvd is None or end.rcvd.code in NO_CODE:
        return TRY_AGAIN, ELSEWHERE
    return end.rcvd.code, end.rcvd.reason
