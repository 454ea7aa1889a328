"""Decides which slot of a shard may be overwritten.

A *content* is the state of the shard at one step, captured in one generation. Invariant: only slots whose content is
not protected are overwritten.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from everstep.protocol.agent_messages import UploadedShard
from everstep.protocol.ids import Generation, Rank, Step
from everstep.protocol.rank_messages import NONE
from everstep.protocol.slot import SlotState

UPLOAD_TRIES = 6
"""Attempts to upload one shard. The pauses between the attempts take at most 31 s in total."""
FIRST_PAUSE_SECONDS = 1.0
"""Longest pause after the first failed attempt. It doubles with each failure."""


@dataclass(frozen=True, slots=True)
class Content:
    """The state of one shard at `step`, captured in generation `origin`."""

    origin: Generation
    step: Step


@dataclass(frozen=True, slots=True)
class SlotView:
    """The state of one slot, read from the slot's header."""

    state: SlotState
    content: Content | None
    is_pinned: bool = False
    """True while the slot is uploaded or another node fetches from it, so that it must not be overwritten."""
    is_busy: bool = False
    """True after a restart of the agent, while a process may still write into the slot."""


EMPTY = SlotView(SlotState.EMPTY, None)


def being_written(slots: Sequence[SlotView], content: Content) -> int | None:
    """Return the index of the slot that was already granted for `content`, or None."""
    # The coordinator may propose the last step twice, but the rank captures it once. The first capture may still
    # run.
    for index, slot in enumerate(slots):
        if slot.state is SlotState.WRITING and slot.content == content and not (slot.is_pinned or slot.is_busy):
            return index
    return None


def writable(slots: Sequence[SlotView], keep: Collection[Content]) -> int | None:
    """Return the index of the slot to overwrite: empty, else unsealed, else the oldest; None if none is free."""
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
    """Return the contents to keep on this node: the committed one, or before a commit `planned` and `base`."""
    if committed is not None:
        return frozenset({committed})
    return frozenset(planned) | (frozenset[Content]() if base is None else {base})


def is_superseded(uploading: Step, *, committed: Step, proposed: Step, persist: Step) -> bool:
    """Return whether the agent must cancel an upload because its slot is needed for the final step; -1 for no step."""
    # An upload of the committed step continues: it must be in S3 if the final step fails.
    return NONE < uploading < committed < persist == proposed


def may_upload(step: Step, *, begun: Step, uploading: Collection[Step], max_uploads: int) -> bool:
    """Return whether an upload of `step` may begin after `begun` (-1: none), beside the pinned steps `uploading`."""
    return step > begun and len(uploading) < max_uploads


def slots_per_shard(*, has_third_slot: bool, max_uploads: int) -> int:
    """Return the number of slots of each shard on each of its nodes."""
    # With two slots, no step is captured while one is uploaded and the other contains the committed step.
    return 2 + max_uploads if has_third_slot else 2


def newest_uploads(finished: Sequence[UploadedShard], *, max_uploads: int) -> list[UploadedShard]:
    """Return the finished uploads that a node still reports: the newest `max_uploads` + 2 steps of each rank."""
    steps: dict[Rank, list[Step]] = {}
    for each in finished:
        steps.setdefault(each.rank, []).append(each.step)
    # While another rank still uploads an older step, the node must continue to report its own upload of that step.
    kept = {rank: sorted(found)[-(max_uploads + 2) :] for rank, found in steps.items()}
    return [each for each in finished if each.step in kept[each.rank]]


def retry_pause(failures: int) -> float | None:
    """Return the longest pause before the next attempt in seconds; None after the last attempt."""
    # The caller pauses for a random part, so that nodes that failed together do not retry together.
    return None if failures >= UPLOAD_TRIES else FIRST_PAUSE_SECONDS * 2 ** (failures - 1)


def find_sealed(slots: Sequence[SlotView], content: Content) -> int | None:
    """Return the index of the slot in which `content` is sealed, or None."""
    for index, slot in enumerate(slots):
        if slot.state is SlotState.SEALED and slot.content == content:
            return index
    return None


def memory_nodes(ranks: Sequence[Rank], gpu_nodes: Sequence[int]) -> dict[Rank, int]:
    """Return the NUMA node of each rank's GPU. `ranks` is in order of LOCAL_RANK; unknown nodes are negative."""
    return {rank: node for rank, node in zip(ranks, gpu_nodes, strict=False) if node >= 0}


def slot_bytes_per_node(*, copies: int, shard_bytes: Collection[int], slot_count: int = 2) -> int:
    """Return the bytes of host memory for a node's slots (docs/design.md#slots); `copies` includes the owner's."""
    return slot_count * copies * sum(shard_bytes)
