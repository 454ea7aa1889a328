"""Tests when a new slot may take the memory of a stray: a slot whose shard the new plan places on other nodes.

`tests/properties/worker/test_strays.py` tests whole relaunches.
"""

from __future__ import annotations

from everstep.protocol.ids import Generation, Rank, Step
from worker.core.slots import Content
from worker.core.strays import Strays

STRAY, SIBLING, PLACED = Rank(5), Rank(4), Rank(0)
OLDER, BASE = Content(Generation(1), Step(9)), Content(Generation(1), Step(10))


def loaded(*, is_doubled: bool = False) -> Strays:
    """Return the strays of a node that has steps 9 and 10 of a moved shard, after every node has loaded the plan.

    With `is_doubled`, the shard's owner also has step 9. In this case, the owner has the only copy of step 10 of its
    other rank, `SIBLING`.
    """
    doubled = {(STRAY, OLDER): frozenset({SIBLING})} if is_doubled else {}
    return Strays(placed=frozenset({PLACED}), base=Step(10), needed=frozenset({Step(9)}), doubled=doubled).loaded()


def test_an_older_step_that_is_needed_makes_way_once_the_base_is_committed() -> None:
    assert not loaded().makes_way(STRAY, OLDER)
    assert loaded().heard(Step(10), []).makes_way(STRAY, OLDER)


def test_a_step_that_the_owner_keeps_too_makes_way_once_all_bases_of_that_owner_are_elsewhere() -> None:
    assert not loaded(is_doubled=True).makes_way(STRAY, OLDER)
    assert loaded(is_doubled=True).heard(Step(-1), [SIBLING]).makes_way(STRAY, OLDER)


def test_the_base_makes_way_once_its_holders_have_it_or_a_later_step_is_committed() -> None:
    assert not loaded().heard(Step(10), []).makes_way(STRAY, BASE)
    assert loaded().heard(Step(-1), [STRAY]).makes_way(STRAY, BASE)
    assert loaded().heard(Step(11), []).makes_way(STRAY, BASE)


def test_nothing_makes_way_before_every_node_has_loaded_and_no_placed_shard_ever() -> None:
    assert not Strays(placed=frozenset({PLACED}), base=Step(10)).makes_way(STRAY, OLDER)
    assert not loaded().heard(Step(11), [PLACED]).makes_way(PLACED, BASE)


def test_a_late_announcement_takes_nothing_back() -> None:
    heard = loaded().heard(Step(11), [STRAY]).heard(Step(10), [])
    assert (heard.committed, heard.held) == (Step(11), {STRAY})
