"""Divides the data of a shared S3 object into parts that several nodes read from S3 and send to each other.

    object   header | part 1 | part 2 | …       consecutive bytes of the object's data
    slot     tensor … tensor …                  the same bytes, as the tensors of one shard

Invariant: all nodes divide the object in the same way. `present` contains only parts that are completely in the slot.
The load that owns the slot verifies these bytes later.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

from everstep.protocol.plan import ObjectReference
from everstep.protocol.slot import chunk_range
from worker.shm.slot_file import SlotFile
from worker.storage.object_store import ObjectStore, Span
from worker.storage.shard_parts import Parts
from worker.tasks import Signal


class ObjectParts(Parts):
    """The parts of one S3 object that several shards share, and the slot into which this node reads them."""

    def __init__(self, place: ObjectReference, data_begin: int, spans: Sequence[Span], slot: SlotFile) -> None:
        """Create the object. `spans` are the ranges of the slot's payload that the object's data fills, in order."""
        begins = list(accumulate((end - begin for begin, end in spans), initial=0))
        super().__init__(begins.pop())
        self.place = place
        self.present: set[int] = set()
        """Numbers of the parts that the slot contains. Changed only on the event loop."""
        self.changed = Signal()
        self._data_begin = data_begin
        self._spans = spans
        self._begins = begins
        """Position within the object's data at which each span begins."""
        self._slot = slot

    def mark(self, number: int) -> None:
        """Record that the slot contains part `number` of the shared S3 object. Called on the event loop."""
        self.present.add(number)
        self.changed.notify()

    def read(self, objects: ObjectStore, number: int, is_cancelled: Callable[[], bool]) -> None:
        """Read one part (numbered from 1) from S3 into the slot.

        Blocks. After a cancellation, its content is undefined.

        Raises CorruptCheckpoint if the object ends too early, and StorageError if the store refused the read.
        """
        begin, end = self.bounds(number)
        spans = self._places(begin, end)
        with self._slot.payload(0, max(last for _, last in spans)) as payload:
            objects.read_range(self.place, self._data_begin + begin, payload, spans, is_cancelled=is_cancelled)

    def write(self, chunk: int, data: memoryview) -> None:
        """Copy a chunk of the object's data into the slot. Thread-safe for different chunks."""
        position = 0
        for begin, end in self._places(*chunk_range(chunk, self.payload_bytes)):
            with self._slot.payload(begin, end) as target:
                target[:] = data[position : position + end - begin]
            position += end - begin

    def copy(self, number: int, target: memoryview) -> None:
        """Copy one part from the slot into `target`, which has exactly the part's size."""
        position = 0
        for begin, end in self._places(*self.bounds(number)):
            with self._slot.payload(begin, end) as data:
                target[position : position + end - begin] = data
            position += end - begin

    def _places(self, begin: int, end: int) -> list[Span]:
        """Return the ranges of the slot's payload that receive the bytes `begin` to `end` of the object's data."""
        found: list[Span] = []
        number = bisect_right(self._begins, begin) - 1
        while begin < end:
            first, last = self._spans[number]
            start = first + begin - self._begins[number]
            stop = min(last, start + end - begin)
            found.append((start, stop))
            begin += stop - start
            number += 1
        return found
