"""Removes control sequences from texts of users, jobs and instances before commands print them. Pure.

A job's output, name and failure reason may contain control sequences, which a terminal executes. For example, OSC 52
writes the clipboard, and other sequences move the cursor or send input to the shell. The module keeps only color
sequences (SGR).

Invariant: the returned text contains no control characters except newline, tab and complete SGR sequences.
"""

from __future__ import annotations

import re
from typing import Final

from everstep.protocol.visible_text import REPLACEMENT, SGR, visible

_SGR_ONLY: Final = re.compile(SGR)
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
    shown = visible(text, keeps_colors=True)
    return shown + _RESET if _SGR_ONLY.search(shown) else shown


def safe_line(text: str) -> str:
    """Return text as one safe line.

    The function replaces line breaks inside the text, so that the text cannot imitate other lines of output.
    """
    return safe(text.replace("\r\n", "\n").replace("\n", REPLACEMENT))


def safe_cell(text: str) -> str:
    """Return safe text for a table cell, without colors, because a table would count their characters as width."""
    return visible(text)
