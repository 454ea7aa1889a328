"""Removes control sequences and direction controls from texts of users, jobs and instances. Pure.

A terminal executes control sequences. A direction control displays characters in another order than a program reads.

Source: ECMA-48; xterm control sequences; Unicode's property Bidi_Control.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Final

REPLACEMENT: Final = "�"
"""Replaces a control character outside of a complete sequence, so that its position stays visible."""
CONTROLS: Final = r"\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
"""Content of a character class: control characters, line separators, direction controls, lone surrogates."""
SGR: Final = r"\x1b\[[0-9;:]*m"
"""Color sequences."""
# The text excludes beginnings of a sequence, so that the time is linear in a text of beginnings.
_STRING: Final = r"(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c\n\x90\x98\x9d-\x9f]*(?:\x07|\x1b\\|\x9c)"
"""Complete OSC, DCS, SOS, PM and APC sequences with their text and terminator, in the 7-bit and the 8-bit form."""
_CSI: Final = r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
_ESCAPE: Final = r"\x1b[ -/]*[0-Z\\^-~]"
_TOKENS: Final = re.compile(f"(?P<color>{SGR})|(?P<gone>{_STRING}|{_CSI}|{_ESCAPE})|(?![\\t\\n])[{CONTROLS}]")


def visible(text: str, *, keeps_colors: bool = False) -> str:
    """Return text without control sequences. `REPLACEMENT` replaces other controls except tabs and line feeds."""
    if text.isprintable():
        return text
    return _TOKENS.sub(partial(_shown, keeps_colors=keeps_colors), text.replace("\r\n", "\n"))


def _shown(found: re.Match[str], *, keeps_colors: bool) -> str:
    if color := found["color"]:
        return color if keeps_colors else ""
    return "" if found["gone"] else REPLACEMENT
