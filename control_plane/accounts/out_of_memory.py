"""Messages for a rank that ran out of memory: the cause, the sizes, and advice. Pure.

Invariant: a message says "probably" if the only evidence is the node's counter of out-of-memory kills.
"""

from __future__ import annotations

from everstep.protocol.agent_messages import MemoryEnd, MemoryKind, MemorySource
from everstep.protocol.ids import NodeId, Rank

GIB = 1 << 30
HOST_ADVICE = "lower the batch size or the number of data-loader workers, or use an instance type with more memory"
GPU_ADVICE = "lower the batch size, checkpoint activations, or shard the model over more GPUs"


def sentence(rank: Rank, node: NodeId, end: MemoryEnd) -> str:
    """Return how a rank ran out of memory, as one sentence without a full stop."""
    whose = f"rank {rank} on {node}"
    if end.source is MemorySource.EXCEPTION:
        what = "GPU memory" if end.kind is MemoryKind.GPU else "memory"
        return f"{whose} ran out of {what}: {end.words}"
    at = f" at {_size(end.rank_bytes)}" if end.rank_bytes is not None else ""
    used = ""
    if end.used_bytes is not None and end.total_bytes is not None:
        used = f", with {_size(end.used_bytes)} of {_size(end.total_bytes)} in use"
    victim = "one of its DataLoader workers" if end.words else "it"
    if end.source is MemorySource.NODE:
        return (
            f"{whose} probably ran out of memory: {victim} was killed{at}{used}, while the kernel killed processes "
            "of this node because memory was exhausted"
        )
    return f"{whose} ran out of memory: the kernel killed {victim}{at}{used}"


def advice(end: MemoryEnd) -> str:
    """Return advice to the user on how the script can need less memory, as a clause that follows a semicolon."""
    return GPU_ADVICE if end.kind is MemoryKind.GPU else HOST_ADVICE


def _size(count: int) -> str:
    return f"{count / GIB:.1f} GiB"
