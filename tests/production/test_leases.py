"""`violations` reports a lost claim of a lease, and two servers that hold the same lease."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.production.leases import Sample, violations


def samples(*pairs: tuple[str | None, int]) -> list[Sample]:
    return [Sample("fleet", owner, counter) for owner, counter in pairs]


def test_claims_releases_and_takeovers_are_right() -> None:
    assert violations(samples(("a", 1), ("a", 2), (None, 2), ("b", 3), ("b", 3), ("a", 4))) == []


def test_a_counter_that_falls_is_a_lost_claim() -> None:
    assert violations(samples(("a", 3), ("b", 2))) == ["the counter of fleet fell from 3 to 2"]


def test_one_counter_has_one_owner() -> None:
    assert violations(samples(("a", 3), ("b", 3))) == ["a and b both hold fleet with counter 3"]


@given(st.lists(st.sampled_from(["a", "b"]), min_size=1), st.data())
def test_a_history_with_a_stale_write_is_found(owners: list[str], data: st.DataObject) -> None:
    history = samples(*((owner, number) for number, owner in enumerate(owners, 1)))
    assert violations(history) == []
    stale = data.draw(st.sampled_from(history))
    other = "b" if stale.owner == "a" else "a"
    assert violations([*history, Sample("fleet", other, stale.counter)]) != []
