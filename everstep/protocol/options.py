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
    """The script's value."""
    kept: OptionText
    """The value of the restored step."""


KeptOptions: TypeAlias = Annotated[tuple[KeptOption, ...], Meta(max_length=MAX_OPTIONS)]
"""The first options that differ, at most `MAX_OPTIONS`."""


class OptionsKept(Message, frozen=True):
    """The rank's report that a restored step replaced options of the script. Sent once, after the restore."""

    since_minor: ClassVar[int] = 1

    generation: Generation
    options: KeptOptions
