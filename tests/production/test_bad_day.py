"""A bad day in a production installation (`tests.production.stack`), in which also servers and the database fail."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.bad_day.day import DayOptions
from tests.bad_day.test_day import LONG_MINUTES, fresh_seed, lived
from tests.terraform import needs_provider, needs_terraform
from tests.warm_parent import WarmParent

pytestmark = [pytest.mark.production, needs_terraform, needs_provider]
MINUTES = float(os.environ.get("BAD_DAY_MINUTES", LONG_MINUTES))


@pytest.mark.timeout(2400)
def test_a_bad_day_in_production_harms_nobody(warm_parent: WarmParent, tmp_path: Path) -> None:
    day = DayOptions(seed=fresh_seed(), minutes=MINUTES, is_production=True, keeps=tmp_path / "day")
    assert not lived(day, warm_parent)
