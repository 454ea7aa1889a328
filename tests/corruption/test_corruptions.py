"""No planted corruption is loaded.

These tests plant a part of the 10,000 corruptions of `make corruption`.
"""

from __future__ import annotations

import random

import pytest

from tests.corruption.outcomes import Counts, Outcome
from tests.corruption.run import planted

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]
COUNT = 600


def test_no_corruption_is_loaded() -> None:
    seed = random.randrange(2**32)
    counts = planted(COUNT, seed)
    assert counts.total == COUNT
    assert counts.loaded == [], f"repeat: python -m tests.corruption --count {COUNT} --seed {seed}"
    places = {place for place, _, outcome in counts.by_kind if outcome is Outcome.REFUSED}
    assert len(places) == 11, "each place refuses some of its corruptions"


def test_a_loaded_corruption_is_reported() -> None:
    counts = Counts()
    counts.add("S3 object", "bit flip", Outcome.LOADED, "byte 7")
    counts.add("S3 object", "bit flip", Outcome.REFUSED, "byte 8")
    assert counts.loaded == ["S3 object, bit flip: byte 7"]
    assert counts.table().splitlines()[1].split() == ["S3", "object", "bit", "flip", "1", "0", "1"]
