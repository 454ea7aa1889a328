"""Tests the sentences that say what happened in an incident."""

from __future__ import annotations

import pytest

from control_plane.accounts.occurrences import brief_occurrence, listed, occurrence
from control_plane.core.observed.nodes import Cause


def test_a_sentence_names_the_given_nodes() -> None:
    assert occurrence(Cause.INSTANCE_TERMINATED) == "An instance was terminated"
    assert occurrence(Cause.INSTANCE_TERMINATED, ("i-1", "i-2")) == "i-1 and i-2 were terminated"
    assert occurrence(Cause.RANK_EXIT, ("i-1",)) == "A training process failed on i-1"
    assert all("{" not in occurrence(cause) and "  " not in occurrence(cause) for cause in Cause)


@pytest.mark.parametrize(
    ("cause", "nodes", "words"),
    [
        (Cause.INSTANCE_TERMINATED, ("i-1",), "i-1 was terminated"),
        (Cause.INSTANCE_TERMINATED, ("i-1", "i-2"), "An instance was terminated"),
        (Cause.RANK_EXIT, ("i-1",), "A training process failed"),
        (Cause.HANG, (), "The ranks hung"),
    ],
)
def test_a_brief_sentence_names_the_one_node_that_failed(cause: Cause, nodes: tuple[str, ...], words: str) -> None:
    assert brief_occurrence(cause, nodes) == words


def test_names_after_the_third_are_counted() -> None:
    assert [listed("abcde"[:count]) for count in (0, 1, 2, 3, 5)] == [
        "",
        "a",
        "a and b",
        "a, b and c",
        "a, b, c and 2 more",
    ]
