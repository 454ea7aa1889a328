"""Reads the Python traceback at the end of a rank's stderr: the exception, and the line that raised it.

Invariant: pure.
"""

from __future__ import annotations

import re

_EXCEPTION = re.compile(
    r"(?:\[rank\d+\]: )?(?P<error>(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit|Iteration)(?:: .*)?)"
)
"""Pattern of the last line of a traceback, which may begin with the rank, such as `[rank3]: `."""
_FRAME = re.compile(r'File "(?P<path>[^"\n]+)", line (?P<line>\d+)')
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python", "<")
"""Substrings of the paths of code that does not belong to the job: packages, the standard library, generated code."""


def exception(lines: str) -> str | None:
    """Return the exception (class and message) in the last of a rank's lines, or None without a traceback."""
    found = _EXCEPTION.fullmatch(lines.strip().rpartition("\n")[2].strip())
    return None if found is None else found["error"]


def place(lines: str) -> str | None:
    """Return the file name and the line of the innermost frame in the job's own code: `train.py:48`, or None."""
    own = [found for found in _FRAME.finditer(lines) if not any(part in found["path"] for part in _LIBRARIES)]
    return f"{own[-1]['path'].rpartition('/')[2]}:{own[-1]['line']}" if own else None
