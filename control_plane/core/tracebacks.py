"""Reads the Python traceback at the end of a rank's stderr: the exception, and the line that raised it. Pure."""

from __future__ import annotations

import re

_RANK = re.compile(r"^\[rank\d+\]: ?")
"""Prefix with which torch prints each line of a traceback, and its own warnings after it."""
_EXCEPTION = re.compile(r"(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit|Iteration)(?:: .*)?")
_RAISED = re.compile(r"[A-Za-z_]\w*(?:\.\w+)*(?::|$)")
_FRAME = re.compile(r'File "(?P<path>[^"\n]+)", line (?P<line>\d+)')
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python", "<")
"""These substrings mark paths of packages, the standard library and generated code."""


def exception(lines: str) -> str | None:
    """Return the first line of the exception (class and message) that ends a rank's lines, or None."""
    rows = lines.rstrip().splitlines()
    bare = [_RANK.sub("", row) for row in rows]
    if bare and (found := _EXCEPTION.fullmatch(bare[-1].strip())) is not None:
        return found[0]
    begins = [number for number, row in enumerate(bare) if row.startswith("Traceback (")]
    for number in range(begins[-1] + 1, len(rows)) if begins else ():
        if _RAISED.match(bare[number]):
            # Further lines of the message are indented, or have torch's prefix. Others show that the script went on.
            is_end = all(row[:1].isspace() or _RANK.match(row) for row in rows[number + 1 :])
            return bare[number] if is_end else None
    return None


def exception_class(error: str | None) -> str:
    """Return the class of a result of `exception`, without its module, or an empty string."""
    return (error or "").partition(":")[0].rpartition(".")[2]


def place(lines: str) -> str | None:
    """Return the file name and the line of the innermost frame in the job's own code: `train.py:48`, or None."""
    own = [found for found in _FRAME.finditer(lines) if not any(part in found["path"] for part in _LIBRARIES)]
    return f"{own[-1]['path'].rpartition('/')[2]}:{own[-1]['line']}" if own else None
