"""One slot: a header and a payload in sealed memory, mapped into the agent (layout: `everstep.protocol.slot`).

Invariant: the header in memory equals `header` of this object, and is written before the agent sends a message about
the change. All memory is allocated when the file is created, and no process can resize it, so that no access fails.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from dataclasses import replace
from pathlib import Path

from everstep.protocol.errors import ProtocolError
from everstep.protocol.pages import PIECE_BYTES, populate, prefer_huge
from everstep.protocol.slot import HEADER_BYTES, SlotHeader, SlotState, pack_header, unpack_header
from worker.core.slots import Content
from worker.shm.held_files import HeldFiles, create_file, is_sealed, seal


class SlotFile:
    """A slot that the agent has mapped into its memory. The node's `SlotStore` owns and closes it."""

    def __init__(self, name: str, files: HeldFiles, mapping: mmap.mmap, header: SlotHeader) -> None:
        self.name = name
        self._files = files
        self._mapping = mapping
        self._view = memoryview(mapping)
        self.header = header

    @classmethod
    def create(cls, name: str, files: HeldFiles, header: SlotHeader, cancelled: threading.Event) -> SlotFile:
        """Create the file with all memory allocated and zero, in place of a file of the same name. Called in a thread.

        Processes that have mapped the old file can still use its memory. 1 GiB takes up to a second. Raises OSError,
        and leaves no file, if the kernel has no memory (ENOMEM) or `cancelled` was set (ECANCELED).
        """
        size = HEADER_BYTES + header.capacity_bytes
        descriptor = create_file(name, size)
        try:
            mapping = mmap.mmap(descriptor, size)
            try:
                _allocate(descriptor, mapping, cancelled)
            except OSError:
                mapping.close()
                raise
            slot = cls(name, files, mapping, header)
            slot.write_header(header)
            seal(descriptor)
            files.hold(name, descriptor)
        finally:
            os.close(descriptor)
        return slot

    @classmethod
    def adopt(cls, name: str, files: HeldFiles) -> SlotFile:
        """Map a slot in any state that an earlier agent process has created, without a check of its payload.

        Raises ProtocolError if the header is corrupt, has another version, or contradicts the file's size, and OSError
        if the file cannot be mapped.
        """
        mapping, size = _map(name, files)
        try:
            header = unpack_header(mapping[:HEADER_BYTES])
            if HEADER_BYTES + header.capacity_bytes != size:
                raise ProtocolError(
                    f"{name}: a capacity of {header.capacity_bytes} does not fit a file of {size} bytes"
                )
        except ProtocolError:
            mapping.close()
            raise
        return cls(name, files, mapping, header)

    @classmethod
    def void(cls, name: str, files: HeldFiles, header: SlotHeader) -> SlotFile:
        """Turn a file into an empty slot, in place. A rank that has mapped the file keeps its mapping.

        `header` is EMPTY, with the file's capacity. Without a valid file, the returned slot has no file.
        """
        try:
            mapping, size = _map(name, files)
        except (ProtocolError, OSError):
            slot = cls(name, files, mmap.mmap(-1, HEADER_BYTES), header)
            slot.drop()
            return slot
        slot = cls(name, files, mapping, header)
        slot.write_header(replace(header, capacity_bytes=size - HEADER_BYTES))
        return slot

    @property
    def path(self) -> Path:
        """A path under which this process can open the file."""
        return Path(f"/proc/self/fd/{self._files.descriptor(self.name)}")

    @property
    def content(self) -> Content | None:
        """The content of the slot, or the content that is being written into it; None if the slot is empty."""
        if self.header.state is SlotState.EMPTY:
            return None
        return Content(self.header.origin_generation, self.header.step)

    def write_header(self, header: SlotHeader) -> None:
        """Write `header` to the slot's file."""
        # A partly written header has an invalid digest, so readers treat the slot as empty.
        self._view[:HEADER_BYTES] = pack_header(header)
        self.header = header

    def empty(self) -> None:
        """Mark the slot as EMPTY in its header. The bytes of the payload stay."""
        if self.header.state is not SlotState.EMPTY:
            self.write_header(replace(self.header, state=SlotState.EMPTY))

    def drop(self) -> None:
        """Forget the slot's file, whose memory other processes may still use. Idempotent."""
        self.empty()
        self.header = replace(self.header, capacity_bytes=0)
        self.close(unlink=True)

    def payload(self, start: int = 0, end: int | None = None) -> memoryview:
        """Return a range of the payload, by default all. The caller must release the view before the slot is closed."""
        stop = self.header.payload_bytes if end is None else end
        return self._view[HEADER_BYTES + start : HEADER_BYTES + stop]

    def close(self, *, unlink: bool = False) -> None:
        """Unmap the slot's file, and forget it if `unlink` is True."""
        if unlink:
            self._files.forget(self.name)
        self._view.release()
        try:
            self._mapping.close()
        except BufferError:  # The kernel frees the memory when the last memoryview is released.
            return


def _map(name: str, files: HeldFiles) -> tuple[mmap.mmap, int]:
    """Map a file that no process can resize. Return the mapping and its size in bytes."""
    descriptor = files.descriptor(name)
    size = os.fstat(descriptor).st_size
    if not is_sealed(descriptor) or size < HEADER_BYTES:
        raise ProtocolError(f"{name} is no slot: it has {size} bytes")
    return mmap.mmap(descriptor, size), size


def _allocate(descriptor: int, mapping: mmap.mmap, cancelled: threading.Event) -> None:
    """Allocate the memory of a new slot file in pieces, as huge pages where the kernel supports them."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    prefer_huge(address, len(mapping))
    for start in range(0, len(mapping), PIECE_BYTES):
        if cancelled.is_set():
            raise OSError(errno.ECANCELED, "the creation of the slot was cancelled")
        size = min(PIECE_BYTES, len(mapping) - start)
        if not populate(address + start, size, is_written=True):
            os.posix_fallocate(descriptor, start, size)
