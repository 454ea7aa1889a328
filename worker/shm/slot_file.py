"""One slot on tmpfs: a header page and a payload, mapped into the agent (layout: `everstep.protocol.slot`).

Invariant: the header on tmpfs is what this object says it is; it is written before anything is told to anybody. Pages
are allocated when the file is made, so that a full tmpfs is an error here and never a SIGBUS in a rank.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import stat
import threading
from dataclasses import replace
from pathlib import Path

from everstep.protocol.errors import ProtocolError
from everstep.protocol.pages import PIECE_BYTES, populate
from everstep.protocol.slot import HEADER_BYTES, SlotHeader, SlotState, pack_header, unpack_header
from worker.core.slots import Content


class SlotFile:
    """A mapped slot. One owner: the node's `SlotStore`, which closes it."""

    def __init__(self, path: Path, mapping: mmap.mmap, header: SlotHeader) -> None:
        self.path = path
        self._mapping = mapping
        self._view = memoryview(mapping)
        self.header = header

    @classmethod
    def create(cls, path: Path, header: SlotHeader, cancelled: threading.Event) -> SlotFile:
        """Make the file anew, replacing one of the same name (who has the old one mapped keeps an orphan), pages allocated and zero.

        Called in a thread: a cold GiB takes up to a second.

        Args:
            path: on tmpfs; its folder exists.
            header: its `capacity_bytes` is the room for the payload.
            cancelled: looked at between pieces of `PIECE_BYTES`.

        Returns:
            The file, mapped, with `header` written; the caller closes it.

        Raises:
            OSError: tmpfs is full (ENOSPC), the folder is missing, or nobody wants the file any more (ECANCELED); none
                is left behind.
        """
        scratch = path.with_name(f"{path.name}.new")
        size = HEADER_BYTES + header.capacity_bytes
        descriptor = os.open(scratch, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, size)
            mapping = mmap.mmap(descriptor, size)
            try:
                _allocate(descriptor, mapping, cancelled)
            except OSError:
                mapping.close()
                raise
        except OSError:
            scratch.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        slot = cls(path, mapping, header)
        slot.write_header(header)
        scratch.replace(path)
        return slot

    @classmethod
    def adopt(cls, path: Path) -> SlotFile:
        """Open what an earlier agent left.

        Args:
            path: a slot file, in whatever state its agent left it.

        Returns:
            The file, mapped, with the header that was found; the payload is not looked at.

        Raises:
            ProtocolError: the header is corrupt, of another version, or contradicts the file's size.
        """
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            found = os.fstat(descriptor)
            size = found.st_size
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
                raise ProtocolError(
                    f"{path.name} is no file of this agent's, but of uid {found.st_uid}, mode {found.st_mode:o}"
                )
            if size < HEADER_BYTES:
                raise ProtocolError(f"{path.name} has {size} bytes")
            mapping = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        try:
            header = unpack_header(mapping[:HEADER_BYTES])
            if HEADER_BYTES + header.capacity_bytes != size:
                raise ProtocolError(f"{path.name}: capacity {header.capacity_bytes} in a file of {size} bytes")
        except ProtocolError:
            mapping.close()
            raise
        return cls(path, mapping, header)

    @classmethod
    def void(cls, path: Path, header: SlotHeader) -> SlotFile:
        """Declare whatever lies at `path` an empty slot, in place: a rank that still has it mapped keeps the same pages.

        Args:
            path: of a slot whose content cannot be believed; where nothing lies, or less than a header, the slot has no
                file.
            header: EMPTY; the capacity is the file's.

        Returns:
            The slot.
        """
        size = path.stat().st_size if path.exists() else 0
        if size < HEADER_BYTES:
            slot = cls(path, mmap.mmap(-1, HEADER_BYTES), header)
            slot.drop()
            return slot
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            slot = cls(path, mmap.mmap(descriptor, size), header)
        finally:
            os.close(descriptor)
        slot.write_header(replace(header, capacity_bytes=size - HEADER_BYTES))
        return slot

    @property
    def content(self) -> Content | None:
        """What the slot holds or is being filled with; None when it is empty."""
        if self.header.state is SlotState.EMPTY:
            return None
        return Content(self.header.origin_generation, self.header.step)

    def write_header(self, header: SlotHeader) -> None:
        """Put `header` on tmpfs. A reader that meets a torn page finds a digest that does not hold: an empty slot."""
        self._view[:HEADER_BYTES] = pack_header(header)
        self.header = header

    def empty(self) -> None:
        """Declare the content void."""
        if self.header.state is not SlotState.EMPTY:
            self.write_header(replace(self.header, state=SlotState.EMPTY))

    def drop(self) -> None:
        """Remove the file: the slot holds nothing, and has no room until it is made anew.

        Who has it mapped keeps an orphan. Idempotent.
        """
        self.empty()
        self.header = replace(self.header, capacity_bytes=0)
        self.close(unlink=True)

    def payload(self, start: int = 0, end: int | None = None) -> memoryview:
        """Return the bytes `start` to `end` of the payload (to its used end by default); release the view before the slot is closed."""
        stop = self.header.payload_bytes if end is None else end
        return self._view[HEADER_BYTES + start : HEADER_BYTES + stop]

    def close(self, *, unlink: bool = False) -> None:
        """Unmap, and remove the file if asked.

        A view that somebody still holds keeps the memory until it is released.
        """
        if unlink:
            self.path.unlink(missing_ok=True)
        self._view.release()
        try:
            self._mapping.close()
        except BufferError:  # a thread still reads a piece: the mapping goes with its last view
            return


def _allocate(descriptor: int, mapping: mmap.mmap, cancelled: threading.Event) -> None:
    """Give a file its pages, and its mapping their entries, which takes as long again."""
    # A pointer into the mapping, held by nobody: the address alone is needed.
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    for start in range(0, len(mapping), PIECE_BYTES):
        if cancelled.is_set():
            raise OSError(errno.ECANCELED, "nobody wants this slot any more")
        size = min(PIECE_BYTES, len(mapping) - start)
        os.posix_fallocate(descriptor, start, size)
        populate(address + start, size, is_written=True)
