"""The addresses of this node's network cards: streams are spread over all of them.

Invariant: an agent on a loopback address has no other, so that clusters on one machine never meet over its real cards.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

_SIOCGIFADDR = 0x8915
_SIOCGIFNETMASK = 0x891B
CLASS_NET = Path("/sys/class/net")


def more_addresses(address: str, class_net: Path = CLASS_NET) -> tuple[str, ...]:
    """Return the IPv4 addresses of the other cards that are up and lie in the same network as `address`.

    Args:
        address: the agent's own.
        class_net: where the kernel lists the cards.

    Returns:
        Addresses, by the card's name; empty on loopback, and where the kernel does not tell.
    """
    if ipaddress.ip_address(address).is_loopback or not class_net.is_dir():
        return ()
    cards = [card.name for card in sorted(class_net.iterdir()) if (card / "device").exists() and (card / "operstate").read_text().strip() == "up"]
    found = [interface for card in cards if (interface := _interface(card)) is not None]
    own = next((interface for interface in found if str(interface.ip) == address), None)
    if own is None:
        return ()
    return tuple(str(interface.ip) for interface in found if interface.ip in own.network and interface is not own)


def _interface(card: str) -> ipaddress.IPv4Interface | None:
    request = struct.pack("256s", card.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as line:
        try:
            address, mask = (fcntl.ioctl(line, code, request)[20:24] for code in (_SIOCGIFADDR, _SIOCGIFNETMASK))
        except OSError:
            return None  # no IPv4 address
    return ipaddress.IPv4Interface(f"{socket.inet_ntoa(address)}/{socket.inet_ntoa(mask)}")
