"""docs/benchmarks.md is written by several harnesses, each its own section between two markers. Pure.

Invariant: a harness renews its own section; what stands around it is not touched.
"""

from __future__ import annotations

TITLE = "# Benchmarks\n"


def with_section(document: str, command: str, section: str) -> str:
    """Return a document with one section renewed, or appended where it had none.

    Args:
        document: Markdown; empty for a new one.
        command: that writes the section, such as `make bench-first`.
        section: its new content.

    Returns:
        The document.
    """
    begin, end = f"<!-- {command}: begin -->", f"<!-- {command}: end -->"
    whole = f"{begin}\n{section.strip()}\n{end}"
    if begin in document and end in document:
        return document[: document.index(begin)] + whole + document[document.index(end) + len(end) :]
    return f"{(document or TITLE).rstrip()}\n\n{whole}\n"
