"""Whether a holder's line breaks again and again, although another one can be opened each time. Pure.

    sound ── `CUTS` breaks, and no step in between that arrives whole ──▶ breaking ── a step arrives whole ──▶ sound

What has come of a step stays with the holder when its line breaks, and the next transfer goes on from there. So a
single break costs a moment; a row of them says that steps come late or not at all, to a holder that answers and thus
stays in view. Whole is what comes in one go: over a line that was reset ten times a second no step of 64 MiB took more
than three transfers, and yet a third to a half of the steps were not kept (one every 160 ms).

Invariant: a line over which the last step has come in one go is sound.
"""

from __future__ import annotations

from dataclasses import dataclass

from everstep.protocol.ids import Step

CUTS = 3
"""Transfers that are cut short before it is told.

A holder's agent that restarts cuts one, and what goes on behind it may meet one more by chance.
Where lines break as soon as they are open, the waits before dialling again make a row of three last a few tenths of a
second: it is told long before the holder leaves the view for it (`holder_deadline`)."""


@dataclass(frozen=True, slots=True)
class BrokenLine:
    """What a sender knows of its holder's line. A new one is sound. One per holder."""

    cut_count: int = 0
    """Transfers that were cut short since a step has arrived whole."""
    step: Step | None = None
    """Of the last of them."""
    words: str = ""
    """How that one was cut short."""

    def cut_short(self, step: Step, words: str) -> BrokenLine:
        """The line broke while the holder lacked a step that it could be sent."""
        return BrokenLine(self.cut_count + 1, step, words)

    def arrived(self, step: Step) -> BrokenLine:
        """The holder has all of a step; the rest of one that was cut short says nothing of the line yet."""
        return self if step == self.step else BrokenLine()

    @property
    def trouble(self) -> str:
        """What is told of the line; empty while it is sound."""
        return (
            ""
            if self.cut_count < CUTS
            else f"its line breaks: {self.cut_count} transfers were cut short and none came whole, the last: "
            f"{self.words}"
        )
