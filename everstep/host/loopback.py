"""Checks whether an address belongs to this machine: only there, local mode and unencrypted tokens are permitted.

Invariant: only `localhost` and loopback addresses count. No name is resolved, and invalid input counts as another
machine.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit


def is_this_machine(host: str) -> bool:
    """Return whether a host, from a URL or a listening address, is this machine."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_loopback(url: str) -> bool:
    """Return whether a URL points to this machine. False for text that is not a URL."""
    return is_this_machine(url_host(url))


def url_host(url: str) -> str:
    """Return the host of an http or https URL, or an empty string for any other text."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # Reading `port` raises ValueError if the port is invalid.
    except ValueError:
        return ""
    return parts.hostname or "" if parts.scheme in ("http", "https") else ""
