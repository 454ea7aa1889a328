"""Times the XOR of two chunks by several implementations, and for comparison a copy and a digest of a chunk."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from everstep.protocol.slot import CHUNK_BYTES, digest
from worker.shm import combining

GIB = 1 << 30
REPEATS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class XorTime:
    """Times of one operation on chunks."""

    name: str
    seconds_per_gib: tuple[float, ...]
    """Seconds of each repetition."""


def times() -> list[XorTime]:
    """Measure a copy, a digest and every implementation of the XOR on the same two chunks."""
    target, source = bytearray(os.urandom(CHUNK_BYTES)), bytearray(os.urandom(CHUNK_BYTES))
    into, out_of = memoryview(target), memoryview(source)

    def by_integers() -> None:
        mixed = int.from_bytes(target, "little") ^ int.from_bytes(source, "little")
        target[:] = mixed.to_bytes(CHUNK_BYTES, "little")

    operations: dict[str, Callable[[], object]] = {
        "XOR with numpy (`worker.shm.combining`)": lambda: combining.combine(into, out_of),
        "XOR with Python's integers": by_integers,
        "copy": lambda: combining.replace(into, out_of),
        "digest": lambda: digest(source),
    }
    return [XorTime(name=name, seconds_per_gib=_seconds(work)) for name, work in operations.items()]


def _seconds(work: Callable[[], object]) -> tuple[float, ...]:
    found = []
    work()
    for _ in range(REPEATS):
        begun = time.perf_counter()
        work()
        found.append((time.perf_counter() - begun) * GIB / CHUNK_BYTES)
    return tuple(found)
