"""Wrapping changes only the line breaks of prose."""

from __future__ import annotations

import pytest

from control_plane.contract.markdown import wrap

LONG = "one two three four five six seven"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (LONG, "one two three four\nfive six seven"),
        (f"- {LONG}", "- one two three four\n  five six seven"),
        (f"12. {LONG}", "12. one two three\n    four five six\n    seven"),
        (f"> {LONG}\n> eight", "> one two three four\n> five six seven\n> eight"),
        (f"short\n{LONG}", "short one two three\nfour five six seven"),
        ("one `two three four five six` seven", "one\n`two three four five six`\nseven"),
        ("one two three [four five](x.md) six", "one two three\n[four five](x.md)\nsix"),
        ("one two three fours 5. six seven", "one two three\nfours 5. six seven"),
    ],
    ids=["paragraph", "item", "numbered", "quote", "with a short line", "code span", "link", "no list by accident"],
)
def test_long_prose_is_wrapped(before: str, after: str) -> None:
    assert wrap(before, 20) == after
    assert wrap(after, 20) == after


@pytest.mark.parametrize(
    "text",
    [
        "one two three\nfour\nfive",
        f"| {LONG} |\n| --- |",
        f"```\n{LONG}\n```",
        f"    {LONG}",
        f"# {LONG}",
        f"![{LONG}](a.svg)",
        f"<!-- {LONG} -->",
        "- one two\n- three four\n\n  five",
    ],
    ids=["short", "table", "fence", "indented code", "heading", "picture", "comment", "short items"],
)
def test_what_is_short_or_no_prose_stays(text: str) -> None:
    assert wrap(text, 20) == text


def test_prose_behind_a_block_of_code_is_wrapped() -> None:
    assert wrap(f"```\n{LONG}\n```\n{LONG}", 20) == f"```\n{LONG}\n```\none two three four\nfive six seven"
