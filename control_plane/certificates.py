"""Issues the TLS certificates of agents for each other, and of servers for each other and for a load balancer.

Servers derive the keys of the fleets' authorities and of their own from the server secret, so no row and no file
contains a key. A certificate names one node of one fleet, or one address of a server, for at most 25 hours.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import ssl
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from everstep.protocol.agent_messages import PeerCertificate
from everstep.protocol.certificates import CERTIFICATE_SECONDS, SKEW_SECONDS, peer_uri
from everstep.protocol.ids import FleetName, NodeId

_AUTHORITY_FROM: Final = datetime(2020, 1, 1, tzinfo=UTC)
_AUTHORITY_UNTIL: Final = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
"""RFC 5280 (section 4.1.2.5) defines this time for certificates that do not expire."""
SERVER_RENEWAL_SECONDS: Final = 600.0
"""Short, because a certificate from before the clock was set is soon invalid."""
_P256_ORDER: Final = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
"""Number of points of the curve P-256 (NIST SP 800-186, section 3.2.1.3)."""


class FleetAuthorities:
    """The certificate authorities of all fleets, derived from the server secret."""

    def __init__(self, secret: bytes) -> None:
        self._secret = hmac.digest(secret, b"certificate authorities of fleets", "sha256")

    def issue(self, fleet: FleetName, node_id: NodeId, public_key: bytes, now: datetime) -> PeerCertificate:
        """Return a certificate for an agent on a verified node, and that of the fleet's authority.

        `public_key` is Ed25519, 32 bytes. All servers return the same authority.
        """
        key = Ed25519PrivateKey.from_private_bytes(hmac.digest(self._secret, fleet.encode(), "sha256"))
        authority = _name(fleet)
        agent_key = Ed25519PublicKey.from_public_bytes(public_key)
        issued = (
            _leaf(subject=_name(node_id), issuer=authority, key=agent_key, now=now)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,
            )
            .add_extension(
                x509.SubjectAlternativeName([x509.UniformResourceIdentifier(peer_uri(fleet, node_id))]), critical=False
            )
            .sign(key, algorithm=None)
        )
        # Ed25519 is deterministic, so every server creates the same certificate.
        own = _authority(authority, key.public_key()).sign(key, algorithm=None)
        return PeerCertificate(
            fleet=fleet,
            certificate=issued.public_bytes(Encoding.DER),
            authority=own.public_bytes(Encoding.DER),
        )


class ServerAuthority:
    """The certificate authority of an installation's servers, derived from the server secret."""

    # All TLS clients support P-256, load balancers included.
    def __init__(self, secret: bytes) -> None:
        digest = hmac.digest(secret, b"certificate authority of servers", "sha256")
        self._key = ec.derive_private_key(int.from_bytes(digest, "big") % (_P256_ORDER - 1) + 1, ec.SECP256R1())
        public = self._key.public_key()
        identifier = x509.SubjectKeyIdentifier.from_public_key(public)
        own = _authority(_SERVERS, public).add_extension(identifier, critical=False).sign(self._key, SHA256())
        self.certificate: Final = own.public_bytes(Encoding.PEM).decode()
        """The certificate as PEM."""

    def issue(self, address: IPv4Address | IPv6Address, now: datetime) -> bytes:
        """Return a new key and its certificate for an address, as PEM, valid from `now`."""
        key = ec.generate_private_key(ec.SECP256R1())
        issued = (
            _leaf(subject=_name(str(address)), issuer=_SERVERS, key=key.public_key(), now=now)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(x509.SubjectAlternativeName([x509.IPAddress(address)]), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .sign(self._key, SHA256())
        )
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return private + issued.public_bytes(Encoding.PEM)


class ServerCertificate:
    """The certificate of one server for one of its addresses, and the TLS context that shows it to clients."""

    def __init__(self, authority: ServerAuthority, address: str, now: Callable[[], datetime]) -> None:
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._authority, self._address, self._now = authority, ip_address(address), now
        self.renew()

    def renew(self) -> None:
        """Replace key and certificate for new connections."""
        with open(os.memfd_create("everstep-server", os.MFD_CLOEXEC), "wb") as file:  # `load_cert_chain` needs a file.
            file.write(self._authority.issue(self._address, self._now()))
            file.flush()
            self.context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")

    async def keep_valid(self) -> None:
        """Renew the certificate repeatedly, until cancelled."""
        while True:
            await asyncio.sleep(SERVER_RENEWAL_SECONDS)
            self.renew()


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


_SERVERS: Final = _name("servers of an Everstep installation")


def _leaf(
    *, subject: x509.Name, issuer: x509.Name, key: Ed25519PublicKey | ec.EllipticCurvePublicKey, now: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(seconds=SKEW_SECONDS))
        .not_valid_after(now + timedelta(seconds=CERTIFICATE_SECONDS))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
    )


def _authority(name: x509.Name, key: Ed25519PublicKey | ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key)
        .serial_number(1)
        .not_valid_before(_AUTHORITY_FROM)
        .not_valid_after(_AUTHORITY_UNTIL)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )
