"""The network cards of this node that lie in its network: streams are spread over all of them.

An address alone takes no connection over its card. The kernel chooses a way by where a packet goes: of several cards in
one network the first carries what the addresses of all of them send, and EC2 drops what leaves by a card that has
another address. So connections are bound to cards, too.

Invariant: an agent on a loopback address has no other, so that clusters on one machine never meet over its real cards.
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
    """A way into the network, and out of it."""

    address: str
    name: str = ""
    """What the kernel calls it; empty: there is one way, or the kernel's routes say which."""

    def bind(self, line: socket.socket, port: int = 0) -> None:
        """Have what a socket sends, or what the connections that it accepts send, leave by this card.

        Args:
            line: neither bound nor connected.
            port: of ours; 0: the kernel chooses.

        Raises:
            OSError: the address is not this node's, the port is taken, or the card is gone.
        """
        if self.name:
            with contextlib.suppress(PermissionError):  # Linux before 5.7 lets root alone; routes may still lead there
                line.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, self.name.encode())
        line.bind((self.address, port))


def network_cards(address: str, class_net: Path = CLASS_NET) -> tuple[NetworkCard, ...]:
    """Return the card of `address`, and the others that are up and have an IPv4 address in the same network.

    Args:
        address: the agent's own.
        class_net: where the kernel lists the cards.

    Returns:
        The agent's own first, the others by name; that alone, without its name, on loopback, where there is no other
        and where the kernel does not tell.
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
    """Return the name of the card, real or not, that has an IPv4 address of this node: loopback's where it is one and no card has it for its own;
    empty where no card says so.
    """
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
            return None  # no IPv4 address
    return ipaddress.IPv4Interface(f"{socket.inet_ntoa(address)}/{socket.inet_ntoa(mask)}")
