"""Reads the Python traceback at the end of a rank's stderr: the exception, and the line that raised it.

Invariant: pure.
"""

from __future__ import annotations

import re

_RANK = re.compile(r"^\[rank\d+\]: ")
"""Prefix with which torch prints each line of a traceback."""
_EXCEPTION = re.compile(r"(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit|Iteration)(?:: .*)?")
_RAISED = re.compile(r"[A-Za-z_]\w*(?:\.\w+)*(?::|$)")
"""Pattern of the first line after the frames of a traceback. Frames are indented."""
_FRAME = re.compile(r'File "(?P<path>[^"\n]+)", line (?P<line>\d+)')
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python", "<")
"""Substrings of the paths of code that does not belong to the job: packages, the standard library, generated code."""


def exception(lines: str) -> str | None:
    """Return the exception (class and message) of the last traceback in a rank's lines, or None without a traceback.

    Of a message with several lines, the result has the first.
    """
    rows = [_RANK.sub("", row) for row in lines.rstrip().splitlines()]
    begins = [number for number, row in enumerate(rows) if row.startswith("Traceback (")]
    if not begins:  # the limit of the lines may have cut off the beginning
        found = _EXCEPTION.fullmatch(rows[-1].strip()) if rows else None
        return None if found is None else found[0]
    return next((row for row in rows[begins[-1] + 1 :] if _RAISED.match(row)), None)


def exception_class(error: str | None) -> str:
    """Return the class of a result of `exception`, without its module, or an empty string."""
    return (error or "").partition(":")[0].rpartition(".")[2]


def place(lines: str) -> str | None:
    """Return the file name and the line of the innermost frame in the job's own code: `train.py:48`, or None."""
    own = [found for found in _FRAME.finditer(lines) if not any(part in found["path"] for part in _LIBRARIES)]
    return f"{own[-1]['path'].rpartition('/')[2]}:{own[-1]['line']}" if own else None
