"""Decides which slot of a shard may be overwritten.

A holder has two slots per shard, or more if `CheckpointConfig.ThirdSlot` is set. Each slot stores one *content*: the
state of the shard at one step, captured in one generation.

Invariant: contents that must not be overwritten are identified by their step and the generation that captured it. A
slot with any other content may be overwritten.
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
"""Longest pause after the first failed attempt of an upload, in seconds. Later pauses are longer."""


@dataclass(frozen=True, slots=True)
class Content:
    """The content of a slot: the state of one shard at `step`, captured in generation `origin`."""

    origin: Generation
    step: Step


@dataclass(frozen=True, slots=True)
class SlotView:
    """The state of one slot, read from the slot's header."""

    state: SlotState
    content: Content | None
    is_pinned: bool = False
    """True while the slot is uploaded or while another node fetches from it.

    A pinned slot must not be overwritten.
    """
    is_busy: bool = False
    """True after a restart of the agent, while a process may still write into the slot."""


EMPTY = SlotView(SlotState.EMPTY, None)


def being_written(slots: Sequence[SlotView], content: Content) -> int | None:
    """Return the index of the slot that was already granted for `content`, or None.

    The coordinator may propose the last step of the training twice, but the rank captures the step only once. At the
    second proposal, this capture may still run in the slot that was granted first.

    Args:
        slots: the shard's slots on this node, in order.
        content: the content to grant a slot for.

    Returns:
        An index into `slots`, or None.
    """
    for index, slot in enumerate(slots):
        if slot.state is SlotState.WRITING and slot.content == content and not (slot.is_pinned or slot.is_busy):
            return index
    return None


def writable(slots: Sequence[SlotView], keep: Collection[Content]) -> int | None:
    """Return the index of the slot to overwrite, or None if every slot is protected, pinned or busy.

    A holder's agent calls this before each capture and each incoming replica. It prefers an empty slot, then an
    unsealed slot, then the sealed slot with the oldest step.

    Args:
        slots: the shard's slots on this node, in order.
        keep: the protected contents, from `kept`.

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
    """Return the contents of one shard that must not be overwritten on this node.

    After the first commit of the generation, this is only the committed content. Before the first commit, it is the
    plan's keep list and the base.

    Args:
        committed: the newest committed content of the generation; None before the first commit.
        planned: the plan's list for this shard: every content up to the base that this node must not overwrite.
        base: the content that the generation was restored from; None if it started without a base.

    Returns:
        The contents to keep.
    """
    if committed is not None:
        return frozenset({committed})
    return frozenset(planned) | (frozenset[Content]() if base is None else {base})


def is_superseded(uploading: Step, *, committed: Step, proposed: Step, persist: Step) -> bool:
    """Return whether the agent must cancel an upload because its slot is needed for the final step.

    The coordinator marks a proposed step for upload only when the ranks have stopped at their final step. The upload of
    the final step then replaces the older upload, which is not a complete checkpoint yet. An upload of the committed
    step continues: no rank may overwrite its slot, and the committed step must be in S3 if the final step fails.

    Args:
        uploading: the step whose slot is pinned for an upload; -1 if no upload is running.
        committed: the committed step; -1 before the first commit.
        proposed: the proposed step; -1 if no step is proposed.
        persist: the step that is marked for upload; -1 if no step is marked.

    Returns:
        True if the agent must cancel the upload and unpin its slot.
    """
    return NONE < uploading < committed < persist == proposed


def may_upload(step: Step, *, begun: Step, uploading: Collection[Step], max_uploads: int) -> bool:
    """Return whether an agent may begin to upload a step of a shard. The caller has checked that the step is in a slot.

    Args:
        step: the step that is marked for upload; -1 if no step is marked.
        begun: the newest step of the shard whose upload has begun; -1 before the first upload.
        uploading: the steps of the shard whose slots are pinned for uploads.
        max_uploads: maximum number of uploads of a shard at the same time.

    Returns:
        True if the agent may pin the step's slot and upload it now. A step older than `begun` is never uploaded.
    """
    return step > begun and len(uploading) < max_uploads


def slots_per_shard(*, has_third_slot: bool, max_uploads: int) -> int:
    """Return the number of slots of each shard on each of its nodes.

    With a third slot, each upload has a slot besides the committed step and the step that is being captured. With two
    slots, no step is captured while one slot is uploaded and the other slot contains the committed step.
    """
    return 2 + max_uploads if has_third_slot else 2


def newest_uploads(finished: Sequence[UploadedShard], *, max_uploads: int) -> list[UploadedShard]:
    """Return the finished uploads that a node still reports: the newest `max_uploads` + 2 steps of each rank.

    Ranks upload at different speeds. While another rank still uploads an older step, the node must continue to report
    its own finished upload of that step.

    Args:
        finished: the uploads that the node has reported so far, and the upload that has just ended.
        max_uploads: maximum number of uploads of a shard at the same time.

    Returns:
        A part of `finished`, in the same order.
    """
    steps: dict[Rank, list[Step]] = {}
    for each in finished:
        steps.setdefault(each.rank, []).append(each.step)
    kept = {rank: sorted(found)[-(max_uploads + 2) :] for rank, found in steps.items()}
    return [each for each in finished if each.step in kept[each.rank]]


def retry_pause(failures: int) -> float | None:
    """Return the longest pause before the next attempt of a failed upload, in seconds.

    The caller pauses for a random part of this time, so that nodes that failed together do not retry together.

    Args:
        failures: number of failed attempts of this upload, at least 1.

    Returns:
        The pause, which doubles after each failure. None after the last attempt, because the slot must not stay pinned
        for long.
    """
    return None if failures >= UPLOAD_TRIES else FIRST_PAUSE_SECONDS * 2 ** (failures - 1)


def find_sealed(slots: Sequence[SlotView], content: Content) -> int | None:
    """Return the index of the slot in which the shard's `content` (step and generation) is sealed, or None."""
    for index, slot in enumerate(slots):
        if slot.state is SlotState.SEALED and slot.content == content:
            return index
    return None


def memory_nodes(ranks: Sequence[Rank], gpu_nodes: Sequence[int]) -> dict[Rank, int]:
    """Return the NUMA node on which each rank's own slots should be allocated.

    This is the NUMA node of the GPU whose index equals the rank's LOCAL_RANK.

    Args:
        ranks: the ranks of this node, in order of LOCAL_RANK.
        gpu_nodes: the NUMA node of each GPU; negative if unknown. Empty if the machine has only one NUMA node.

    Returns:
        NUMA nodes by rank, without the ranks whose GPU's NUMA node is unknown.
    """
    return {rank: node for rank, node in zip(ranks, gpu_nodes, strict=False) if node >= 0}


def slot_bytes_per_node(*, copies: int, shard_bytes: Collection[int], slot_count: int = 2) -> int:
    """Return the host memory for the slots of one node, in bytes (docs/design.md#slots).

    The formula assumes that this node holds as many replicas of other nodes' shards as other nodes hold of its shards.

    Args:
        copies: number of copies of each shard, including the owner's copy.
        shard_bytes: the slot size of each shard that the node owns.
        slot_count: slots per shard (`slots_per_shard`).

    Returns:
        slot_count · copies · sum(shard_bytes).
    """
    return slot_count * copies * sum(shard_bytes)
