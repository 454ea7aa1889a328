"""One slot on tmpfs: a header and a payload, mapped into the agent (layout: `everstep.protocol.slot`).

Invariant: the header on tmpfs equals `header` of this object, and is written before the agent sends a message about the
change. All memory is allocated when the file is created, so that a full tmpfs never causes a SIGBUS in a rank.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import shutil
import stat
import threading
from dataclasses import replace
from pathlib import Path

from everstep.protocol.errors import ProtocolError
from everstep.protocol.pages import PIECE_BYTES, populate
from everstep.protocol.slot import HEADER_BYTES, SlotHeader, SlotState, pack_header, unpack_header
from worker.core.slots import Content


class SlotFile:
    """A slot that the agent has mapped into its memory. The node's `SlotStore` owns and closes it."""

    def __init__(self, path: Path, mapping: mmap.mmap, header: SlotHeader) -> None:
        self.path = path
        self._mapping = mapping
        self._view = memoryview(mapping)
        self.header = header

    @classmethod
    def create(cls, path: Path, header: SlotHeader, cancelled: threading.Event) -> SlotFile:
        """Create the file with all memory allocated and zero, replacing a file of the same name.

        Processes that have mapped the old file can still use its memory. Called in a thread, because 1 GiB of memory
        takes up to a second.

        Args:
            path: path on tmpfs; its folder exists.
            header: its `capacity_bytes` is the maximum size of the payload.
            cancelled: stops the creation when set; checked after every `PIECE_BYTES`.

        Returns:
            The mapped file with `header` written; the caller closes it.

        Raises:
            OSError: tmpfs is full (ENOSPC), the folder is missing, or `cancelled` was set (ECANCELED). No file is left
                behind.
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
        """Open a slot file that an earlier agent process has created.

        Args:
            path: a slot file in any state.

        Returns:
            The mapped file with its header. The payload is not checked.

        Raises:
            ProtocolError: the header is corrupt, has another version, or contradicts the file's size.
        """
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            found = os.fstat(descriptor)
            size = found.st_size
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
                raise ProtocolError(
                    f"{path.name} is not a file of this agent: it has uid {found.st_uid}, mode {found.st_mode:o}"
                )
            if size < HEADER_BYTES:
                raise ProtocolError(f"{path.name} has {size} bytes, too few for a slot")
            if _has_holes(found):
                raise ProtocolError(f"{path.name} was enlarged to {size} bytes, which are not allocated")
            mapping = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        try:
            header = unpack_header(mapping[:HEADER_BYTES])
            if HEADER_BYTES + header.capacity_bytes != size:
                raise ProtocolError(
                    f"{path.name}: a capacity of {header.capacity_bytes} bytes does not fit a file of {size} bytes"
                )
        except ProtocolError:
            mapping.close()
            raise
        return cls(path, mapping, header)

    @classmethod
    def void(cls, path: Path, header: SlotHeader) -> SlotFile:
        """Turn the file at `path` into an empty slot, in place. A rank that has mapped the file keeps its mapping.

        Args:
            path: path of a slot whose content is not trusted. A file that is shorter than a header, that a rank has
                enlarged, or that is not a regular file is removed. The returned slot then has no file, as if none
                existed.
            header: an EMPTY header. The capacity of the file replaces the capacity in this header.

        Returns:
            The slot.
        """
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:  # no file, a link or a folder
            return cls._without_file(path, header)
        try:
            found = os.fstat(descriptor)
            size = found.st_size
            if not stat.S_ISREG(found.st_mode) or size < HEADER_BYTES or _has_holes(found):
                return cls._without_file(path, header)
            slot = cls(path, mmap.mmap(descriptor, size), header)
        finally:
            os.close(descriptor)
        slot.write_header(replace(header, capacity_bytes=size - HEADER_BYTES))
        return slot

    @classmethod
    def _without_file(cls, path: Path, header: SlotHeader) -> SlotFile:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        slot = cls(path, mmap.mmap(-1, HEADER_BYTES), header)
        slot.drop()
        return slot

    @property
    def content(self) -> Content | None:
        """The content of the slot, or the content that is being written into it; None if the slot is empty."""
        if self.header.state is SlotState.EMPTY:
            return None
        return Content(self.header.origin_generation, self.header.step)

    def write_header(self, header: SlotHeader) -> None:
        """Write `header` to the slot's file on tmpfs.

        A partly written header has an invalid digest, so readers treat the slot as empty.
        """
        self._view[:HEADER_BYTES] = pack_header(header)
        self.header = header

    def empty(self) -> None:
        """Mark the slot as EMPTY in its header on tmpfs. The bytes of the payload stay."""
        if self.header.state is not SlotState.EMPTY:
            self.write_header(replace(self.header, state=SlotState.EMPTY))

    def drop(self) -> None:
        """Remove the slot's file from tmpfs.

        The slot is empty and has no capacity until its file is created again. Processes that have mapped the file can
        still use its memory. Further calls change nothing.
        """
        self.empty()
        self.header = replace(self.header, capacity_bytes=0)
        self.close(unlink=True)

    def payload(self, start: int = 0, end: int | None = None) -> memoryview:
        """Return the bytes `start` to `end` of the payload; `end` defaults to the payload's length.

        The caller must release the returned view before the slot is closed.
        """
        stop = self.header.payload_bytes if end is None else end
        return self._view[HEADER_BYTES + start : HEADER_BYTES + stop]

    def close(self, *, unlink: bool = False) -> None:
        """Unmap the slot's file, and remove it if `unlink` is True.

        If a memoryview of the payload is still in use, the kernel frees the memory when the memoryview is released.
        """
        if unlink:
            self.path.unlink(missing_ok=True)
        self._view.release()
        try:
            self._mapping.close()
        except BufferError:  # The kernel frees the memory when the last memoryview is released.
            return


def _has_holes(found: os.stat_result) -> bool:
    """Return whether a file is longer than the memory that the agent allocated for it."""
    return found.st_blocks * 512 < found.st_size


def _allocate(descriptor: int, mapping: mmap.mmap, cancelled: threading.Event) -> None:
    """Allocate the memory of a new slot file, and map it into this process.

    The work is done in pieces, between which it can be cancelled.
    """
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    for start in range(0, len(mapping), PIECE_BYTES):
        if cancelled.is_set():
            raise OSError(errno.ECANCELED, "the creation of the slot was cancelled")
        size = min(PIECE_BYTES, len(mapping) - start)
        os.posix_fallocate(descriptor, start, size)
        populate(address + start, size, is_written=True)
