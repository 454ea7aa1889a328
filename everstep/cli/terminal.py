"""Text of other people, made safe for the terminal of whoever reads it. Pure.

Jobs choose what they print, what they call themselves and why they failed. A terminal obeys control sequences in such
text: OSC 52 writes the clipboard, others move the cursor, retitle the window or answer as if the reader had typed. Only
colors (SGR) pass.

Invariant: in what these functions return, the only control characters are newline, tab and those of complete SGR
sequences. Source: ECMA-48; xterm control sequences.
"""

from __future__ import annotations

import re
from typing import Final

REPLACEMENT: Final = "�"
"""Shown in place of a control character that belongs to no complete sequence, so that its place is seen."""
_SGR: Final = r"\x1b\[[0-9;:]*m"
_STRING: Final = r"(?:\x1b[\]PX^_]|[\x90\x98\x9d\x9e\x9f])[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)"
"""OSC, DCS, SOS, PM and APC, in 7 and in 8 bits, with their text and their end."""
_CSI: Final = r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
_ESCAPE: Final = r"\x1b[ -/]*[0-Z\\^-~]"
_CONTROL: Final = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
"""C0 but for tab and newline, delete, C1, line separators, characters that reorder text, and lone surrogates."""
_TOKENS: Final = re.compile(f"(?P<kept>{_SGR})|(?P<gone>{_STRING}|{_CSI}|{_ESCAPE})|{_CONTROL}")
_SGR_ONLY: Final = re.compile(_SGR)
_RESET: Final = "\x1b[0m"


def safe(text: str) -> str:
    """Return text that a terminal shows and does not obey, with its colors.

    Called for all text of a job that is printed as lines. One pass over the text: what is left of a removed sequence
    never forms a new one.

    Args:
        text: of a job, a user or an instance.

    Returns:
        The text; colors end with it.
    """
    if text.isprintable():
        return text
    shown = _TOKENS.sub(_shown, text.replace("\r\n", "\n"))
    return shown + _RESET if _SGR_ONLY.search(shown) else shown


def safe_line(text: str) -> str:
    """Return text as one line: `safe`, and nothing in it can look like a line of somebody else."""
    return safe(text.replace("\r\n", "\n").replace("\n", REPLACEMENT))


def safe_cell(text: str) -> str:
    """Return text for a cell of a table: `safe`, without its colors, whose characters a table would count."""
    return _SGR_ONLY.sub("", safe(text))


def _shown(found: re.Match[str]) -> str:
    return found["kept"] or ("" if found["gone"] else REPLACEMENT)
