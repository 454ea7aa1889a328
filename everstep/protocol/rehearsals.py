"""What a rank reports after a rehearsal, in which a job proves its own recovery.

In a rehearsal from step b, all ranks record the digests of the n steps after b, restart from their state at b, repeat
the n steps, and compare. They then continue after step b + n as if nothing had happened.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import ClassVar

from everstep.protocol.codec import Message
from everstep.protocol.ids import Generation, Step

MAX_REHEARSED_NAMES = 8
"""Maximum number of `names`, and of `unkept`, in a `ReplayDifference`."""
MAX_REHEARSED_CHARACTERS = 1000
"""Maximum length of each text in `Rehearsed`. The rank cuts longer texts, and the agent drops a message with them."""


class RehearsalVerdict(StrEnum):
    """The result of a rehearsal on one rank.

    - PROVEN: the repeated steps are bit-identical.
    - UNPROVEN: they are, too. But values that the script changes during training, such as a counter, begin anew at a
      restart. Later steps, or the end of training, can depend on them.
    - DIFFERS: two replays agree with each other, and not with the job. The script keeps state that no snapshot has.
    - UNSTABLE: the replays differ from each other, too. The computation itself is not deterministic.
    - REFUSED: the rank could not rehearse, for example for lack of memory.
    """

    PROVEN = "Proven"
    UNPROVEN = "Unproven"
    DIFFERS = "Differs"
    UNSTABLE = "Unstable"
    REFUSED = "Refused"


class ScriptLine(Message, frozen=True):
    """The line of the script that belongs to a difference."""

    name: str
    """The variable that the line changes, or the value of `ReplayDifference.names` that the line fetches, sets or logs.
    """
    file: str
    """Path below the rank's working directory, or else the name of the file."""
    line: int
    """Number of the line, from 1."""


class ReplayDifference(Message, frozen=True):
    """The first difference between the steps of a job and their replay, on one rank."""

    step: Step
    """The repeated step with the difference. The step from which the rehearsal began: the restored state differs."""
    kind: str
    """What differs: a value of `everstep.determinism.Kind`."""
    source: str
    """The likely cause: a value of `everstep.determinism.Source`."""
    names: tuple[str, ...] = ()
    """The tensors, generators or values of this kind that differ, at most `MAX_REHEARSED_NAMES`."""
    unkept: tuple[str, ...] = ()
    """Variables of the script that differed before the first difference, as `file:function.name`.

    At most `MAX_REHEARSED_NAMES`.
    """
    lines: tuple[ScriptLine, ...] = ()
    """The lines of the script that belong to `unkept` or `names`, at most `MAX_REHEARSED_NAMES`.

    Empty if the rank found none, or if its release reports none.
    """


class Rehearsed(Message, frozen=True):
    """The rank's report of a rehearsal, sent when the rank trains again. The agent repeats it in its reports."""

    since_minor: ClassVar[int] = 1

    generation: Generation
    step: Step
    """The step b from which the rank repeated steps."""
    steps: int
    """The number n of repeated steps."""
    seconds: float
    """Seconds for which the rank did not train."""
    verdict: RehearsalVerdict
    difference: ReplayDifference | None = None
    message: str = ""
    """For people: the difference, or the reason of the refusal."""
    advice: str = ""
    """For people: what to change in the script."""

    @property
    def is_within_limits(self) -> bool:
        """True if no text and no list is too long, and `seconds` is finite."""
        difference = self.difference or ReplayDifference(step=self.step, kind="", source="")
        lists = difference.names, difference.unkept, difference.lines
        of_lines = [text for each in difference.lines for text in (each.name, each.file)]
        texts = self.message, self.advice, difference.kind, difference.source, *difference.names, *difference.unkept
        return (
            math.isfinite(self.seconds)
            and all(len(each) <= MAX_REHEARSED_NAMES for each in lists)
            and all(len(each) <= MAX_REHEARSED_CHARACTERS for each in (*texts, *of_lines))
        )
