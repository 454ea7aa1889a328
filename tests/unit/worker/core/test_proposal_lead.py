"""Tests the lead: the number of steps by which a proposal precedes the ranks.

A round is late if a rank receives its proposal too late. The coordinator then makes the lead longer, and soon shorter
again. If every round with a shorter lead is late, the coordinator rarely tries the shorter lead.
"""

from __future__ import annotations

import random

import pytest

from worker.core.proposal_lead import MAX_PATIENCE, SOON, Lead

ROUNDS = 2_000


def played(lead: Lead, lateness: float, *, rounds: int = ROUNDS, seed: int = 1, needed: int = 1) -> tuple[Lead, float]:
    """Return the lead after simulated rounds, and the commits per step.

    Args:
        lead: initial lead, in steps.
        lateness: probability that a round is late with a lead of one step. Each further step divides it by ten.
        rounds: number of simulated rounds.
        seed: seed of the random late rounds.
        needed: lead in steps below which every round is late.
    """
    chance = random.Random(seed)
    commits, passed = 0, 0
    for _ in range(rounds):
        passed += lead.steps
        if lead.steps < needed or chance.random() < lateness / 10 ** (lead.steps - 1):
            lead = lead.late()
        else:
            commits += 1
            lead = lead.clean()
    return lead, commits / passed


def test_a_late_round_makes_the_lead_longer_and_clean_ones_shorten_it_again() -> None:
    lead = Lead().late()
    assert lead.steps == 2
    for _ in range(lead.patience):
        assert lead.steps == 2
        lead = lead.clean()
    assert lead.steps == 1
    assert lead.clean().steps == 1


def test_a_shorter_lead_that_was_in_vain_is_tried_later_each_time() -> None:
    lead, tried = Lead(), []
    for _ in range(8):
        lead, rounds = lead.late(), 0
        while lead.steps > 1:
            lead, rounds = lead.clean(), rounds + 1
        tried.append(rounds)
    assert tried == [2, 4, 8, 16, 32, 32, 32, 32]


def test_a_lead_that_held_for_a_while_is_tried_again_at_once() -> None:
    lead, _ = played(Lead(), 0.0, needed=2)
    assert lead.patience == MAX_PATIENCE
    while lead.steps > 1:
        lead = lead.clean()
    for _ in range(SOON):
        lead = lead.clean()
    assert lead.late() == Lead(steps=2, patience=1)


@pytest.mark.parametrize(("lateness", "kept"), [(0.0, 1.0), (0.01, 0.96), (0.1, 0.75)])
def test_now_and_then_a_late_round_costs_little_more_than_its_step(lateness: float, kept: float) -> None:
    assert played(Lead(), lateness)[1] >= kept


@pytest.mark.parametrize("needed", [2, 3])
def test_where_a_lead_is_needed_nearly_as_many_steps_are_kept_as_it_allows(needed: int) -> None:
    lead, kept = played(Lead(), 0.0, needed=needed)
    assert kept >= 0.95 / needed
    assert lead.steps in (needed - 1, needed)


def test_a_shorter_lead_begins_to_count_anew() -> None:
    assert Lead(steps=3, patience=2, clean_rounds=1).clean() == Lead(steps=2, patience=2, clean_rounds=0)
    assert Lead(steps=3, patience=2, clean_rounds=0).clean() == Lead(steps=3, patience=2, clean_rounds=1)
