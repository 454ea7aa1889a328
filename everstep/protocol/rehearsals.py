"""Defines a rank's report after a rehearsal, in which a job proves its own recovery.

From step b, all ranks record the digests of the n steps after b, restart from their state at b, repeat the n steps, and
compare. They then continue after step b + n.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar, TypeAlias

from msgspec import Meta

from everstep.protocol.codec import Message
from everstep.protocol.ids import Generation, Step
from everstep.protocol.limits import Count, Name, Seconds

MAX_REHEARSED_NAMES = 8
MAX_REHEARSED_CHARACTERS = 1000
"""Maximum length of each text in `Rehearsed`, which the rank cuts."""
RehearsalText: TypeAlias = Annotated[str, Meta(max_length=MAX_REHEARSED_CHARACTERS, extra={"is_text": True})]


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

    name: RehearsalText
    """The changed variable, or the value of `ReplayDifference.names` that the line fetches, sets or logs."""
    file: RehearsalText
    """Path below the rank's working directory, or else the name of the file."""
    line: Count


class ReplayDifference(Message, frozen=True):
    """The first difference between the steps of a job and their replay, on one rank."""

    step: Step
    """The repeated step. If it is the step from which the rehearsal began, the restored state differs."""
    kind: Name
    """A value of `everstep.determinism.Kind`."""
    source: Name
    """The likely cause, a value of `everstep.determinism.Source`."""
    names: Annotated[tuple[RehearsalText, ...], Meta(max_length=MAX_REHEARSED_NAMES)] = ()
    """The tensors, generators or values of this kind that differ."""
    unkept: Annotated[tuple[RehearsalText, ...], Meta(max_length=MAX_REHEARSED_NAMES)] = ()
    """Variables of the script that differed earlier, as `file:function.name`."""
    lines: Annotated[tuple[ScriptLine, ...], Meta(max_length=MAX_REHEARSED_NAMES)] = ()
    """The lines that belong to `unkept` or `names`; empty if the rank found none, or from an older release."""


class Rehearsed(Message, frozen=True):
    """The rank's report of a rehearsal, sent when the rank trains again, and repeated by the agent."""

    since_minor: ClassVar[int] = 1

    generation: Generation
    step: Step
    """The step b."""
    steps: Count
    seconds: Seconds
    verdict: RehearsalVerdict
    difference: ReplayDifference | None = None
    message: RehearsalText = ""
    """The difference, or the reason of the refusal, for people."""
    advice: RehearsalText = ""

    @property
    def first_step(self) -> int:
        """The first repeated step that differs; without a difference, the last repeated step."""
        return self.step + self.steps if self.difference is None else self.difference.step
