"""Formats the stacks of a rank's threads, and measures for how long they have not changed.

Invariant: the text contains no address, pid or thread id, so ranks that hang at the same place have the same text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_TEXT_BYTES = 8 * 1024
MAIN_THREAD = "MainThread"


@dataclass(frozen=True, slots=True)
class StackFrame:
    """One function call of a thread's stack."""

    function: str
    file: str
    line: int


@dataclass(frozen=True, slots=True)
class ThreadStack:
    """One thread's stack, innermost frame first."""

    name: str
    frames: tuple[StackFrame, ...]


def describe(threads: Sequence[ThreadStack]) -> str:
    """Return the stacks as text, main thread first, cut to `MAX_TEXT_BYTES`."""
    ordered = sorted(threads, key=lambda thread: (thread.name != MAIN_THREAD, thread.name, thread.frames == ()))
    blocks = [
        "\n".join(
            [
                thread.name or "(a thread without a name)",
                *(f"    {frame.function} ({frame.file}:{frame.line})" for frame in thread.frames),
            ]
        )
        for thread in ordered
    ]
    whole = "\n".join(blocks)
    cut = whole.encode()[:MAX_TEXT_BYTES].decode(errors="ignore")
    return whole if cut == whole else f"{cut.rpartition(chr(10))[0]}\n    …"


@dataclass(frozen=True, slots=True)
class Look:
    """A sample of a process's stacks as text."""

    text: str
    at: float
    cpu_seconds: float


def compare(before: Look | None, found: Look) -> tuple[Look, float, float]:
    """Return (the first sample with the current stacks, to pass as `before` next; seconds since; CPU seconds since)."""
    if before is None or before.text != found.text:
        return found, 0.0, 0.0
    return before, max(0.0, found.at - before.at), max(0.0, found.cpu_seconds - before.cpu_seconds)
