"""Counts planted corruptions by place, kind and outcome. Functions of this module also corrupt bytes for all places."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum

import pytest

from tests.small_chunks import use_small_chunks
from worker.shm.held_files import HeldFiles, create_file, seal

CHUNK_BYTES = 512
"""Size of a chunk during the tests. It is small, so that small shards have several chunks."""


class Outcome(StrEnum):
    """The outcome of reading a corrupted shard."""

    REFUSED = "refused"
    HARMLESS = "harmless"
    """The reader returned exactly the original bytes under the original name."""
    LOADED = "loaded"
    """The reader returned other bytes, or the bytes under another name. This is a bug."""


@dataclass
class Counts:
    """Number of corruptions that a run planted, by their outcomes."""

    by_kind: Counter[tuple[str, str, Outcome]] = field(default_factory=Counter)
    """Number of corruptions by place, kind and outcome."""
    loaded: list[str] = field(default_factory=list)
    """Descriptions of the corruptions with the outcome `LOADED`."""

    def add(self, place: str, kind: str, outcome: Outcome, description: str) -> None:
        """Count one corruption."""
        self.by_kind[place, kind, outcome] += 1
        if outcome is Outcome.LOADED:
            self.loaded.append(f"{place}, {kind}: {description}")

    @property
    def total(self) -> int:
        """Number of planted corruptions."""
        return sum(self.by_kind.values())

    def table(self) -> str:
        """Return the counts as text, one line for each place and kind."""
        lines = [f"{'place':<22}{'kind':<22}" + "".join(f"{outcome:>10}" for outcome in Outcome)]
        for place, kind in sorted({(place, kind) for place, kind, _ in self.by_kind}):
            counts = "".join(f"{self.by_kind[place, kind, outcome]:>10}" for outcome in Outcome)
            lines.append(f"{place:<22}{kind:<22}{counts}")
        totals = Counter(outcome for _, _, outcome in self.by_kind.elements())
        lines.append(f"{'total':<44}" + "".join(f"{totals[outcome]:>10}" for outcome in Outcome))
        return "\n".join(lines)


@contextmanager
def small_chunks() -> Iterator[None]:
    """Give all payloads chunks of `CHUNK_BYTES` bytes."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        use_small_chunks(monkeypatch, CHUNK_BYTES)
        yield


def flipped(data: bytes, draw: random.Random) -> bytes:
    """Return the data with one to three flipped bits."""
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 3))):
        changed[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def truncated(data: bytes, draw: random.Random) -> bytes:
    """Return the data without its end."""
    return data[: draw.randrange(len(data))]


def without_part(data: bytes, draw: random.Random) -> bytes:
    """Return the data without a range in its middle, or with zeros in this range.

    An upload that lost a part leaves such data.
    """
    begin = draw.randrange(len(data))
    end = min(len(data), begin + draw.randrange(1, 2 * CHUNK_BYTES))
    return data[:begin] + (bytes(end - begin) if draw.random() < 0.5 else b"") + data[end:]


def hold(files: HeldFiles, name: str, data: bytes) -> None:
    """Put a file with this content in the place of a slot, as a faulty memory or an older release could leave it."""
    descriptor = create_file(name, len(data))
    os.pwrite(descriptor, data, 0)
    seal(descriptor)
    files.hold(name, descriptor)
    os.close(descriptor)
