"""Websocket endpoint for agents. Each node's agent has one connection, with binary frames of `everstep.protocol.codec`.

    agent                                          control plane
    GET /v1/agents/connect, Authorization: Bearer <join token, or session token>
                                     ◀──           HTTP 403: the token is unknown, used up or not an agent's
    Hello                            ──▶
                                     ◀──           AgentWelcome with the session token for later connections
                                     ◀──           PeerCertificate, and again every RENEWAL_SECONDS
    AgentReport …                    ◀─▶           commands …

A join token is bound to a fleet. It admits an instance that EC2 reports as a pending or running member of the fleet's
group and that has not joined before. The join is complete when the agent sends its first report after AgentWelcome.
Until then, an agent that did not receive its session token can use its join token again. After the join, the server
accepts only the session token from this node. It rejects every join token until an administrator resets the session
(ResetNodeSession).

A session token is bound to its node. The control plane revokes it when the node ends or the fleet is deleted. After a
revocation, the server closes the node's connection within `SESSION_CHECK_SECONDS`. A session token that an agent
obtained through STS (`routes.attestation`) also expires; the server renews it while a connection is open.

    close code   reason                                      reaction of the agent, which always reconnects
    1013         the cloud or the fleet is not ready, or     retries later, at the next address
                 the server that manages the fleet does
                 not answer
    1009         a message is too long                       retries later; a bug, or another version
    4400         a message is malformed                      like 1009; the server counts 1009, 4400 and 4426 per node
    4401         the session is revoked or another node's    tries its join token
    4403         EC2 does not list the node in the group     retries later: EC2's lists lag behind
    4408         the agent was silent for too long           connects again
    4409         the node has a newer connection             connects again
    4410         the node has joined before                  tries its session token if it has one
    4426         the agent has another protocol version      retries later: a person updates one of the two

If another server manages the fleet, this server relays the connection to it (`control_plane.api.relay`).

Invariant: the registry of connected agents receives a connection only after the server has checked its token and node.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from types import UnionType
from typing import TypeVar

from fastapi import APIRouter, WebSocket
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session
from starlette.websockets import WebSocketDisconnect, WebSocketState

from control_plane.api.auth import bearer, find_token
from control_plane.api.caller_threads import STRANGER_SECONDS
from control_plane.api.deps import Services
from control_plane.api.errors import Unauthenticated
from control_plane.api.relay import ELSEWHERE, TRY_AGAIN, relay
from control_plane.api.routes.attestation import SESSION_SECONDS
from control_plane.cloud.errors import CloudError
from control_plane.cloud.operator import Ec2State
from control_plane.core.states import NodeState
from control_plane.core.timeouts import HELLO_SECONDS, SEND_SECONDS
from control_plane.db import events, fleets, nodes, tokens
from control_plane.db.errors import DatabaseError, NotFound
from control_plane.db.nodes import AgentFacts
from control_plane.db.tokens import NewToken, Role, TokenKind, TokenRecord
from control_plane.gate import TRUST
from control_plane.loop.agents import AgentConnection
from everstep.host.log_records import about
from everstep.protocol.agent_messages import (
    ALREADY_JOINED,
    NOT_YOURS,
    AgentToControl,
    AgentWelcome,
    CommandEnded,
    Hello,
    LogLines,
    PeerCertificate,
    SnapshotBytes,
    SnapshotHeld,
)
from everstep.protocol.certificates import RENEWAL_SECONDS
from everstep.protocol.codec import PROTOCOL_MINOR, decode, encode
from everstep.protocol.errors import MalformedMessage, ProtocolError, UnknownVersion
from everstep.protocol.ids import FleetName, NodeId
from everstep.protocol.shared_lists import SharedLists

log = logging.getLogger(__name__)

router = APIRouter()

T = TypeVar("T")

SILENT_LEASES = 4.0
"""Time without a report after which the server closes an agent's connection, as a multiple of `lease_seconds`.

The agent then reconnects. A healthy agent reports three times within `lease_seconds`.
"""

MALFORMED = 4400
NOT_A_MEMBER = 4403
SILENT = 4408
SUPERSEDED = 4409
OTHER_VERSION = 4426
SESSION_CHECK_SECONDS = 10.0
"""Interval at which an open connection checks that its session was not revoked."""
OVERSIZED = 1009
"""Close code (RFC 6455) that the websocket library sends if an agent's message is longer than the limit."""
MAX_REASON_BYTES = 123
"""Size limit of a close frame's reason in UTF-8 (RFC 6455)."""
MESSAGE_SECONDS = 1 / 128
BYTES_PER_SECOND = 2 * 1024 * 1024
SNAPSHOT_BYTES_PER_SECOND = 256 * 1024 * 1024
"""Like `BYTES_PER_SECOND`, for the bytes of snapshots, which decode 25 times faster (measured on an Intel Xeon)."""
CONNECTION_SECONDS = 0.05
"""Seconds that a new connection costs an agent (`Pace`)."""


class _Refusal(Exception):
    """Raised to close an agent's connection with a close code and a reason."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


@dataclass(frozen=True, slots=True)
class _Admission:
    fleet: FleetName
    secret: str
    session_id: str
    is_join: bool
    """True if the agent connected with a join token. The agent's first report then completes the join."""


def reading_seconds(message: AgentToControl, byte_count: int) -> float:
    """Return what an agent pays (`Pace`) for a message of `byte_count` bytes.

    While an agent waits, the server does not read from it, so that only its own connection is slow.
    """
    quick = len(message.data) if isinstance(message, SnapshotBytes) else 0
    return MESSAGE_SECONDS + quick / SNAPSHOT_BYTES_PER_SECOND + (byte_count - quick) / BYTES_PER_SECOND


@router.websocket("/v1/agents/connect")
async def connect(websocket: WebSocket) -> None:
    """Serve one agent's connection until either side ends it."""
    services: Services = websocket.app.state.services
    try:
        secret = bearer(websocket.headers.get("authorization"))
        token = await services.handshakes.run(find_token, services, secret)
    except Unauthenticated:
        token = None
    except SQLAlchemyError as error:
        # Accept the handshake first. If it were refused (HTTP 403), the agent would consider its token invalid.
        await websocket.accept()
        await _refuse(services, websocket, "?", None, _database_away(error))
        return
    if token is None or token.kind == TokenKind.USER:
        await services.strangers.pay(STRANGER_SECONDS)
        await websocket.close()  # Close the socket before accepting it, so that the client receives HTTP 403.
        return
    trust: Callable[[str], None] | None = websocket.scope.get("state", {}).get(TRUST)
    if trust is not None and token.kind == TokenKind.SESSION:
        # A join token belongs to all instances of a fleet: their number has no limit here.
        trust(f"session {token.id}")
    await websocket.accept()
    node_id, proven = token.node_id or "?", token.node_id
    try:
        hello, raw = await _hello(websocket)
        node_id = hello.node_id
        fleet = FleetName(token.fleet_name or "")
        if services.registry.is_elsewhere(fleet):
            proven = None  # Count no rejected message of this agent here: the fleet's server counts it.
            with about(node=hello.node_id):
                code, reason = await relay(
                    websocket,
                    services.peers,
                    fleet,
                    secret,
                    raw,
                    silence_seconds=services.timeouts.lease_seconds,
                    threads=services.agent_threads,
                )
            raise _Refusal(code, reason)
        admission = await services.agent_threads.run(_admit, services, token, secret, hello)
        proven = hello.node_id
        await services.registry.pace_of(hello.node_id).pay(CONNECTION_SECONDS)
        with about(node=hello.node_id):
            await services.agent_threads.run(_note, services, hello, admission)
            await _serve(websocket, services, hello, admission)
    except _Refusal as refusal:
        await _refuse(services, websocket, node_id, proven, refusal)
    except SQLAlchemyError as error:
        await _refuse(services, websocket, node_id, proven, _database_away(error))
    except WebSocketDisconnect as gone:
        log.info("agent of node %s: disconnected (%d)", node_id, gone.code)
        _count(services, proven, gone.code)


async def _refuse(
    services: Services, websocket: WebSocket, node_id: str, proven: str | None, refusal: _Refusal
) -> None:
    log.warning("agent of node %s: closed with %d: %s", node_id, refusal.code, refusal.reason)
    _count(services, proven, refusal.code)
    await _close(websocket, refusal)


def _database_away(error: SQLAlchemyError) -> _Refusal:
    return _Refusal(TRY_AGAIN, f"the database does not answer: {type(error).__name__}")


def _count(services: Services, proven: str | None, code: int) -> None:
    """Add one to the node's count of rejected messages, if the token proves which node sent the message."""
    if proven is not None and code in (MALFORMED, OVERSIZED, OTHER_VERSION):
        services.registry.refuse(NodeId(proven))


async def _hello(websocket: WebSocket) -> tuple[Hello, bytes]:
    try:
        async with asyncio.timeout(HELLO_SECONDS):
            raw = await _receive(websocket)
        hello = _decoded(raw, Hello)
    except TimeoutError as error:
        raise _Refusal(SILENT, f"no Hello arrived within {HELLO_SECONDS:.0f} s") from error
    return hello, raw


async def _serve(websocket: WebSocket, services: Services, hello: Hello, admission: _Admission) -> None:
    connection = services.registry.accept(hello, admission.fleet)
    admitted_at = services.now()
    log.info("agent of node %s (fleet %s, %s) is connected", hello.node_id, admission.fleet, hello.version)
    try:
        welcome = AgentWelcome(
            session_token=admission.secret,
            fleet=admission.fleet,
            timeouts=services.timeouts,
            protocol_minor=PROTOCOL_MINOR,
        )
        await _send(websocket, encode(welcome))
        if hello.public_key is not None:
            await _send(websocket, encode(_certificate(services, hello, admission.fleet)))
        reading = asyncio.create_task(_read(websocket, services, connection, hello, admission, admitted_at))
        writing = asyncio.create_task(_write(websocket, services, connection, admission.fleet))
        try:
            done, _ = await asyncio.wait((reading, writing), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (reading, writing):
                task.cancel()
            await asyncio.gather(reading, writing, return_exceptions=True)
        for task in done:
            task.result()
    finally:
        connection.close()


async def _read(
    websocket: WebSocket,
    services: Services,
    connection: AgentConnection,
    hello: Hello,
    admission: _Admission,
    admitted_at: datetime,
) -> None:
    lists, node_id, pace = SharedLists(), hello.node_id, services.registry.pace_of(hello.node_id)
    is_joining = admission.is_join
    checked_at = certified_at = admitted_at
    patience = services.timeouts.lease_seconds * SILENT_LEASES
    while True:
        try:
            async with asyncio.timeout(patience):
                data = await _receive(websocket)
        except TimeoutError as error:
            raise _Refusal(SILENT, f"no message arrived for {patience:.0f} s") from error
        report: AgentToControl = _decoded(data, AgentToControl)
        await pace.pay(reading_seconds(report, len(data)))
        now = services.now()
        if not 0 <= (now - checked_at).total_seconds() < SESSION_CHECK_SECONDS:
            # A negative time since the last check means that the clock was set back. The session is then checked now.
            await _check_session(services, node_id, admission.session_id)
            checked_at = now
            if hello.public_key is not None and not 0 <= (now - certified_at).total_seconds() < RENEWAL_SECONDS:
                services.registry.send(node_id, _certificate(services, hello, admission.fleet))
                certified_at = now
        if isinstance(report, LogLines):
            connection.lines(report)
            continue
        if isinstance(report, CommandEnded):
            connection.command_ended(report)
            continue
        if isinstance(report, SnapshotHeld | SnapshotBytes):
            connection.snapshot_answered(report)
            continue
        try:
            report = lists.complete(report)
        except MalformedMessage as error:
            raise _Refusal(MALFORMED, str(error)) from error
        if report.node_id != node_id:
            raise _Refusal(MALFORMED, f"node {report.node_id} sent a report on the connection of {node_id}")
        if is_joining:
            await services.agent_threads.run(_complete_join, services, node_id, admission.session_id)
            is_joining = False
        connection.report(report)


def _certificate(services: Services, hello: Hello, fleet: FleetName) -> PeerCertificate:
    assert hello.public_key is not None
    return services.authorities.issue(fleet, hello.node_id, hello.public_key, services.now())


async def _write(websocket: WebSocket, services: Services, connection: AgentConnection, fleet: FleetName) -> None:
    while (message := await connection.next_message()) is not None:
        await _send(websocket, encode(message))
    if services.registry.is_elsewhere(fleet):
        raise _Refusal(TRY_AGAIN, ELSEWHERE)
    raise _Refusal(SUPERSEDED, "the node has a newer connection")


async def _receive(websocket: WebSocket) -> bytes:
    message = await websocket.receive()
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message.get("code", 1006))
    data = message.get("bytes")
    if data is None:
        raise _Refusal(MALFORMED, "the agent sent a text frame; messages are binary")
    return bytes(data)


async def _send(websocket: WebSocket, data: bytes) -> None:
    try:
        async with asyncio.timeout(SEND_SECONDS):
            await websocket.send_bytes(data)
    except TimeoutError as error:
        raise _Refusal(SILENT, f"the agent received nothing for {SEND_SECONDS:.0f} s") from error


async def _close(websocket: WebSocket, refusal: _Refusal) -> None:
    if websocket.application_state is WebSocketState.CONNECTED and websocket.client_state is WebSocketState.CONNECTED:
        # The agent may have closed the connection first, for example while this server's process was suspended.
        with suppress(WebSocketDisconnect):
            await websocket.close(refusal.code, refusal.reason.encode()[:MAX_REASON_BYTES].decode(errors="ignore"))


def _decoded(data: bytes, kind: type[T] | UnionType) -> T:
    try:
        message: T = decode(data, kind)  # type: ignore[arg-type]  # msgspec accepts a union as type
        return message
    except UnknownVersion as error:
        raise _Refusal(OTHER_VERSION, str(error)) from error
    except ProtocolError as error:
        raise _Refusal(MALFORMED, f"{type(error).__name__}: {error}") from error


def _admit(services: Services, token: TokenRecord, secret: str, hello: Hello) -> _Admission:
    """Check the token against the Hello and the cloud, and return the admission.

    Blocks on the database and, for a join token, on the cloud. A join also creates the session token.

    Args:
        services: provide the database, the cloud operator and the clock.
        token: the database record of the token.
        secret: the token itself. An agent that connects with a session token keeps this token for later connections.
        hello: the agent's first message, not verified yet.

    Returns:
        The fleet and the session token.

    Raises:
        _Refusal: the token is not valid for this node, the node is not a member of the fleet's group or has joined
            before, or the cloud did not answer.
    """
    assert token.fleet_name is not None
    fleet_name = FleetName(token.fleet_name)
    if token.kind == TokenKind.SESSION:
        if token.node_id != hello.node_id:
            raise _Refusal(NOT_YOURS, f"the session token belongs to another node than {hello.node_id}")
        return _Admission(fleet_name, secret, token.id, is_join=False)
    try:
        with services.database.read() as session:
            fleet = fleets.get(session, fleet_name)
            _require_not_joined(session, hello.node_id)
        _require_member(services, fleet.auto_scaling_group_name, hello.node_id)
    except NotFound as error:
        raise _Refusal(TRY_AGAIN, f"the fleet {fleet_name} is not registered yet") from error
    except CloudError as error:
        raise _Refusal(
            TRY_AGAIN, f"the cloud did not report whether {hello.node_id} is a member: {error.message}"
        ) from error
    with services.database.write() as session:
        new = NewToken(
            kind=TokenKind.SESSION,
            role=Role.AGENT,
            fleet_name=fleet_name,
            node_id=hello.node_id,
            description=f"agent of {hello.node_id}",
        )
        session_secret, record = tokens.mint(session, new, services.now())
    return _Admission(fleet_name, session_secret, record.id, is_join=True)


def _require_not_joined(session: Session, node_id: NodeId) -> None:
    if nodes.has_joined(session, node_id):
        # The reason must fit into a close frame: at most 123 bytes.
        raise _Refusal(
            ALREADY_JOINED,
            (f"{node_id} joined before. Use its session token, or run: everstep nodes reset-session {node_id}"),
        )


def _require_member(services: Services, group_name: str, node_id: NodeId) -> None:
    state = services.memberships.state(group_name, node_id)
    if state is None:
        raise _Refusal(NOT_A_MEMBER, f"{node_id} is not a member of the group {group_name}")
    if state is Ec2State.ABSENT:
        raise _Refusal(NOT_A_MEMBER, f"EC2 does not list {node_id} yet")
    if state.has_ended:
        raise _Refusal(NOT_A_MEMBER, f"EC2 reports {node_id} as {state}")


def _note(services: Services, hello: Hello, admission: _Admission) -> None:
    now = services.now()
    facts = AgentFacts(
        node_id=hello.node_id,
        fleet_name=admission.fleet,
        address=hello.address,
        peer_port=hello.peer_port,
        memory_bytes=hello.memory_bytes,
        agent_id=hello.agent_id,
        version=hello.version,
    )
    try:
        with services.database.write() as session:
            nodes.note_hello(session, facts, initial_state=NodeState.JOINING, now=now)
            if not admission.is_join and nodes.mark_joined(session, hello.node_id, now):
                # Revoke the session tokens of earlier joins of this node that no agent completed with a report.
                tokens.revoke_sessions(session, hello.node_id, now, but=admission.session_id)
            if admission.is_join:
                message = f"Node {hello.node_id} joined the fleet {admission.fleet}."
                events.add(session, "NodeJoined", message, now, fleet_name=admission.fleet, node_id=hello.node_id)
    except DatabaseError as error:
        raise _Refusal(TRY_AGAIN, "the database did not store the join") from error


def _complete_join(services: Services, node_id: NodeId, session_id: str) -> None:
    """Record that the agent received its session token, and revoke all other sessions of the node.

    Blocks on the database. If two agents join as the same node at the same time, the first agent that reports keeps the
    session.
    """
    now = services.now()
    with services.database.write() as session:
        if not nodes.mark_joined(session, node_id, now):
            _require_not_joined(session, node_id)
        tokens.revoke_sessions(session, node_id, now, but=session_id)


async def _check_session(services: Services, node_id: NodeId, session_id: str) -> None:
    """Check an open connection's session (`_require_session`). Skip the check while the database does not answer.

    An outage of the database, for example a fail-over, must not disconnect all agents.
    """
    try:
        await services.agent_threads.run(_require_session, services, node_id, session_id)
    except SQLAlchemyError as error:
        log.warning("agent of node %s: could not check its session; the next check follows: %s", node_id, error)


def _require_session(services: Services, node_id: NodeId, session_id: str) -> None:
    """Check that the session of an open connection was not revoked, and renew a session that expires.

    The server renews the session after half of its lifetime, so a connected agent always has a valid session token.
    With this token, the agent can reconnect to a restarted server even if AWS does not answer.
    """
    now = services.now()
    with services.database.read() as session:
        if tokens.is_revoked(session, session_id):
            raise _Refusal(NOT_YOURS, f"the session of {node_id} was revoked")
        is_due = tokens.expires_before(session, session_id, now + timedelta(seconds=SESSION_SECONDS / 2))
    if is_due:
        with services.database.write() as session:
            tokens.extend(session, session_id, now + timedelta(seconds=SESSION_SECONDS))
