"""Removes control sequences from texts of users, jobs and instances before commands print them. Pure.

A job's output, name and failure reason may contain control sequences, which a terminal executes. For example, OSC 52
writes the clipboard, and other sequences move the cursor or send input to the shell. The module keeps only color
sequences (SGR).

Invariant: the returned text contains no control characters except newline, tab and complete SGR sequences. Source:
ECMA-48; xterm control sequences.
"""

from __future__ import annotations

import re
from typing import Final

REPLACEMENT: Final = "�"
"""Text that replaces a control character outside of a complete sequence, so that its position stays visible."""
_SGR: Final = r"\x1b\[[0-9;:]*m"
_STRING: Final = r"(?:\x1b[\]PX^_]|[\x90\x98\x9d\x9e\x9f])[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)"
"""Complete OSC, DCS, SOS, PM and APC sequences with their text and terminator, in the 7-bit and the 8-bit form."""
_CSI: Final = r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
_ESCAPE: Final = r"\x1b[ -/]*[0-Z\\^-~]"
_CONTROL: Final = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
"""C0 controls except tab and newline, DEL, C1 controls, line separators, bidirectional controls, lone surrogates."""
_TOKENS: Final = re.compile(f"(?P<kept>{_SGR})|(?P<gone>{_STRING}|{_CSI}|{_ESCAPE})|{_CONTROL}")
_SGR_ONLY: Final = re.compile(_SGR)
_RESET: Final = "\x1b[0m"


def safe(text: str) -> str:
    """Return text without control sequences, except colors.

    Called for all text of jobs that is printed as lines. The function also replaces single control characters, so the
    text around a removed sequence cannot form a new sequence.

    Args:
        text: written by a job, a user or an instance.

    Returns:
        The text. If it contains colors, it ends with a reset.
    """
    if text.isprintable():
        return text
    shown = _TOKENS.sub(_shown, text.replace("\r\n", "\n"))
    return shown + _RESET if _SGR_ONLY.search(shown) else shown


def safe_line(text: str) -> str:
    """Return text as one safe line.

    The function replaces line breaks inside the text, so that the text cannot imitate other lines of output.
    """
    return safe(text.replace("\r\n", "\n").replace("\n", REPLACEMENT))


def safe_cell(text: str) -> str:
    """Return safe text for a table cell, without colors, because a table would count their characters as width."""
    return _SGR_ONLY.sub("", safe(text))


def _shown(found: re.Match[str]) -> str:
    return found["kept"] or ("" if found["gone"] else REPLACEMENT)
