"""The service stores the bodies of recent responses, so that a client's next poll receives only the changes."""

from __future__ import annotations

from control_plane.api.changes import ResponseSnapshots


def test_a_token_returns_the_contents_of_its_own_question_only() -> None:
    snapshots = ResponseSnapshots()
    token = snapshots.keep(("caller", "all"), {"a": b"1"})
    assert snapshots.find(("caller", "all"), token) == {"a": b"1"}
    assert snapshots.find(("other", "all"), token) is None
    assert snapshots.find(("caller", "some"), token) is None
    assert snapshots.find(("caller", "all"), "Start") is None
    assert snapshots.find(("caller", "all"), None) is None


def test_equal_contents_have_equal_tokens_and_others_do_not() -> None:
    snapshots = ResponseSnapshots()
    contents = [{"a": b"1"}, {"a": b"2"}, {"b": b"1"}, {"a1": b""}, {"a": b"1", "b": b""}, {}]
    tokens = [snapshots.keep("list", each) for each in contents]
    assert len(set(tokens)) == len(tokens)
    assert [snapshots.keep("list", dict(each)) for each in contents] == tokens
    assert [snapshots.find("list", token) for token in tokens] == contents


def test_the_oldest_unused_contents_are_forgotten_first() -> None:
    snapshots = ResponseSnapshots(max_bytes=30_000)
    tokens = [snapshots.keep("list", {str(number): bytes(8_000)}) for number in range(3)]
    assert snapshots.find("list", tokens[0]) is not None
    snapshots.keep("list", {"3": bytes(8_000)})
    assert snapshots.find("list", tokens[1]) is None
    assert snapshots.find("list", tokens[0]) is not None


def test_contents_beyond_the_limit_are_kept_alone() -> None:
    snapshots = ResponseSnapshots(max_bytes=100)
    snapshots.keep("list", {"a": bytes(80)})
    token = snapshots.keep("list", {"b": bytes(500)})
    assert snapshots.find("list", token) == {"b": bytes(500)}
