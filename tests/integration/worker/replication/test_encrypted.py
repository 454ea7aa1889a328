"""Replication over TLS. The imported tests run on encrypted connections, because this module overrides `make`.

The other tests check which peers are refused, and that no byte of a shard is readable on the network.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from everstep.protocol.ids import FleetName, NodeId, Step
from tests.fakes.identities import identity_of
from tests.integration.worker.replication.pair import HOLDER, OWNER, Pair, credentials, payload
from tests.integration.worker.replication.test_captures import (  # noqa: F401  tests of the common contract
    test_an_answer_for_what_was_not_named_ends_the_session,
)
from tests.integration.worker.replication.test_printed_lines import (  # noqa: F401
    test_every_acknowledged_step_has_its_lines_on_the_holder,
)
from tests.integration.worker.replication.test_replicas import (  # noqa: F401
    small_chunks,
    test_a_broken_line_is_dialled_again_and_sending_goes_on,
    test_a_cancelled_shard_is_no_snapshot_and_the_next_one_comes_through,
    test_a_damaged_chunk_is_wanted_again_and_alone,
    test_a_holder_is_not_silent_while_the_pacer_holds_its_chunks_back,
    test_a_holder_that_closes_its_stream_has_given_nothing,
    test_a_holder_that_falls_silent_in_the_middle_is_not_waited_for,
    test_a_slot_granted_anew_while_it_is_being_sent,
    test_a_stream_that_breaks_at_any_chunk_goes_on_where_it_stood,
    test_an_ended_generation_leaves_no_stream_open,
    test_chunks_come_in_any_order_over_any_stream_and_twice,
    test_steps_are_replicated_verified_and_acknowledged,
    test_what_is_fetched_is_what_was_asked_for,
    test_what_is_not_there_exactly_is_not_to_be_fetched,
    test_who_follows_a_fetch_is_told_of_bytes_that_are_there_the_index_first,
)
from worker.core.rounds import Vote
from worker.errors import PeerError, PeerRefused
from worker.replication.identity import PeerIdentity
from worker.replication.tcp import TcpSession
from worker.replication.tls import KEY_BYTES, TlsSocket
from worker.replication.transport import Session

pytestmark = pytest.mark.integration
HOUR = timedelta(hours=1)


@pytest.fixture
def make(make: Callable[..., Pair]) -> Callable[..., Pair]:
    return partial(make, is_encrypted=True)


async def replicate(pair: Pair, **options: Any) -> None:
    """Replicate step 1 to the holder, and wait for its acknowledgement."""
    pair.send(**options)
    pair.apply_announcement(-1, 1)
    await pair.capture(1)
    await pair.until(lambda: pair.shard.core.vote is Vote.ACKED)
    assert pair.held() == {Step(1): payload(1, pair.payload_bytes)}


BAD = {
    "another fleet": (lambda node_id: identity_of(node_id, fleet=FleetName("other")), "unknown.ca|self.signed"),
    "another installation": (lambda node_id: identity_of(node_id, secret=b"S" * 32), "signature|unknown.ca"),
    "expired": (lambda node_id: identity_of(node_id, age=24 * HOUR + timedelta(minutes=1)), "expired"),
    "not valid yet": (lambda node_id: identity_of(node_id, age=-2 * HOUR), "not yet valid|bad.certificate|unknown"),
    "another node": (lambda node_id: identity_of(NodeId("i-other")), "names everstep://main/i-other, not"),
    "no certificate": (lambda _: PeerIdentity(), "no TLS certificate yet"),
}


@pytest.mark.security
@pytest.mark.parametrize("case", BAD)
async def test_a_dialler_with_a_bad_certificate_is_refused(pair: Pair, case: str) -> None:
    build, words = BAD[case]
    with pytest.raises(PeerRefused, match=f"(?i){words}"):
        await pair.dial(credentials(OWNER, identity=build(OWNER)))
    session = await pair.dial()  # The listener still accepts a node of the generation.
    assert session.peer_names == ("everstep://main/i-holder",)
    session.close()


@pytest.mark.parametrize("case", [case for case in BAD if case != "no certificate"])
async def test_a_listener_with_a_bad_certificate_is_refused(make: Callable[..., Pair], case: str) -> None:
    build, words = BAD[case]
    pair = make()
    pair.listen(build(HOLDER))
    with pytest.raises(PeerRefused, match=f"(?i){words}"):
        await pair.dial()


@pytest.mark.parametrize("age", [timedelta(minutes=-59), 23 * HOUR])
async def test_a_certificate_is_valid_if_the_clocks_differ_by_less_than_an_hour(pair: Pair, age: timedelta) -> None:
    session = await pair.dial(credentials(OWNER, identity=identity_of(OWNER, age=age)))
    session.close()


@pytest.mark.security
async def test_a_peer_without_tls_is_refused_with_the_reason(pair: Pair) -> None:
    with pytest.raises(PeerRefused, match="rejects this node: the generation requires TLS"):
        await pair.dial(credentials(OWNER))
    assert pair.listener.refused_count == 1


async def test_a_dialler_that_requires_tls_sends_nothing_to_a_listener_without_it(make: Callable[..., Pair]) -> None:
    pair = make(is_encrypted=False)
    pair.listen()
    with pytest.raises(PeerError, match="i-holder"):
        await pair.dial(credentials(OWNER, identity=identity_of(OWNER)))


@pytest.mark.security
@pytest.mark.parametrize("is_encrypted", [False, True])
async def test_nobody_reads_a_shard_on_the_network(make: Callable[..., Pair], is_encrypted: bool) -> None:
    pair = make(is_encrypted=is_encrypted, payload_bytes=100_000)
    pair.listen()
    seen = bytearray()
    relays: list[asyncio.Task[None]] = []

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            seen.extend(data)
            writer.write(data)
        writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        onward = await asyncio.open_connection("127.0.0.3", port)
        relays.extend(asyncio.create_task(relay(*ends)) for ends in ((reader, onward[1]), (onward[0], writer)))

    port = pair.listener.port
    server = await asyncio.start_server(accept, "127.0.0.3")
    pair.listener.port = server.sockets[0].getsockname()[1]
    await replicate(pair)
    await pair.stop_sending()
    server.close()
    await asyncio.gather(*relays, return_exceptions=True)
    assert len(seen) > pair.payload_bytes
    assert [secret in seen for secret in (payload(1, 64), b"i-owner")] == [not is_encrypted] * 2


async def test_a_stream_whose_key_has_encrypted_too_much_is_replaced(pair: Pair) -> None:
    streams: list[socket.socket] = []

    class Dialler:
        async def session(self) -> TcpSession:
            return await pair.session()

        async def stream(self, session: Session, number: int) -> socket.socket:
            streams.append(await pair.stream(session, number))
            return streams[-1]

    await replicate(pair, dialler=Dialler())
    (line,) = streams
    assert isinstance(line, TlsSocket)
    assert line.sent_bytes > pair.payload_bytes
    line.sent_bytes = KEY_BYTES
    pair.apply_announcement(1, 2)
    await pair.capture(2)
    await pair.until(lambda: Step(2) in pair.held())
    assert len(streams) == 2
    assert line.fileno() == -1
