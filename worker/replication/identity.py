"""The TLS identity of an agent: its private key, its certificate, and the certificate authority of its fleet.

    Hello(public key) ──▶ control plane ──▶ PeerCertificate, and again before it expires

The key never leaves the node. A file keeps the identity for the next agent process, which may start while it cannot
reach the control plane. Invariant: a TLS context trusts certificates of this node's fleet only.
"""

from __future__ import annotations

import logging
import os
import ssl
from pathlib import Path

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from everstep.protocol.agent_messages import PeerCertificate
from everstep.protocol.certificates import peer_uri
from everstep.protocol.ids import NodeId
from worker.errors import PeerRefused
from worker.node.state_directory import write_durably
from worker.replication.tls import TlsSocket

log = logging.getLogger(__name__)


class _Kept(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    private_key: bytes
    """Ed25519, 32 bytes. The file therefore has mode 0600."""
    certificate: PeerCertificate


_decoder = msgspec.msgpack.Decoder(_Kept)


class PeerIdentity:
    """The key and the certificate with which this agent proves its node and its fleet to other agents."""

    def __init__(self, path: Path | None = None) -> None:
        """Read the identity of an earlier agent process from `path`, or create a key. None keeps it in memory only."""
        self._path = path
        self._contexts: tuple[ssl.SSLContext, ssl.SSLContext] | None = None
        """TLS contexts of the dialling and the listening side; None before the first certificate."""
        self._fleet = ""
        kept = self._read()
        self._key = (
            Ed25519PrivateKey.generate() if kept is None else Ed25519PrivateKey.from_private_bytes(kept.private_key)
        )
        if kept is not None:
            self._use(kept.certificate)

    @property
    def public_key(self) -> bytes:
        """The key that the control plane certifies: Ed25519, 32 bytes."""
        return self._key.public_key().public_bytes_raw()

    def name_of(self, node_id: NodeId) -> str:
        """Return the name that the certificate of a node of this fleet contains."""
        return peer_uri(self._fleet, node_id)

    def accept(self, certificate: PeerCertificate) -> None:
        """Use a new certificate from now on, and store it if possible. Ignore one for the key of an earlier process."""
        try:
            self._use(certificate)
        except ssl.SSLError as error:
            log.error("the control plane sent a certificate that does not fit this agent's key: %s", error)
            return
        if self._path is None:
            return
        try:
            write_durably(
                self._path,
                msgspec.msgpack.encode(_Kept(private_key=self._key.private_bytes_raw(), certificate=certificate)),
            )
        except OSError as error:
            log.warning("the certificate cannot be stored for the next agent process of this node: %s", error)

    def context(self, *, is_server: bool) -> ssl.SSLContext:
        """Return the TLS context for a new connection. Raises PeerRefused before the first certificate."""
        if self._contexts is None:
            raise PeerRefused("this node has no TLS certificate yet: the control plane sends it after the agent joins")
        return self._contexts[is_server]

    def _read(self) -> _Kept | None:
        if self._path is None:
            return None
        try:
            return _decoder.decode(self._path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("%s cannot be read, so this agent needs a new certificate: %s", self._path, error)
            return None

    def _use(self, certificate: PeerCertificate) -> None:
        pem = self._key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        pem += ssl.DER_cert_to_PEM_cert(certificate.certificate).encode()
        self._contexts = (
            _context(ssl.PROTOCOL_TLS_CLIENT, pem, certificate.authority),
            _context(ssl.PROTOCOL_TLS_SERVER, pem, certificate.authority),
        )
        self._fleet = certificate.fleet


def _context(side: ssl._SSLMethod, key_and_certificate: bytes, authority: bytes) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # The certificate names a node, not a host. `TcpSession.encrypt` checks the name.
    context.verify_mode = ssl.CERT_REQUIRED
    context.sslsocket_class = TlsSocket
    context.load_verify_locations(cadata=authority)
    if side is ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0
    with open(os.memfd_create("everstep-identity", os.MFD_CLOEXEC), "wb") as file:  # `load_cert_chain` needs a file.
        file.write(key_and_certificate)
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
    return context
