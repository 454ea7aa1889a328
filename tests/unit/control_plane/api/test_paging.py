"""Consecutive pages neither repeat nor skip an entry."""

from __future__ import annotations

import pytest

from control_plane.api import page_tokens
from control_plane.api.deps import page_of


@pytest.mark.parametrize("most", [1, 2, 3, 4, 5])
def test_pages_together_are_the_list(most: int) -> None:
    whole = [(name, 10 * number) for number, name in enumerate("abcd")]
    seen: list[tuple[str, int]] = []
    pages, after = 0, ("", -1)
    while True:
        rest = [entry for entry in whole if entry > after]
        shown, token = page_of(rest[: most + 1], most, lambda entry: entry)
        assert len(shown) <= most
        seen += shown
        pages += 1
        if token is None:
            break
        after = page_tokens.position(token, page_tokens.text, page_tokens.whole)
    assert seen == whole
    assert pages == -(-len(whole) // most)


def test_nothing_is_one_page() -> None:
    assert page_of([], 10, lambda entry: entry) == ([], None)
