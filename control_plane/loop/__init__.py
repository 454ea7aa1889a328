"""Reconciliation of jobs and fleets: loops, agents' connections, polls of AWS.

    agents ────────┐
    cloud_watch ───┼─▶ observer ──▶ core.job | core.fleets ──▶ executor   a pass of `runner`, under the entity's lease
    database ──────┘

Invariant: this package decides nothing. A pass reads the state, calls the core, and executes and stores the decision. A
pass may die at any point; the next pass completes its work.
"""
