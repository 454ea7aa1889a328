"""Detects a connection to a holder that breaks repeatedly, although each reconnection works.

    sound ── `CUTS` breaks without a complete step in between ──▶ breaking ── a step arrives in one transfer ──▶ sound

The silence check does not drop such a holder from the view, because the holder answers. Invariant: a connection over
which the last step arrived in one transfer is sound.
"""

from __future__ import annotations

from dataclasses import dataclass

from everstep.protocol.ids import Step

# A restart of the holder's agent interrupts one transfer, and another may break for an unrelated reason.
CUTS = 3
"""Number of interrupted transfers after which the owner reports the connection."""


@dataclass(frozen=True, slots=True)
class BrokenLine:
    """State of the owner's connection to one holder. The default object represents a sound connection."""

    cut_count: int = 0
    step: Step | None = None
    """The step that the owner was sending when the connection last broke; None if it has not broken."""
    words: str = ""
    """Last failure of the connection, for the message to users."""

    def cut_short(self, step: Step, words: str) -> BrokenLine:
        """Record that the connection broke while data of `step` was still to be sent; `words` describes the break."""
        return BrokenLine(self.cut_count + 1, step, words)

    def arrived(self, step: Step) -> BrokenLine:
        """Record that the holder has all of `step`. A step that arrived in one transfer resets the count of breaks."""
        return self if step == self.step else BrokenLine()

    @property
    def trouble(self) -> str:
        """Message about a connection that breaks repeatedly; empty for a sound connection."""
        return (
            ""
            if self.cut_count < CUTS
            else f"its line breaks: {self.cut_count} transfers were cut short and none came whole, the last: "
            f"{self.words}"
        )
