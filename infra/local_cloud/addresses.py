"""Loopback addresses for instances: unique on this machine, also between local clouds that run at the same time.

All of 127.0.0.0/8 is this machine on Linux. A local cloud claims whole /24 blocks by binding an abstract unix socket of
the block's name: the kernel grants a name once per network namespace (which is also what a loopback address belongs to)
and takes it back when the process dies.
"""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Iterator

from infra.local_cloud.errors import StartFailed

FIRST_HOST, LAST_HOST = 10, 250
ATTEMPTS = 1000


class AddressPool:
    """Addresses that nobody else gives out while this object lives. One owner, which closes it.

    Args:
        chooser: which blocks are tried, in which order.
    """

    def __init__(self, chooser: random.Random) -> None:
        self._random = chooser
        self._claims: list[socket.socket] = []
        self._addresses = self._generate()

    def take(self) -> str:
        """Return an address that this pool has not given out before.

        Returns:
            Dotted, in 127.0.0.0/8.

        Raises:
            StartFailed: no free block was found.
        """
        return next(self._addresses)

    def close(self) -> None:
        """Give all blocks back."""
        for claim in self._claims:
            claim.close()
        self._claims.clear()

    def _generate(self) -> Iterator[str]:
        while True:
            block = self._claim_block()
            for host in range(FIRST_HOST, LAST_HOST + 1):
                yield f"{block}.{host}"

    def _claim_block(self) -> str:
        for _ in range(ATTEMPTS):
            # 127.0 is left alone: 127.0.0.1 and 127.0.1.1 have other users.
            block = f"127.{self._random.randint(1, 254)}.{self._random.randint(0, 255)}"
            claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                claim.bind(f"\0everstep-local/{block}")
            except OSError as error:
                claim.close()
                if error.errno != errno.EADDRINUSE:
                    raise StartFailed(f"cannot claim the loopback block {block}.0/24: {error}") from error
            else:
                self._claims.append(claim)
                return block
        raise StartFailed(f"no free loopback block after {ATTEMPTS} attempts")
