"""Sessions over TCP (`everstep.protocol.peer_messages` shows the handshake).

A stream begins as a session. After the handshake, `detach` returns its socket for use in a thread. Invariant: a peer
can send only the handshake until it has proved that it holds the generation's key. The length of every frame is checked
before its body is read.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import socket
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from everstep.protocol.codec import LENGTH, Message, decode, encode, frame
from everstep.protocol.errors import MalformedMessage, OversizedMessage, ProtocolError
from everstep.protocol.ids import Generation, NodeId, Rank, RunId
from everstep.protocol.peer_messages import (
    MAX_PEER_MESSAGE_BYTES,
    NONCE_BYTES,
    Accepted,
    Answer,
    Challenge,
    Open,
    PeerMessage,
    Refused,
    SessionKind,
    session_mac,
)
from everstep.protocol.slot import DIGEST_BYTES, digest
from worker.core.generation import is_own_run
from worker.errors import OtherGeneration, PeerLost, PeerRefused
from worker.node.network_cards import NetworkCard
from worker.node.sockets import tune
from worker.replication.identity import PeerIdentity
from worker.replication.tls import FIRST_BYTE, TlsSocket, refused
from worker.replication.transport import PeerCredentials
from worker.tasks import finish

log = logging.getLogger(__name__)
HANDSHAKE_SECONDS = 5.0
MAX_SESSIONS = 4096
"""Maximum connections of a listener. Further connections are closed unread."""
MAX_UNPROVEN = 256
"""Maximum number of sessions whose handshake is not complete. Beyond it, each new session evicts an unfinished one."""
MAX_HANDSHAKE_BYTES = 12 * 1024
"""Maximum message size before both sides are authenticated. Earlier agents offer RDMA in 8 KiB."""
ACCEPT_RETRY_SECONDS = 1.0
READ_AHEAD_BYTES = 4096
"""Bytes per read call. Most messages are smaller, so one read often returns several messages."""
CANCELLED_SECONDS = 0.05
"""Seconds in which a cancelled sender's message may still be sent, before the connection is closed."""


class TcpSession:
    """Implements `Session` on a connected TCP socket."""

    def __init__(self, line: socket.socket, opened: Open, peer: NodeId) -> None:
        self.line = line
        """The connected socket, which the session owns and closes."""
        self._loop = asyncio.get_running_loop()
        self._sending = asyncio.Lock()
        self._is_closed = False
        self._sent_count = 0
        self._received_count = 0
        self._inbox = bytearray()
        # The bytes after the handshake may belong to a stream, so the handshake must not read ahead.
        self._ahead: memoryview | None = None
        """Read buffer that may hold several messages; None during the handshake."""
        self._limit = MAX_HANDSHAKE_BYTES
        self._missing = 0
        self._arrival: asyncio.Future[None] | None = None
        """Completes when bytes arrive; None while no caller waits."""
        self._is_watched = False
        self._outlet: asyncio.Future[None] | None = None
        """Completes when the kernel accepts bytes; None while no caller waits."""
        self.opened = opened
        self.peer = peer
        self.addresses: tuple[tuple[str, int], ...] = ()

    @property
    def peer_names(self) -> tuple[str, ...] | None:
        """The names in the peer's verified certificate; None for a connection without TLS."""
        return self.line.peer_names() if isinstance(self.line, TlsSocket) else None

    async def encrypt(self, context: ssl.SSLContext, *, is_server: bool) -> None:
        """Make the TLS handshake, once and before the first message. Raises PeerLost and PeerRefused."""
        if self._is_closed:
            raise PeerLost(f"the connection to {self.peer} is closed")
        try:
            self.line = line = context.wrap_socket(self.line, server_side=is_server, do_handshake_on_connect=False)
            while True:
                try:
                    return line.do_handshake()
                except ssl.SSLWantReadError:
                    await self._readable()
                except ssl.SSLWantWriteError:
                    await self._writable()
        except ssl.SSLError as error:
            raise refused(self.peer, error) from error
        except OSError as error:
            raise PeerLost(f"the connection to {self.peer} is lost: {error}") from error

    async def begins_tls(self) -> bool:
        """Return whether the peer's first byte, which stays unread, begins a TLS handshake. Raises PeerLost."""
        while True:
            try:
                return self.line.recv(1, socket.MSG_PEEK) == FIRST_BYTE
            except BlockingIOError:
                await self._readable()
            except OSError as error:
                raise PeerLost(f"the connection to {self.peer} is lost: {error}") from error

    async def _readable(self) -> None:
        arrival = self._arrival = self._loop.create_future()
        self._loop.add_reader(self.line, _complete, arrival)
        self._is_watched = True
        try:
            await arrival
        finally:
            self._unwatch()
            self._arrival = None

    async def _writable(self) -> None:
        outlet = self._outlet = self._loop.create_future()
        self._loop.add_writer(self.line, _complete, outlet)
        try:
            await outlet
        finally:
            self._outlet = None
            if not self._is_closed:
                self._loop.remove_writer(self.line)

    async def send(self, *messages: Message) -> None:
        """Send messages. Even if the caller is cancelled, each is sent completely, or the connection is cut."""
        async with self._sending:
            data = b"".join(map(frame if self._ahead is None else self._checked_frame, messages))
            data = data[self._send_now(data) :]
            if not data:
                return
            work = asyncio.ensure_future(self._send_all(data))
            try:
                await asyncio.shield(work)
            except asyncio.CancelledError:
                await finish(self._leave(work))
                raise

    async def _leave(self, work: asyncio.Future[None]) -> None:
        """Finish sending a message of a cancelled sender within `CANCELLED_SECONDS`; otherwise cut the connection."""
        _, pending = await asyncio.wait([work], timeout=CANCELLED_SECONDS)
        if pending:
            self.close()
            work.cancel()
        await asyncio.gather(work, return_exceptions=True)

    def _send_now(self, data: bytes) -> int:
        """Send without waiting, and return the number of bytes that the kernel accepted: usually all."""
        if self._is_closed:
            raise PeerLost(f"the connection to {self.peer} is closed")
        try:
            return self.line.send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            self.close()
            raise PeerLost(f"the connection to {self.peer} is lost: {error}") from error

    async def _send_all(self, data: bytes) -> None:
        try:
            if not isinstance(self.line, TlsSocket):
                await self._loop.sock_sendall(self.line, data)
                return
            while data:
                try:
                    data = data[self.line.send(data) :]
                except BlockingIOError:
                    await self._writable()
        except OSError as error:
            self.close()
            raise PeerLost(f"the connection to {self.peer} is lost: {error}") from error

    async def receive(self) -> Message:
        try:
            while (missing := self._frame_bytes() - len(self._inbox)) > 0:
                await self._read(missing)
            end = self._frame_bytes()
            content = bytes(self._inbox[LENGTH.size : end])
            if self._ahead is not None:
                content = self._checked(content)
            message: Message = decode(content, PeerMessage)  # type: ignore[arg-type]
        except ProtocolError:
            self.close()
            raise
        del self._inbox[:end]
        return message

    def _checked_frame(self, message: Message) -> bytes:
        data = encode(message)
        checked = self._digest(self._sent_count, data)
        self._sent_count += 1
        return LENGTH.pack(DIGEST_BYTES + len(data)) + checked + data

    def _checked(self, content: bytes) -> bytes:
        """Verify the digest at the start of a received frame, and return the message that follows the digest."""
        message = content[DIGEST_BYTES:]
        if self._digest(self._received_count, message) != content[:DIGEST_BYTES]:
            raise MalformedMessage(f"message {self._received_count} of the session does not match its digest")
        self._received_count += 1
        return message

    def _digest(self, number: int, data: bytes) -> bytes:
        return digest(self.opened.nonce + number.to_bytes(8, "big") + data)

    def read_ahead(self) -> None:
        """Read several messages per system call, and exchange digests. Called after the handshake of messages."""
        # The digest covers the session and the message's number, because TCP's checksum has only 16 bits.
        self._ahead = memoryview(bytearray(READ_AHEAD_BYTES))
        self._limit = MAX_PEER_MESSAGE_BYTES + DIGEST_BYTES

    def _frame_bytes(self) -> int:
        if len(self._inbox) < LENGTH.size:
            return LENGTH.size
        (length,) = LENGTH.unpack_from(self._inbox)
        if length > self._limit:
            raise OversizedMessage(f"the peer announced a frame of {length} bytes; the limit is {self._limit}")
        return LENGTH.size + int(length)

    async def _read(self, missing: int) -> None:
        if self._is_closed:
            raise PeerLost(f"the connection to {self.peer} is closed")
        self._missing = missing
        arrival = self._arrival = self._loop.create_future()
        self._come()
        try:
            if not (arrival.done() or self._is_watched):
                # The loop keeps watching: starting and stopping the watch costs more than reading a
                # message.
                self._loop.add_reader(self.line, self._come)
                self._is_watched = True
            await arrival
        except OSError as error:  # The kernel lacks resources to watch another socket.
            self.close()
            raise PeerLost(f"the connection to {self.peer} is lost: {error}") from error
        finally:
            if self._arrival is arrival:
                self._arrival = None
            if arrival.done() and not arrival.cancelled():
                arrival.exception()  # Retrieve the error, because asyncio logs unretrieved errors.

    def _come(self) -> None:
        """Read the available bytes for the caller that waits in `_read`. Without one, the bytes stay in the kernel."""
        arrival = self._arrival
        if arrival is None or arrival.done():
            self._unwatch()
            return
        into = (
            memoryview(bytearray(self._missing))
            if self._ahead is None or self._missing > self._ahead.nbytes
            else self._ahead
        )
        try:
            count = self.line.recv_into(into)
        except BlockingIOError:
            return
        except OSError as error:
            # Under TLS 1.3, the dialler's handshake succeeds before the listener refuses the dialler's certificate. The
            # refusal then arrives as an error of the first read.
            is_refused = isinstance(error, ssl.SSLError) and self._ahead is None
            arrival.set_exception(
                refused(self.peer, error) if is_refused else PeerLost(f"the connection to {self.peer} is lost: {error}")
            )
            self.close()
        else:
            self._inbox += into[:count]
            if count:
                arrival.set_result(None)
            else:
                arrival.set_exception(PeerLost(f"{self.peer} closed the line"))

    def _unwatch(self) -> None:
        if self._is_watched:
            self._is_watched = False
            self._loop.remove_reader(self.line)

    def detach(self) -> socket.socket:
        """Return the blocking socket of a stream after its handshake. The session no longer owns it."""
        assert self._ahead is None, "what was read ahead would be lost"
        self._unwatch()
        self._is_closed = True
        self.line.setblocking(True)
        return self.line

    def close(self) -> None:
        """Close the connection immediately."""
        if not self._is_closed:
            self._is_closed = True
            self._unwatch()
            for waiting in (self._arrival, self._outlet):
                if waiting is not None and not waiting.done():
                    waiting.set_exception(PeerLost(f"the connection to {self.peer} is closed"))
            self._loop.remove_writer(self.line.fileno())
            self.line.close()


def _complete(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


async def dial(
    credentials: PeerCredentials,
    *,
    peer: NodeId,
    address: str,
    port: int,
    kind: SessionKind,
    owner_rank: Rank,
    source: NetworkCard,
    session: bytes = b"",
) -> TcpSession:
    """Open an authenticated session to another agent, at the address and port of the plan. The caller closes it.

    `kind` is part of the handshake, `owner_rank` is -1 except for replica sessions, `source` is the card to bind to.
    For a stream, `session` is the nonce of its session.

    Raises:
        PeerLost: the peer does not answer within `HANDSHAKE_SECONDS`, the connection broke, or this node has no
            descriptor or memory for another connection.
        PeerRefused: the peer rejects this node, or could not prove its identity.
    """
    try:
        line = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    except OSError as error:
        raise PeerLost(f"no connection to {peer} can be opened: {error}") from error
    opened = Open(
        run=credentials.run,
        generation=credentials.generation,
        kind=kind,
        node_id=credentials.node_id,
        owner_rank=owner_rank,
        nonce=secrets.token_bytes(NONCE_BYTES),
        session=session,
    )
    dialled = TcpSession(line, opened, peer)
    try:
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            tune(line, silence_seconds=credentials.silence_seconds)
            source.bind(line)
            await asyncio.get_running_loop().sock_connect(line, (address, port))
            if credentials.identity is not None:
                await dialled.encrypt(credentials.identity.context(is_server=False), is_server=False)
                if reason := _refusal(dialled, credentials.identity, peer):
                    raise PeerRefused(f"the node that answers as {peer} is another node: {reason}")
            await _prove(dialled, credentials, peer)
    except (OSError, TimeoutError) as error:
        dialled.close()
        raise PeerLost(f"{peer} at {address}:{port} does not answer: {error or 'timed out'}") from error
    except ProtocolError as error:
        dialled.close()
        raise PeerRefused(f"{peer} at {address}:{port} does not use Everstep's protocol: {error}") from error
    except BaseException:
        dialled.close()
        raise
    return dialled


def _refusal(session: TcpSession, identity: PeerIdentity, node_id: NodeId) -> str:
    """Return why the connection is not the required TLS connection to `node_id`; empty if it is."""
    if session.peer_names is None:
        return f"the generation requires TLS, and {session.peer} does not use it"
    if (name := identity.name_of(node_id)) not in session.peer_names:
        return f"the certificate names {', '.join(session.peer_names) or 'no agent'}, not {name}"
    return ""


async def _prove(session: TcpSession, credentials: PeerCredentials, peer: NodeId) -> None:
    opened = session.opened
    await session.send(opened)
    challenge = await session.receive()
    if isinstance(challenge, Refused):
        raise PeerRefused(f"{peer} rejects this node: {challenge.reason}")
    if not isinstance(challenge, Challenge):
        raise MalformedMessage("the peer sent no challenge")
    expected = session_mac(credentials.key, "listener", opened, challenge.nonce, challenge.node_id, credentials.job)
    if challenge.node_id != peer or not hmac.compare_digest(challenge.mac, expected):
        raise PeerRefused(
            f"the node that answers as {peer} does not hold the key of generation {credentials.generation}"
        )
    mac = session_mac(credentials.key, "dialler", opened, challenge.nonce, peer, credentials.job)
    await session.send(Answer(mac=mac))
    verdict = await session.receive()
    if isinstance(verdict, Refused):
        raise PeerRefused(f"{peer} rejects this node: {verdict.reason}")
    if not isinstance(verdict, Accepted):
        raise MalformedMessage("the peer sent no verdict")
    session.addresses = verdict.addresses
    if opened.kind != "stream":
        session.read_ahead()


Serve = Callable[[TcpSession], Awaitable[None]]


def _nobody(origin: str) -> Open:
    """Return a placeholder for the first message of a peer that has sent nothing yet."""
    return Open(
        run=RunId(""), generation=Generation(0), kind="round", node_id=NodeId(origin), owner_rank=Rank(-1), nonce=b""
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerLimits:
    """Limits of a node's listener."""

    handshake_seconds: float = HANDSHAKE_SECONDS
    session_count: int = MAX_SESSIONS
    unproven_count: int = MAX_UNPROVEN


LISTENER_LIMITS: Final = ListenerLimits()


class PeerListener:
    """Accepts sessions of the generation to which this node belongs. Rejects and counts all other sessions."""

    def __init__(
        self,
        node_id: NodeId,
        limits: ListenerLimits = LISTENER_LIMITS,
        *,
        identity: PeerIdentity | None = None,
    ) -> None:
        """`identity` answers peers that begin TLS; None refuses TLS."""
        self.node_id = node_id
        self.identity = identity
        self._limits = limits
        self.port = 0
        self.refused_count = 0
        self.promised_run: RunId | None = None
        """Run that this node last promised to join. Rejected sessions of this run are not logged as warnings."""
        self._listening: list[socket.socket] = []
        self.addresses: tuple[tuple[str, int], ...] = ()
        """Addresses and port at which the listener accepts sessions."""
        self._credentials: PeerCredentials | None = None
        self._serve: Serve | None = None
        self._sessions: dict[asyncio.Task[None], TcpSession] = {}
        self._unproven: dict[TcpSession, str] = {}
        """Sessions in their handshake, with their source addresses, oldest first."""

    def start(self, address: str, port: int = 0, *, more_cards: Sequence[NetworkCard] = ()) -> None:
        """Start listening for connections of other agents; with port 0, the kernel chooses a port. Raises OSError.

        `more_cards` are for streams. They use the same port, so that one firewall rule covers all cards; a card on
        which listening fails is skipped.
        """
        self.port = self._listen(NetworkCard(address), port)
        self.addresses = ((address, self.port),)
        for card in more_cards:
            try:
                self.addresses += ((card.address, self._listen(card, self.port)),)
            except OSError as error:
                log.warning("no streams can arrive over card %s, port %d: %s", card.address, self.port, error)

    def _listen(self, card: NetworkCard, port: int) -> int:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            card.bind(listener, port)
        except OSError:
            listener.close()
            raise
        listener.listen(128)
        self._listening.append(listener)
        self._loop().add_reader(listener, self._accept, listener)
        return int(listener.getsockname()[1])

    def expect(self, run: RunId) -> None:
        """Record the run that this node works for. Rejected sessions of its other generations cause no warning."""
        self.promised_run = run

    def admit(self, credentials: PeerCredentials, serve: Serve) -> None:
        """Accept sessions of nodes that hold the generation's key. `serve` handles each until it ends."""
        self._credentials, self._serve = credentials, serve

    async def revoke(self) -> None:
        """Close every session, and accept no session until the next call of `admit`."""
        self._credentials = self._serve = None
        tasks = list(self._sessions)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        """Stop listening, and close every session."""
        for listener in self._listening:
            self._loop().remove_reader(listener)
            listener.close()
        self._listening = []
        await self.revoke()

    @staticmethod
    def _loop() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    def _accept(self, listener: socket.socket) -> None:
        """Accept the connections in the kernel's backlog. In a task, a cancellation could lose a connection."""
        while True:
            try:
                line, origin = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            # The process has no free file descriptor.
            except OSError as error:
                log.error("no session is accepted for %g s: %s", ACCEPT_RETRY_SECONDS, error)
                self._loop().remove_reader(listener)
                self._loop().call_later(ACCEPT_RETRY_SECONDS, self._listen_again, listener)
                return
            if len(self._sessions) >= self._limits.session_count:
                self.refused_count += 1
                line.close()
                continue
            if len(self._unproven) >= self._limits.unproven_count:
                # Evict the oldest session of the address with the most unfinished ones, so that a flood
                # from one address evicts only its own.
                (crowd, _), *_ = Counter(self._unproven.values()).most_common(1)
                oldest = next(session for session, address in self._unproven.items() if address == crowd)
                del self._unproven[oldest]
                oldest.close()
                self.refused_count += 1
            line.setblocking(False)
            session = TcpSession(line, _nobody(f"{origin[0]}:{origin[1]}"), NodeId(f"{origin[0]}:{origin[1]}"))
            self._unproven[session] = origin[0]
            task = asyncio.create_task(self._session(session), name=f"peer session {session.peer}")
            self._sessions[task] = session
            task.add_done_callback(self._ended)

    def _listen_again(self, listener: socket.socket) -> None:
        if listener in self._listening:
            self._loop().add_reader(listener, self._accept, listener)

    def _ended(self, task: asyncio.Task[None]) -> None:
        session = self._sessions.pop(task)
        session.close()  # A task that was cancelled before its start has not closed the session.
        self._unproven.pop(session, None)

    async def _session(self, session: TcpSession) -> None:
        origin = session.peer
        try:
            try:
                async with asyncio.timeout(self._limits.handshake_seconds):
                    serve = await self._check(session)
            except OtherGeneration as error:
                self.refused_count += 1
                log.debug("session from %s refused: %s", origin, error)
                return
            except (TimeoutError, PeerRefused, ProtocolError) as error:
                self.refused_count += 1
                log.warning("session from %s refused: %s", origin, error or "no handshake in time")
                return
            finally:
                self._unproven.pop(session, None)
            await serve(session)
        except PeerLost:
            log.debug("session from %s ended", origin)
        except ProtocolError as error:
            self.refused_count += 1
            log.warning("session from %s closed: %s", origin, error)
        finally:
            session.close()

    async def _check(self, session: TcpSession) -> Serve:
        if await session.begins_tls():
            if self.identity is None:
                raise PeerRefused("this node has no identity for TLS")
            await session.encrypt(self.identity.context(is_server=True), is_server=True)
        opened = await session.receive()
        if not isinstance(opened, Open):
            raise MalformedMessage(f"the session begins with {type(opened).__name__}, not with Open")
        credentials, serve = self._credentials, self._serve
        if (
            credentials is None
            or serve is None
            or (opened.run, opened.generation) != (credentials.run, credentials.generation)
        ):
            reason = f"not a member of generation {opened.generation} of run {opened.run}"
            await session.send(Refused(reason=reason))
            raise OtherGeneration(reason) if is_own_run(self.promised_run, opened.run) else PeerRefused(reason)
        if credentials.identity is not None and (reason := _refusal(session, credentials.identity, opened.node_id)):
            await session.send(Refused(reason=reason))
            raise PeerRefused(reason)
        if session._is_closed:
            raise PeerLost("too many other sessions are in the handshake")
        tune(session.line, silence_seconds=credentials.silence_seconds)
        nonce = secrets.token_bytes(NONCE_BYTES)
        mac = session_mac(credentials.key, "listener", opened, nonce, self.node_id, credentials.job)
        await session.send(Challenge(node_id=self.node_id, nonce=nonce, mac=mac))
        answer = await session.receive()
        expected = session_mac(credentials.key, "dialler", opened, nonce, self.node_id, credentials.job)
        if not isinstance(answer, Answer) or not hmac.compare_digest(answer.mac, expected):
            await session.send(Refused(reason="the key does not match"))
            raise PeerRefused(f"{opened.node_id} does not hold the key of generation {opened.generation}")
        # The agent has promised a higher generation since the handshake began.
        if credentials is not self._credentials:
            raise PeerRefused("the generation is over")
        session.opened, session.peer = opened, opened.node_id
        await session.send(Accepted(addresses=self.addresses))
        if opened.kind != "stream":
            session.read_ahead()
        return serve
