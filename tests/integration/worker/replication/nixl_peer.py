"""A process with a NIXL agent. It prints the address of a block full of "a" and its description, and waits."""

from __future__ import annotations

import sys

from everstep.protocol.ids import NodeId
from worker.replication.nixl import BLOCK_BYTES, Nixl

if __name__ == "__main__":
    nixl = Nixl.open(transports="tcp", net_devices="lo", pool_bytes=4 * BLOCK_BYTES)
    blocks = nixl.reserve(NodeId("i-reader"))
    assert blocks is not None
    with nixl.memory(blocks[0]) as memory:
        memory[:] = b"a" * BLOCK_BYTES
    sys.stdout.write(f"{nixl.address(blocks[0])} {nixl.description.hex()}\n")
    sys.stdout.flush()
    sys.stdin.read()
