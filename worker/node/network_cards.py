"""Finds all network cards of this node in the agent's network, over which shards are sent in parallel.

Invariant: an agent on a loopback address uses no other card, so that a local cluster never connects over real cards.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from pathlib import Path
from typing import NamedTuple

_SIOCGIFADDR = 0x8915
_SIOCGIFNETMASK = 0x891B
CLASS_NET = Path("/sys/class/net")
LOOPBACK = "lo"


class NetworkCard(NamedTuple):
    """A network card over which agents exchange snapshots, with its IP address."""

    address: str
    name: str = ""
    """The kernel's name of the card. Empty if the kernel's routes select the card."""

    def bind(self, line: socket.socket, port: int = 0) -> None:
        """Bind a socket, and the connections that it accepts, to this card. With port 0, the kernel chooses.

        Raises OSError if the address is not this node's, the port is in use, or the card no longer exists.
        """
        # Bind to the card, not only to its address: otherwise, the first of several cards in one network sends all
        # packets, and EC2 drops packets whose source address belongs to another card.
        if self.name:
            # Linux before 5.7 permits SO_BINDTODEVICE only to root. The kernel's routes may still select this card.
            with contextlib.suppress(PermissionError):
                line.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, self.name.encode())
        line.bind((self.address, port))


def network_cards(address: str, class_net: Path = CLASS_NET) -> tuple[NetworkCard, ...]:
    """Return the card of `address`, then all other active cards with an IPv4 address in the same network, by name.

    With a single card, on loopback, or if the kernel lists no cards: the address alone, without a name.
    """
    alone = (NetworkCard(address),)
    if ipaddress.ip_address(address).is_loopback or not class_net.is_dir():
        return alone
    names = [
        card.name
        for card in sorted(class_net.iterdir())
        if (card / "device").exists() and (card / "operstate").read_text().strip() == "up"
    ]
    found = {name: interface for name in names if (interface := _interface(name)) is not None}
    own = next((interface for interface in found.values() if str(interface.ip) == address), None)
    if own is None:
        return alone
    cards = [NetworkCard(str(interface.ip), name) for name, interface in found.items() if interface.ip in own.network]
    return tuple(sorted(cards, key=lambda card: card.address != address)) if len(cards) > 1 else alone


def card_of(address: str) -> str:
    """Return the name of the card with this IPv4 address, the loopback card for loopback, or an empty string."""
    for _, name in socket.if_nameindex():
        if (found := _interface(name)) is not None and str(found.ip) == address:
            return name
    return LOOPBACK if ipaddress.ip_address(address).is_loopback else ""


def _interface(card: str) -> ipaddress.IPv4Interface | None:
    request = struct.pack("256s", card.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as line:
        try:
            address, mask = (fcntl.ioctl(line, code, request)[20:24] for code in (_SIOCGIFADDR, _SIOCGIFNETMASK))
        except OSError:
            return None  # The network card has no IPv4 address.
    return ipaddress.IPv4Interface(f"{socket.inet_ntoa(address)}/{socket.inet_ntoa(mask)}")
