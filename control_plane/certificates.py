"""Issues the TLS certificates with which the agents of a fleet authenticate each other.

Each fleet has a certificate authority. All servers derive the authority's key from the server secret, so a restarted
server and other servers have the same authority. No database row and no file contains the key.

Invariant: a certificate names one node of one fleet, and is valid for at most 25 hours.
"""

from __future__ import annotations

import hmac
from datetime import UTC, datetime, timedelta
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from everstep.protocol.agent_messages import PeerCertificate
from everstep.protocol.certificates import CERTIFICATE_SECONDS, SKEW_SECONDS, peer_uri
from everstep.protocol.ids import FleetName, NodeId

_AUTHORITY_FROM: Final = datetime(2020, 1, 1, tzinfo=UTC)
_AUTHORITY_UNTIL: Final = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
"""End of an authority's validity. RFC 5280 (section 4.1.2.5) defines this time for certificates that do not expire."""


class FleetAuthorities:
    """The certificate authorities of all fleets, each of which issues certificates to the fleet's agents.

    Args:
        secret: the server secret, which all control-plane servers share.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = hmac.digest(secret, b"certificate authorities of fleets", "sha256")

    def issue(self, fleet: FleetName, node_id: NodeId, public_key: bytes, now: datetime) -> PeerCertificate:
        """Return a certificate for an agent. The caller has verified that the agent runs on this node of this fleet.

        Args:
            fleet: the node's fleet.
            node_id: the node.
            public_key: Ed25519 key of the agent, 32 bytes.
            now: time of the issue, in UTC.

        Returns:
            The certificate, and the certificate of the fleet's authority. For one fleet, all servers return the same
            authority.
        """
        key = Ed25519PrivateKey.from_private_bytes(hmac.digest(self._secret, fleet.encode(), "sha256"))
        authority = _name(fleet)
        issued = (
            _builder(subject=_name(node_id), issuer=authority, key=Ed25519PublicKey.from_public_bytes(public_key))
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(seconds=SKEW_SECONDS))
            .not_valid_after(now + timedelta(seconds=CERTIFICATE_SECONDS))
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,
            )
            .add_extension(
                x509.SubjectAlternativeName([x509.UniformResourceIdentifier(peer_uri(fleet, node_id))]), critical=False
            )
            .sign(key, algorithm=None)
        )
        own = (
            _builder(subject=authority, issuer=authority, key=key.public_key())
            .serial_number(1)
            .not_valid_before(_AUTHORITY_FROM)
            .not_valid_after(_AUTHORITY_UNTIL)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .sign(key, algorithm=None)  # Ed25519 is deterministic, so every server creates the same certificate.
        )
        return PeerCertificate(
            fleet=fleet,
            certificate=issued.public_bytes(Encoding.DER),
            authority=own.public_bytes(Encoding.DER),
        )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _builder(*, subject: x509.Name, issuer: x509.Name, key: Ed25519PublicKey) -> x509.CertificateBuilder:
    return x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)


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
