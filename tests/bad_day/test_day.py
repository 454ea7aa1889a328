"""A short bad day violates no rule. Others are a long day, and days whose control plane lacks a safeguard."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from infra.local_cloud import network
from tests.bad_day.day import DayOptions, spend
from tests.bad_day.rules import judge
from tests.e2e.conftest import MACHINE_NETWORK
from tests.warm_parent import WarmParent

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group(MACHINE_NETWORK)]
SHORT_MINUTES = 1.2
LONG_MINUTES = 10.0
CAUGHT_BY = {"lease": "one server", "contract": "decided before it ended", "evidence": "evidence"}
"""The rule that must report a violation if the control plane lacks a safeguard, by safeguard.

Other rules may report violations too.
"""


def fresh_seed() -> int:
    return random.SystemRandom().randrange(1 << 32)


def lived(options: DayOptions, parent: WarmParent) -> set[str]:
    """Run a day, print its violations with the seed, and return the violated rules."""
    wrong = judge(spend(options, print, parent))
    for violation in wrong:
        print(f"WRONG, {violation.rule}: {violation.words}; seed {options.seed}")
    return {violation.rule for violation in wrong}


@pytest.mark.timeout(900)
def test_a_short_bad_day_harms_nobody(warm_parent: WarmParent, tmp_path: Path) -> None:
    assert not lived(DayOptions(seed=fresh_seed(), minutes=SHORT_MINUTES, keeps=tmp_path / "day"), warm_parent)


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_a_bad_day_harms_nobody(warm_parent: WarmParent, tmp_path: Path) -> None:
    assert not lived(DayOptions(seed=fresh_seed(), minutes=LONG_MINUTES, keeps=tmp_path / "day"), warm_parent)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("safeguard", sorted(CAUGHT_BY))
def test_the_checker_sees_which_safeguard_is_missing(safeguard: str, warm_parent: WarmParent) -> None:
    if safeguard == "evidence" and (obstacle := network.obstacle()):
        pytest.fail(f"lines have to be cut for this: {obstacle}")
    seed = fresh_seed()
    assert not lived(DayOptions(seed=seed, minutes=1, temptation=safeguard), warm_parent)
    assert CAUGHT_BY[safeguard] in lived(
        DayOptions(seed=seed, minutes=1, temptation=safeguard, without=safeguard), warm_parent
    )
