"""Corruptions of slots in memory. An agent adopts the slots of its predecessor and verifies them."""

from __future__ import annotations

import random

from everstep.protocol.ids import Generation, Rank, Step
from everstep.protocol.slot import HEADER_BYTES, SlotHeader, SlotState
from tests.corruption.outcomes import Counts, Outcome, flipped, hold, truncated, without_part
from tests.unit.worker.storage.slots import JOB, RUN
from worker.core.slots import Content
from worker.shm.held_files import HeldFiles
from worker.shm.store import SlotStore

RANKS = (Rank(0), Rank(1))
CAPACITY = 3000
SIZE = 2600
GENERATION = Generation(3)


class Memory:
    """The slots of one node, with two steps of each of two ranks. Corruptions are planted in these slots.

    Args:
        draw: source of all random choices.
    """

    def __init__(self, draw: random.Random) -> None:
        self._files = HeldFiles()
        self._draw = draw
        self._expected: dict[tuple[int, Content], bytes] = {}
        self._sound: dict[str, bytes] = {}

    async def prepare(self) -> None:
        """Write and seal all slots."""
        store = self._opened()
        for rank in RANKS:
            for step in (4, 5):
                content = Content(GENERATION, Step(step))
                index = await store.grant(
                    rank,
                    content,
                    keep=store_contents(store, rank),
                    capacity_bytes=CAPACITY,
                    layout_hash=b"l" * 16,
                    slot_count=2,
                )
                assert index is not None
                slot = store.shards[rank][index]
                data = self._draw.randbytes(SIZE)
                with slot.file.payload(0, SIZE) as view:
                    view[:] = data
                header = SlotHeader(
                    job=JOB,
                    run=RUN,
                    owner_rank=rank,
                    origin_generation=GENERATION,
                    step=Step(step),
                    state=SlotState.WRITING,
                    capacity_bytes=CAPACITY,
                    payload_bytes=SIZE,
                    layout_hash=b"l" * 16,
                )
                assert await store.seal(rank, index, header) is not None
                self._expected[rank, content] = data
                self._sound[slot.file.name] = slot.file.path.read_bytes()
        store.close()

    def _opened(self) -> SlotStore:
        store = SlotStore(self._files, memory_bytes=1 << 20)
        store.open_run(JOB, RUN)
        return store

    def _changed(self, kind: str) -> dict[str, bytes]:
        paths = sorted(self._sound)
        path = self._draw.choice(paths)
        data = self._sound[path]
        other = self._draw.choice([each for each in paths if each != path])
        match kind:
            case "bit flip":
                # Half of the flips hit the few bytes of the header's fields, because a uniform choice would rarely hit
                # them.
                end = 256 if self._draw.random() < 0.5 else len(data)
                begin = 0 if end == 256 else HEADER_BYTES
                return {path: data[:begin] + flipped(data[begin:end], self._draw) + data[end:]}
            case "truncation":
                return {path: truncated(data, self._draw)}
            case "dropped part":
                return {path: data[:HEADER_BYTES] + without_part(data[HEADER_BYTES:], self._draw)}
            case "swapped shards":
                return {path: self._sound[other], other: data}
            case "stale generation":
                return {path: data[:HEADER_BYTES] + self._sound[other][HEADER_BYTES:]}
        raise AssertionError(kind)

    async def adopt(self, kind: str, counts: Counts) -> None:
        """Plant a corruption while no agent runs, and let the next agent adopt and verify all slots."""
        files = self._changed(kind)
        for name, data in files.items():
            hold(self._files, name, data)
        store = self._opened()
        found: dict[tuple[int, Content], bytes] = {}
        for rank in RANKS:
            for slot in store.shards.get(rank, []):
                content = slot.file.content
                if slot.file.header.state is SlotState.SEALED and content is not None and await store.verify(slot):
                    with slot.file.payload() as view:
                        found[rank, content] = bytes(view)
        store.close()
        if any(self._expected.get(key) != data for key, data in found.items()):
            outcome = Outcome.LOADED
        elif len(found) == len(self._expected):
            outcome = Outcome.HARMLESS
        else:
            outcome = Outcome.REFUSED
        counts.add("slot in memory", kind, outcome, str(list(files)))
        for name, data in self._sound.items():
            hold(self._files, name, data)


def store_contents(store: SlotStore, rank: Rank) -> set[Content]:
    """Return the contents (generation and step) of a rank's slots."""
    return {slot.file.content for slot in store.shards.get(rank, []) if slot.file.content is not None}
