"""Assigns loopback addresses to instances, unique across all running local clouds of this machine.

A cloud claims a /24 block of 127.0.0.0/8 by binding an abstract unix socket with the block's name. The kernel grants a
name to one process per network namespace, and releases it when the process dies.
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
    """A pool of addresses that no other pool returns while this object exists. Its owner must close it.

    `chooser` affects only the order of attempts.
    """

    def __init__(self, chooser: random.Random) -> None:
        self._random = chooser
        self._claims: list[socket.socket] = []
        self._addresses = self._generate()

    def take(self) -> str:
        """Return a new dotted address in 127.0.0.0/8.

        Raises StartFailed if all tried blocks are claimed already, or the kernel refused a claim.
        """
        return next(self._addresses)

    def close(self) -> None:
        """Release all address blocks that this pool has claimed."""
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
            # Choose no block of 127.0.0.0/16, because other programs use 127.0.0.1 and 127.0.1.1.
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
