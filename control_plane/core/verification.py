"""Verifications of checkpoints: the verdict on the objects in S3, and why a verification waits.

Invariant: a read that fails is no verdict. It is an `Obstacle`, and the request to verify stays.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from everstep.protocol.agent_messages import Obstacle

FIRST_PAUSE_SECONDS: Final = 5.0
LONGEST_PAUSE_SECONDS: Final = 120.0


class VerdictKind(StrEnum):
    """The result of a verification that could read everything."""

    INTACT = "Intact"
    WRONG = "Wrong"


class DamageKind(StrEnum):
    """The way in which an object differs from the manifest.

    - HEADER: the object's header cannot be read, or describes another shard.
    - MANIFEST: the manifest in S3 differs from the manifest that the control plane wrote.
    - RECORD: the control plane's own copy of the manifest cannot be decoded.
    - LOADED: agents that loaded the object found other bytes.
    - EARLIER: an earlier version of Everstep stored the result as text.
    """

    MISSING = "Missing"
    SIZE = "Size"
    HEADER = "Header"
    CONTENT = "Content"
    MANIFEST = "Manifest"
    RECORD = "Record"
    LOADED = "Loaded"
    EARLIER = "Earlier"


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """One object that is wrong. `detail` is text for people: no code reads it."""

    kind: DamageKind
    rank: int | None = None
    """None if the damage concerns the whole checkpoint."""
    detail: str = ""

    def __str__(self) -> str:
        """Describe the damage for people."""
        return self.detail if self.rank is None else f"rank {self.rank}: {self.detail}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointVerdict:
    """The stored result of a verification."""

    kind: VerdictKind = VerdictKind.INTACT
    damage: tuple[Damage, ...] = ()

    @classmethod
    def of(cls, *damage: Damage) -> CheckpointVerdict:
        """Return the verdict WRONG for this damage, and INTACT without damage."""
        return cls(kind=VerdictKind.WRONG if damage else VerdictKind.INTACT, damage=damage)

    @property
    def is_wrong(self) -> bool:
        """Whether an object differs from the manifest."""
        return self.kind is VerdictKind.WRONG

    def __str__(self) -> str:
        """Describe the damage for people. Empty if the checkpoint is intact."""
        return "; ".join(map(str, self.damage))


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocked:
    """A wait, because S3 or another service of AWS cannot be read. `detail` is text for people: no code reads it."""

    obstacle: Obstacle
    since: float
    """Unix time of the first failed attempt."""
    attempt_count: int = 1
    next_attempt_at: float = 0.0
    detail: str = ""
    is_probed: bool = False
    """Whether the nodes themselves repeat the read until it succeeds. `next_attempt_at` is then in the past."""


def blocked(
    before: Blocked | None,
    obstacle: Obstacle,
    detail: str,
    now: float,
    *,
    longest_seconds: float = LONGEST_PAUSE_SECONDS,
) -> Blocked:
    """Return the wait after another failed attempt. The pause doubles with each attempt, up to `longest_seconds`."""
    since, count = (now, 0) if before is None else (before.since, before.attempt_count)
    pause = min(FIRST_PAUSE_SECONDS * 2.0 ** min(count, 16), longest_seconds)
    return Blocked(obstacle=obstacle, since=since, attempt_count=count + 1, next_attempt_at=now + pause, detail=detail)
