"""Which slot of a shard may be written.

A holder keeps a few slots per shard (two; three where the job asked for it). Invariant: what must be kept is named
exactly, by origin generation and step; everything else may be overwritten, and only for the step that is being proposed
or filled. This module never looks at
lineage: the plan has already said what is worth keeping.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from everstep.protocol.ids import Generation, Rank, Step
from everstep.protocol.rank_messages import NONE
from everstep.protocol.slot import SlotState


@dataclass(frozen=True, slots=True)
class Content:
    """Names the state of one shard: the step, and the generation that captured it."""

    origin: Generation
    step: Step


@dataclass(frozen=True, slots=True)
class SlotView:
    """What one slot holds, as its header says."""

    state: SlotState
    content: Content | None
    is_pinned: bool = False
    """Being uploaded or fetched from: not to be overwritten, whatever it holds."""
    is_busy: bool = False
    """A rank's copier may still write into it (seen after the agent's own restart)."""


EMPTY = SlotView(SlotState.EMPTY, None)


def being_written(slots: Sequence[SlotView], content: Content) -> int | None:
    """Return the slot that was granted for exactly this content before, or None.

    A step can be proposed again, the last one of a training, while what its rank has captured for the first proposal is
    still on its way to the agent. The rank does not capture it twice: it has to find that very slot.

    Args:
        slots: the shard's slots on this node, in order.
        content: what is to be granted now.

    Returns:
        An index into `slots`, or None.
    """
    for index, slot in enumerate(slots):
        if slot.state is SlotState.WRITING and slot.content == content and not (slot.is_pinned or slot.is_busy):
            return index
    return None


def writable(slots: Sequence[SlotView], keep: Collection[Content]) -> int | None:
    """Return the slot that may be overwritten, or None when every slot is kept, pinned or busy.

    Called by a holder's agent before each capture and each incoming replica. An empty slot is preferred, then an
    unsealed one, then the sealed one with the oldest step.

    Args:
        slots: the shard's slots on this node, in order.
        keep: contents that must survive: the committed one, or the plan's keep list until the base is committed.

    Returns:
        An index into `slots`, or None.
    """
    free = [
        index
        for index, slot in enumerate(slots)
        if not (slot.is_pinned or slot.is_busy or (slot.state is SlotState.SEALED and slot.content in keep))
    ]
    if not free:
        return None

    def cost(index: int) -> tuple[bool, int, int]:
        slot = slots[index]
        return slot.state is SlotState.SEALED, slot.content.step if slot.content else -1, index

    return min(free, key=cost)


def kept(committed: Content | None, planned: Collection[Content], base: Content | None) -> frozenset[Content]:
    """Return what may not be overwritten of one shard on this node.

    Called before every grant and once at Load.

    Args:
        committed: C of the generation as far as anybody here knows, or None before its first commit.
        planned: the plan's keep list for this shard: what the lineage has up to the base.
        base: what the generation was restored from, or None.

    Returns:
        The committed content alone once there is one; until then the plan's word and the base.
    """
    if committed is not None:
        return frozenset({committed})
    return frozenset(planned) | (frozenset() if base is None else {base})


def is_superseded(uploading: Step, *, proposed: Step, persist: Step) -> bool:
    """Return whether an upload is to be cancelled: its slot is needed for the final step, which is uploaded instead.

    Only the coordinator of ranks that stand still proposes a step that it has marked for upload. The cancelled upload
    is of no complete checkpoint.

    Args:
        uploading: the step whose slot is pinned, or -1.
        proposed: w, or -1.
        persist: the step that is marked for upload, or -1.

    Returns:
        True if the agent must free the slot now.
    """
    return NONE < uploading < persist == proposed


def find_sealed(slots: Sequence[SlotView], content: Content) -> int | None:
    """Return the slot that holds `content` complete, or None."""
    for index, slot in enumerate(slots):
        if slot.state is SlotState.SEALED and slot.content == content:
            return index
    return None


def memory_nodes(ranks: Sequence[Rank], gpu_nodes: Sequence[int]) -> dict[Rank, int]:
    """Return the NUMA node near which each rank's own slots should lie: that of the GPU with the rank's LOCAL_RANK for a number.

    Args:
        ranks: of this node, in order.
        gpu_nodes: the NUMA node of each GPU, negative where nobody knows; empty where there is nothing to choose.

    Returns:
        By rank; one whose GPU is not there or not known to be near any node has none.
    """
    return {rank: node for rank, node in zip(ranks, gpu_nodes, strict=False) if node >= 0}


def slot_bytes_per_node(*, copies: int, shard_bytes: Collection[int], slot_count: int = 2) -> int:
    """Return the host memory that slots take on one node that holds for others as much as they hold for it (docs/design.md#slots).

    Args:
        copies: m, the owner's copy included.
        shard_bytes: one slot's size, of each of the node's own shards.
        slot_count: slots per shard, 2 or 3.

    Returns:
        slots · m · the sum of these sizes, bytes.
    """
    return slot_count * copies * sum(shard_bytes)
