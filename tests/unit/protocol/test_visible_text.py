"""Texts of jobs are shown without control sequences, in a time that is linear in their length."""

from __future__ import annotations

import pytest

from everstep.protocol.visible_text import REPLACEMENT, visible

MANY = 1_000_000
"""Length of a text for which a time that grows with the square of the length exceeds the limit of a test."""


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x1b]0;title\x07b", "ab"),
        ("a\x9d0;title\x9cb", "ab"),
        ("a\x9d0;title", f"a{REPLACEMENT}0;title"),
        ("a\x9d0;\x90title\x9cb", f"a{REPLACEMENT}0;b"),
        ("a\x1b[31mb\x1b[0m", "ab"),
        ("a\tb\nc\r\nd", "a\tb\nc\nd"),
    ],
)
def test_a_sequence_is_gone_and_another_control_character_stays_visible(text: str, shown: str) -> None:
    assert visible(text) == shown


@pytest.mark.parametrize("part", ["\x90", "\x9d", "\x1b]", "\x1b", "\x9b", "\x1b[", "\x9b0", "\x1b[0;", "\x1b "])
def test_the_time_is_linear(part: str) -> None:
    assert "a" in visible(part * MANY + "\na")
