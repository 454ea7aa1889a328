"""Wraps the prose of Markdown documents, for the generators of documents and `docs/generate.py`. Pure.

Invariant: only paragraphs and list items with a line longer than `COLUMNS` change. A second call changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

COLUMNS = 120
_ITEM = re.compile(r"(\s*)(?:[-*+]|\d+[.)])\s+|> ?")
_FENCE = re.compile(r" *(```+|~~~+)")
_WORD = re.compile(r"(?:`+[^`]+`+|\[[^\]\n]{1,30}\]\([^)\s]+\)|[^\s`\[]+|[`\[])+")
"""One word. A code span or a short link counts as one, so that it stays on one line."""
_MISREAD = re.compile(r"(?:[-+*]|#+|\d+[.)])(?: |$)")
"""Words that must not start a line, because Markdown would read a list or a heading."""


def wrap(text: str, columns: int = COLUMNS) -> str:
    """Return the document with its long paragraphs and list items wrapped.

    Code blocks, tables, headings, pictures and HTML stay unchanged. A longer word, link or code span stays whole.
    """
    done: list[str] = []
    block: list[str] = []
    fence = ""
    for line in text.split("\n"):
        marker = _FENCE.match(line)
        if fence or marker:
            done += _wrapped(block, columns)
            block = []
            done.append(line)
            if not fence and marker:
                fence = marker[1]
            elif line.strip() == fence:
                fence = ""
            continue
        is_code = line.startswith("    ") and not block and not _ITEM.match(line)
        is_prose = bool(line.strip()) and not is_code and not line.lstrip().startswith(("|", "<", "#", "!["))
        if not is_prose or (_ITEM.match(line) and not (block and line.startswith(">"))):
            done += _wrapped(block, columns)
            block = []
        if is_prose:
            block.append(line)
        else:
            done.append(line)
    return "\n".join([*done, *_wrapped(block, columns)])


def _wrapped(block: list[str], columns: int) -> Iterator[str]:
    if all(len(line) <= columns for line in block):
        yield from block
        return
    begin = _ITEM.match(block[0]) or re.match(r"\s*", block[0])
    assert begin is not None  # The pattern `\s*` also matches an empty text, so there is always a match.
    rest = begin[0] if begin[0].startswith(">") else " " * len(begin[0])
    words: list[str] = []
    for word in _WORD.findall(" ".join([block[0][begin.end() :], *(line.removeprefix(">") for line in block[1:])])):
        if words and _MISREAD.match(word):
            words[-1] += f" {word}"
        else:
            words.append(word)
    line = begin[0] + words[0]
    for word in words[1:]:
        if len(line) + 1 + len(word) <= columns:
            line += f" {word}"
        else:
            yield line
            line = rest + word
    yield line
