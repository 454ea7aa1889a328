"""Tests how similar incidents are ranked."""

from __future__ import annotations

from control_plane.core.similar_incidents import Candidate, Likeness, likeness, ranked


def candidate(name: str, instance: str = "i-9", kind: str = "p5", fleet: str = "main", at: float = 0.0) -> Candidate:
    return Candidate(
        incident_id=name,
        opened_at=at,
        instance_ids=frozenset({instance}),
        instance_types=frozenset({kind}),
        fleet_name=fleet,
    )


HERE = candidate("here", "i-1")


def test_a_shared_instance_ranks_before_a_type_and_a_type_before_a_fleet() -> None:
    others = [
        candidate("nothing", kind="g6", fleet="other", at=9.0),
        candidate("fleet", kind="g6", at=8.0),
        candidate("type", fleet="other", at=7.0),
        candidate("type and fleet", at=6.0),
        candidate("instance", "i-1", kind="g6", fleet="other", at=5.0),
        HERE,
    ]
    found = ranked(HERE, others, limit=10)
    assert [each.incident_id for each, _ in found] == ["instance", "type and fleet", "type", "fleet", "nothing"]
    assert [shared for _, shared in found] == [
        (Likeness.INSTANCE,),
        (Likeness.INSTANCE_TYPE, Likeness.FLEET),
        (Likeness.INSTANCE_TYPE,),
        (Likeness.FLEET,),
        (),
    ]


def test_the_newest_of_equal_rank_is_first_and_the_limit_holds() -> None:
    others = [candidate(f"at {at}", at=float(at)) for at in (1, 3, 2)]
    assert [each.incident_id for each, _ in ranked(HERE, others, limit=2)] == ["at 3", "at 2"]


def test_incidents_without_an_instance_share_none() -> None:
    nowhere = Candidate(
        incident_id="a", opened_at=0.0, instance_ids=frozenset(), instance_types=frozenset(), fleet_name="main"
    )
    assert likeness(nowhere, nowhere) == (Likeness.FLEET,)
