"""Detects a connection to a holder that breaks repeatedly, although each reconnection works. No I/O.

    sound ── `CUTS` breaks without a complete step in between ──▶ breaking ── a step arrives in one transfer ──▶ sound

When a connection breaks, the holder keeps the received chunks, and the next transfer sends only the missing chunks. A
single break therefore delays a step only briefly. After a series of breaks, steps arrive late or not at all. The
silence check does not drop such a holder from the view, because the holder answers (`worker.core.silence`).

Only a step that arrives in a single transfer proves a sound connection. The row *connections reset* of
docs/benchmarks-faults.md shows the report about a breaking connection.

Invariant: a connection over which the last step arrived in one transfer is sound.
"""

from __future__ import annotations

from dataclasses import dataclass

from everstep.protocol.ids import Step

CUTS = 3
"""Number of interrupted transfers after which the owner reports the connection.

A restart of the holder's agent interrupts one transfer, and another transfer may break for an unrelated reason. A third
break therefore shows a faulty connection. If every new connection breaks immediately, three breaks take a few tenths of
a second, much less than `holder_deadline`.
"""


@dataclass(frozen=True, slots=True)
class BrokenLine:
    """State of the owner's connection to one holder: sound, or breaking repeatedly.

    An object with default values represents a sound connection.
    """

    cut_count: int = 0
    """Number of transfers that broke since the last step that arrived in one transfer."""
    step: Step | None = None
    """The step that the owner was sending when the connection last broke; None if it has not broken."""
    words: str = ""
    """Description of the last failure of the connection, for the message to users."""

    def cut_short(self, step: Step, words: str) -> BrokenLine:
        """Record that the connection broke while the owner still had to send data of `step`.

        `words` describes the break, for the message to users.
        """
        return BrokenLine(self.cut_count + 1, step, words)

    def arrived(self, step: Step) -> BrokenLine:
        """Record that the holder has received all of `step`.

        If the connection broke during this step, so that the step needed several transfers, the count of breaks stays
        unchanged. A step that arrived in one transfer resets the count to 0.
        """
        return self if step == self.step else BrokenLine()

    @property
    def trouble(self) -> str:
        """Message about a connection to a holder that breaks repeatedly; empty for a sound connection.

        The owner's agent reports the message to the control plane.
        """
        return (
            ""
            if self.cut_count < CUTS
            else f"its line breaks: {self.cut_count} transfers were cut short and none came whole, the last: "
            f"{self.words}"
        )
