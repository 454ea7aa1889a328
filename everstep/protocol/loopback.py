"""Whether an address is this machine: the rule that local mode and unencrypted tokens rest on, one for all who must judge alike.

Invariant: only an address itself counts. Names are not resolved and not trusted, but for `localhost`; what cannot be
read is elsewhere.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit


def is_this_machine(host: str) -> bool:
    """Say whether a host, as it stands in a URL or is listened on, is this machine."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_loopback(url: str) -> bool:
    """Say whether a URL leads to this machine; what is not a URL does not."""
    return is_this_machine(url_host(url))


def url_host(url: str) -> str:
    """Return the host of an http or https URL, empty if it is none: for what users and environments give."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # read, and thereby checked
    except ValueError:
        return ""
    return parts.hostname or "" if parts.scheme in ("http", "https") else ""
