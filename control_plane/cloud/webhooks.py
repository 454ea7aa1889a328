"""Sends events to webhooks: HTTPS receivers outside AWS.

Each attempt resolves the receiver's name once, checks all addresses against `core.webhooks`, and connects to a checked
address, so DNS rebinding cannot redirect it. The sender follows no HTTP redirect. TLS verifies the receiver's name.
"""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import datetime
from importlib.metadata import version
from socket import SOCK_STREAM, create_connection, getaddrinfo
from typing import Final

from control_plane.cloud.errors import AccessDenied, CloudError, CloudUnavailable
from control_plane.cloud.sinks import SinkEntry
from control_plane.core.webhooks import Allowed, WebhookRefused, WebhookTarget, check_addresses, signed_headers

TIMEOUT_SECONDS: Final = 10.0
"""Limit for each step: connection, TLS handshake, and each part of the response."""

_USER_AGENT: Final = f"everstep/{version('everstep')}"

Resolve = Callable[[str, int], Sequence[str]]


def resolved(host: str, port: int) -> Sequence[str]:
    """Return all IP addresses of a host name. Raises OSError if the name has none."""
    found = getaddrinfo(host, port, type=SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class WebhookSink:
    """Sends events to the receiver of one webhook. Implements `EventSink`.

    Args:
        receivers: the allowed hosts and networks. The sender connects to a private address only in these networks.
        keys: HMAC keys of at least 24 bytes. Each message has one signature per key.
        resolve: returns all IP addresses of a host name and port. It may block, and may raise OSError.
        context: TLS settings. None: the system's certificate authorities.
    """

    def __init__(
        self,
        target: WebhookTarget,
        receivers: Allowed,
        keys: Sequence[bytes],
        now: Callable[[], datetime],
        *,
        resolve: Resolve = resolved,
        context: ssl.SSLContext | None = None,
    ) -> None:
        self._target = target
        self._receivers = receivers
        self._keys = keys
        self._now = now
        self._resolve = resolve
        self._context = context or ssl.create_default_context()

    def put(self, entries: Sequence[SinkEntry]) -> CloudError | None:
        for entry in entries:
            body = entry.detail.encode()
            headers = signed_headers(self._keys, f"event-{entry.event_id}", int(self._now().timestamp()), body)
            self._send(body, {**headers, "content-type": "application/json", "user-agent": _USER_AGENT})
        return None

    def _send(self, body: bytes, headers: dict[str, str]) -> None:
        target = self._target
        try:
            address = check_addresses(target.host, self._resolve(target.host, target.port), self._receivers)
            with closing(_Pinned(target, address, self._context)) as connection:
                connection.request("POST", target.path, body, headers)
                status = connection.getresponse().status
        except WebhookRefused as error:
            raise AccessDenied(str(error)) from error
        except (OSError, http.client.HTTPException) as error:
            raise CloudUnavailable(f"the webhook at {target.host} does not answer: {error!r}") from error
        if 300 <= status < 400:
            raise AccessDenied(f"the webhook at {target.host} answers with a redirect, which is not followed: {status}")
        if not 200 <= status < 300:
            raise CloudUnavailable(f"the webhook at {target.host} answers with status {status}")


class _Pinned(http.client.HTTPConnection):
    """Connection to one checked IP address of a receiver. It does not resolve the name again."""

    def __init__(self, target: WebhookTarget, address: str, context: ssl.SSLContext) -> None:
        super().__init__(target.host, target.port, timeout=TIMEOUT_SECONDS)
        self.default_port = 443 if target.is_secure else 80
        self._address = address
        self._context = context if target.is_secure else None

    def connect(self) -> None:
        """Connect to the checked address."""
        self.sock = create_connection((self._address, self.port), TIMEOUT_SECONDS)
        if self._context is not None:
            self.sock = self._context.wrap_socket(self.sock, server_hostname=self.host)
