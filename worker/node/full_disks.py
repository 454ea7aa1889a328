"""Detects full disks from failed writes, because checks of free space miss quotas, inodes and other file systems.

Invariant: `FullDisks.faults` reports a folder as full, with the same message, until `QUIET_SECONDS` after the newest
failed write in it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from everstep.protocol.agent_messages import FaultCode, NodeFault
from everstep.protocol.limits import cut

QUIET_SECONDS = 30.0
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_WORDS = re.compile(r"No space left on device|Disk quota exceeded")
_NAMED = re.compile(r"\[Errno (?:28|122)\] [^:\n]+: '(?P<path>/[^'\n]+)'")


@dataclass(frozen=True, slots=True)
class _Place:
    fault: NodeFault
    failed_at: float
    """Monotonic seconds of the newest failed write to this folder."""


class FullDisks:
    """Collects the folders on this node where writes failed for lack of space. All calls run on the event loop."""

    def __init__(self, state: Path, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._state = state
        self.monotonic = monotonic
        self._places: dict[str, _Place] = {}

    def note(self, error: BaseException, fallback: Path | None = None) -> NodeFault | None:
        """Record a failed write, in `fallback` if `error` names no file. None if it does not show lack of space."""
        found = full_disk_of(error)
        if found is None:
            return None
        named = Path(os.fsdecode(found.filename)).parent if isinstance(found.filename, str | bytes) else None
        return self._note(named or fallback or self._state, found.strerror or str(found))

    def note_words(self, words: str) -> NodeFault | None:
        """Record a failed write of another process if the last lines of its output report a full disk."""
        match = _WORDS.search(words)
        if match is None:
            return None
        named = _NAMED.search(words)
        if named is None:
            return self._note(self._state, match[0])
        # The job chose this path. Its file system may hang, so the agent must not query the free space.
        return self._note(Path(named["path"]).parent, match[0], is_ours=False)

    def faults(self, others: Sequence[NodeFault] = ()) -> tuple[NodeFault, ...]:
        """Return a fault, sorted by path, for each folder that lacked space recently and that `others` do not cover."""
        now = self.monotonic()
        self._places = {name: place for name, place in self._places.items() if now - place.failed_at < QUIET_SECONDS}
        reported = [Path(fault.device) for fault in others if fault.code == FaultCode.DISK_FULL]
        return tuple(
            place.fault
            for name, place in sorted(self._places.items())
            if not any(Path(name).is_relative_to(each) for each in reported)
        )

    def _note(self, directory: Path, words: str, *, is_ours: bool = True) -> NodeFault:
        name = str(directory)
        known = self._places.get(name)
        if known is None:
            free = _free(directory) if is_ours else ""
            message = f"{name} takes no more data: {words}{free}. Free space there; it is used again by itself"
            fault = NodeFault(code=FaultCode.DISK_FULL, message=cut(message), is_permanent=False, device=name)
            known = _Place(fault, 0.0)
        self._places[name] = replace(known, failed_at=self.monotonic())
        return known.fault


def full_disk_of(error: BaseException) -> OSError | None:
    """Return the error for a full disk or an exceeded quota among `error` and its causes, or None."""
    return next((each for each in _causes(error) if isinstance(each, OSError) and each.errno in _FULL), None)


def says_full(words: str) -> bool:
    """Return whether a process's output contains the system's error text for a full disk or an exceeded quota."""
    return _WORDS.search(words) is not None


def _causes(error: BaseException) -> Iterator[BaseException]:
    each: BaseException | None = error
    while each is not None:
        yield each
        each = each.__cause__


def _free(directory: Path) -> str:
    with contextlib.suppress(OSError):
        facts = os.statvfs(directory)
        return f", {facts.f_bavail * facts.f_frsize / (1 << 20):,.1f} MiB and {facts.f_favail:,} inodes are free"
    return ""
