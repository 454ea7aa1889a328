"""No page of the dashboard contradicts itself or another page, in random stories of the real control plane.

A *story* is a random sequence of failures and user requests in a simulated fleet.
"""

from __future__ import annotations

import random

import pytest

from tests.dashboard.random_story import MOMENTS, tell
from tests.dashboard.stories import Outcome, run


def require_agreement(outcomes: list[Outcome], seed: int) -> None:
    """Fail with vitest's output if a rule does not hold. The message names the seed."""
    wrong = "\n".join(outcome.complaints for outcome in outcomes)
    assert not wrong, f"seed {seed}\n{wrong}"


@pytest.mark.timeout(600)
def test_the_pages_of_random_stories_agree() -> None:
    seed, count = random.SystemRandom().randrange(1 << 31), 16
    outcomes = run(seed, count, processes=1)
    assert sum(outcome.moment_count for outcome in outcomes) == count * MOMENTS
    require_agreement(outcomes, seed)


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_the_pages_of_a_thousand_random_stories_agree() -> None:
    seed = random.SystemRandom().randrange(1 << 31)
    require_agreement(run(seed, 1000), seed)


def test_equal_seeds_give_equal_stories() -> None:
    assert tell(7) == tell(7)
