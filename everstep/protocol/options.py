"""A rank's report that a restored step has replaced options of its optimizers and schedulers."""

from __future__ import annotations

from typing import Annotated, ClassVar, TypeAlias

from msgspec import Meta

from everstep.protocol.codec import Message
from everstep.protocol.ids import Generation

MAX_OPTIONS = 16
MAX_OPTION_CHARACTERS = 200
OptionText: TypeAlias = Annotated[str, Meta(max_length=MAX_OPTION_CHARACTERS, extra={"is_text": True})]


class KeptOption(Message, frozen=True):
    """An option that the script sets to one value, while training continues with another one."""

    name: OptionText
    """Path of the option, such as `scheduler.T_max`, or `optimizer[1].lr` for the second parameter group."""
    script: OptionText
    kept: OptionText


KeptOptions: TypeAlias = Annotated[tuple[KeptOption, ...], Meta(max_length=MAX_OPTIONS)]
"""The first options that differ."""


class OptionsKept(Message, frozen=True):
    """A rank's report, once after the restore, that the restored step replaced options of the script."""

    since_minor: ClassVar[int] = 1

    generation: Generation
    options: KeptOptions
