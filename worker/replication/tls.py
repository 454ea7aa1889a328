"""TLS for connections between agents: a socket that behaves like a plain socket.

OpenSSL encrypts in the calling thread without the interpreter lock. Invariant: a `TlsSocket` never sends plain bytes,
not even after `shutdown`.
"""

from __future__ import annotations

import select
import socket
import ssl
import struct
from collections.abc import Iterable
from typing import Any, Final

from worker.errors import PeerRefused

FIRST_BYTE: Final = b"\x16"
"""First byte of a TLS connection (RFC 8446, section 5.1). Without TLS, the first byte is zero: part of a length."""
# OpenSSL accepts all bytes of a call or none, so smaller calls report progress more often on a slow link.
SEND_BYTES: Final = 64 * 1024
"""Maximum bytes that one call of `send` encrypts."""
KEY_BYTES: Final = 2**38
"""Bytes that one key may encrypt: AES-GCM is safe for 2^24.5 records of 16 KiB (RFC 8446, section 5.5)."""
_TIMEVAL = struct.Struct("ll")


class TlsSocket(ssl.SSLSocket):
    """A connected socket with TLS, whose file descriptor never blocks.

    After `setblocking(True)`, methods wait as long as SO_SNDTIMEO and SO_RCVTIMEO allow, then raise BlockingIOError.
    """

    is_waiting = False
    """True if `send` and `recv_into` wait for the peer, as set by `setblocking`."""
    sent_bytes = 0

    @property
    def is_worn(self) -> bool:
        """True if this connection's key has encrypted `KEY_BYTES`. The caller then opens a new connection."""
        return self.sent_bytes >= KEY_BYTES

    def setblocking(self, flag: bool, /) -> None:
        """Choose whether `send` and `recv_into` wait for the peer, or raise BlockingIOError at once."""
        self.is_waiting = flag

    def send(self, data: Any, flags: int = 0, /) -> int:
        """Encrypt and send the first bytes of `data`.

        After BlockingIOError, the caller must send the same bytes again.
        """
        with memoryview(data) as whole, whole[:SEND_BYTES] as part:
            while True:
                try:
                    # OpenSSL may have sent a part of the bytes before BlockingIOError.
                    count = super().send(part, flags)
                except (ssl.SSLWantWriteError, ssl.SSLWantReadError) as error:
                    self._wait(select.POLLOUT, socket.SO_SNDTIMEO, error)
                else:
                    self.sent_bytes += count
                    return count

    def sendmsg(self, buffers: Iterable[Any], *_: Any) -> int:  # type: ignore[override]
        """Encrypt and send the first of `buffers`, and return the number of sent bytes."""
        return self.send(next(iter(buffers)))

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0, /) -> int:  # noqa: ARG002
        """Receive decrypted bytes. With MSG_WAITALL, a time limit can leave the buffer partly filled."""
        filled = 0
        with memoryview(buffer) as whole:
            while filled < whole.nbytes:
                try:
                    with whole[filled:] as rest:
                        count = self._decrypt(rest)
                except BlockingIOError:
                    if filled:
                        break
                    raise
                filled += count
                if count == 0 or not flags & socket.MSG_WAITALL:
                    break
        return filled

    def _decrypt(self, target: memoryview) -> int:
        while True:
            try:
                return super().recv_into(target)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
                self._wait(select.POLLIN, socket.SO_RCVTIMEO, error)

    def shutdown(self, how: int, /) -> None:
        """Shut the connection down, so that a waiting thread wakes up. The socket keeps its TLS session."""
        socket.socket.shutdown(self, how)

    def _wait(self, event: int, limit: int, error: ssl.SSLError) -> None:
        """Wait until the socket can send or receive what TLS needs, or raise BlockingIOError at its time limit."""
        if self.is_waiting:
            # OpenSSL holds received bytes in its own buffer, where the kernel's blocking calls do not see them.
            seconds, micros = _TIMEVAL.unpack(self.getsockopt(socket.SOL_SOCKET, limit, _TIMEVAL.size))
            poll = select.poll()
            poll.register(self, event)
            if poll.poll((1000 * seconds + micros / 1000) or None):
                return
        raise BlockingIOError(f"TLS needs the peer: {error}") from error

    def peer_names(self) -> tuple[str, ...]:
        """Return the URIs in the peer's verified certificate. Valid after the handshake."""
        certificate = self.getpeercert() or {}
        names: Any = certificate.get("subjectAltName", ())
        return tuple(str(value) for kind, value in names if kind == "URI")


def refused(peer: str, error: OSError) -> PeerRefused:
    """Return the error for a failed handshake, with OpenSSL's reason and the remedy."""
    reason = (
        error.verify_message
        if isinstance(error, ssl.SSLCertVerificationError)
        else getattr(error, "reason", None) or str(error)
    )
    return PeerRefused(
        f"the TLS handshake with {peer} failed: {reason}. Check the clocks of both nodes, and that both agents reach "
        "the control plane, which renews certificates"
    )
