"""The host memory that the slots of a job take on each node.

    copies m:  slots · m         × the state of the node's ranks      own shards, and m - 1 copies for other nodes
    parity g:  slots · g/(g - 1) × the state of the node's ranks      own shards, and one share per rank

Invariant: agents reserve slots by the same rule (docs/design.md#slots).
"""

from __future__ import annotations

from fractions import Fraction

from control_plane.core.observed.specs import JobSettings
from everstep.protocol.slot import CHUNK_BYTES

COPIES_TO_COMPARE = 2
"""The preview of a job with parity compares the memory with this number of copies."""


def slots_per_shard(settings: JobSettings) -> int:
    """Return the number of slots that a node reserves for each shard and each share."""
    return 2 + settings.checkpoint_max_uploads if settings.third_slot else 2


def slots_per_node(settings: JobSettings) -> int:
    """Return the number of slots per node of a job. Each slot holds the state of one rank, or with parity a share."""
    kinds = settings.copies if settings.parity_group_size is None else 2
    return slots_per_shard(settings) * kinds * settings.ranks_per_node


def memory_ratio(settings: JobSettings) -> Fraction:
    """Return the memory of a node's slots as a multiple of the state of the node's ranks."""
    size = settings.parity_group_size
    return slots_per_shard(settings) * (Fraction(settings.copies) if size is None else Fraction(size, size - 1))


def ratio_of_copies(settings: JobSettings) -> int:
    """Return what `memory_ratio` would be if the job used two copies of each shard instead of parity."""
    return slots_per_shard(settings) * COPIES_TO_COMPARE


def needed_bytes(settings: JobSettings, shard_bytes: int) -> int:
    """Return the host memory of a node's slots in bytes, if each rank has a state of `shard_bytes` bytes."""
    return -(-memory_ratio(settings) * settings.ranks_per_node * shard_bytes // 1)


def largest_shard_bytes(settings: JobSettings, node_bytes: int) -> int:
    """Return the largest state per rank, in bytes, whose slots fit into `node_bytes` bytes."""
    slots = slots_per_shard(settings) * settings.ranks_per_node
    # A share consists of whole chunks, so it may be one chunk larger than 1/(g - 1) of a shard.
    rounding = 0 if settings.parity_group_size is None else slots * CHUNK_BYTES
    return max(0, int((node_bytes - rounding) / (memory_ratio(settings) * settings.ranks_per_node)))
