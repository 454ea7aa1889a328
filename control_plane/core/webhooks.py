"""Rules of webhooks: which receivers the server may send events to, and how it signs a message.

    webhook-id          id of the event; the same for each attempt, so receivers recognize repetitions
    webhook-timestamp   Unix seconds of the attempt; receivers refuse old messages
    webhook-signature   one signature per secret, separated by spaces: v1,base64(HMAC-SHA256(secret, id.timestamp.body))

Source: https://www.standardwebhooks.com, whose libraries verify these headers.

Invariant: a message leaves only for an allowed host, at an address that is global or in an allowed network.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

SECRET_PREFIX: Final = "whsec_"
MIN_SECRET_BYTES: Final = 24
MAX_SECRET_BYTES: Final = 64
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")


class WebhookRefused(ValueError):
    """A webhook's URL, secret or address is not allowed. The message says what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """The hosts and networks to which the server may send webhooks."""

    hosts: frozenset[str]
    """Lower-case host names. `*.example.com` allows all names below example.com."""
    networks: tuple[Network, ...]
    """Networks that webhooks may reach although their addresses are not global."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookTarget:
    """The receiver of a webhook's messages, parsed from its URL."""

    host: str
    port: int
    path: str
    """Path and query."""
    is_secure: bool


def allowed(entries: Sequence[str]) -> Allowed:
    """Return the allowed receivers from host names (`*.example.com`) and networks (`10.0.0.0/8`).

    Raises WebhookRefused if an entry with a slash is not a network.
    """
    networks: list[Network] = []
    for entry in (entry for entry in entries if "/" in entry):
        try:
            networks.append(ipaddress.ip_network(entry))
        except ValueError as error:
            raise WebhookRefused(f"{entry!r} is not a network such as 10.0.0.0/8: {error}") from error
    return Allowed(hosts=frozenset(entry.lower() for entry in entries if "/" not in entry), networks=tuple(networks))


def target_of(url: str, receivers: Allowed) -> WebhookTarget:
    """Parse `https://host[:port]/path?query`, and check that webhooks may reach its host.

    Plain `http` is allowed only for the literal addresses 127.0.0.1 and ::1. Raises WebhookRefused if the URL is not
    valid, contains a user or a password, or names a host that is not allowed.
    """
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").lower(), parts.port
    except ValueError as error:
        raise WebhookRefused(f"{url!r} is not a URL: {error}") from error
    is_secure = parts.scheme == "https"
    if not host or not (is_secure or (parts.scheme == "http" and host in ("127.0.0.1", "::1"))):
        raise WebhookRefused(f"{url!r} is not an https URL")
    if parts.username is not None or parts.fragment or any(ord(character) <= 32 for character in url):
        raise WebhookRefused(f"{host}: a webhook's URL has no user, password, fragment or space")
    parents = {"*." + host.split(".", count)[-1] for count in range(1, host.count(".") + 1)}
    if not receivers.hosts & {host, *parents}:
        raise WebhookRefused(f"the host {host!r} is not allowed; add --allow-webhook {host}")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return WebhookTarget(host=host, port=port or (443 if is_secure else 80), path=path, is_secure=is_secure)


def check_addresses(host: str, addresses: Sequence[str], receivers: Allowed) -> str:
    """Check all addresses of a host, and return the first one, to connect to.

    Raises WebhookRefused if the name has no address, or one that is not global and in no allowed network.
    """
    for text in addresses:
        address = ipaddress.ip_address(text.partition("%")[0])
        # One such address suffices, because the name could otherwise lead to an internal service.
        if not all(_is_public(each) or _is_in(each, receivers.networks) for each in _meant(address)):
            raise WebhookRefused(
                f"{host} resolves to {address}, which is not a public address; "
                "add its network with --allow-webhook if it is the receiver"
            )
    if not addresses:
        raise WebhookRefused(f"{host} has no address")
    return addresses[0]


def key_of(secret: str) -> bytes:
    """Return the signing key in a secret: the 24 to 64 bytes whose base64 follows `whsec_`.

    Raises WebhookRefused for any other text.
    """
    try:
        key = base64.b64decode(secret.removeprefix(SECRET_PREFIX), validate=True)
    except binascii.Error:
        key = b""
    if not secret.startswith(SECRET_PREFIX) or not MIN_SECRET_BYTES <= len(key) <= MAX_SECRET_BYTES:
        raise WebhookRefused(
            f"EVERSTEP_WEBHOOK_SECRET is not {SECRET_PREFIX} and base64 of {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES} "
            'bytes; generate one with: echo "whsec_$(openssl rand -base64 32)"'
        )
    return key


def signed_headers(keys: Sequence[bytes], message_id: str, timestamp: int, body: bytes) -> Mapping[str, str]:
    """Return the headers of a message, with one signature per key: during a rotation, the new and the old key.

    `message_id` is equal for all attempts of an event, and `timestamp` is that of the attempt.
    """
    signed = f"{message_id}.{timestamp}.".encode() + body
    signatures = (base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode() for key in keys)
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": " ".join(f"v1,{signature}" for signature in signatures),
    }


def _meant(address: Address) -> Sequence[Address]:
    """Return all addresses that a connection to `address` may reach: itself, or IPv4 addresses that it embeds."""
    if isinstance(address, ipaddress.IPv4Address):
        return [address]
    inner = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
    if address in _NAT64:
        inner.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    mapped = [each for each in inner if each is not None]
    return mapped if address.ipv4_mapped is not None or address in _NAT64 else [address, *mapped]


def _is_public(address: Address) -> bool:
    return address.is_global and not (address.is_multicast or address.is_reserved)


def _is_in(address: Address, networks: Sequence[Network]) -> bool:
    return any(address in network for network in networks)
