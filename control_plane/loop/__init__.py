"""Reconciliation of jobs and fleets: loops, agents' connections, polls of AWS.

    agents ────────┐
    cloud_watch ───┼─▶ observer ──▶ core.job | core.fleets ──▶ executor   a pass of `runner`, under the entity's lease
    database ──────┘

Invariant: this package decides nothing. A pass reads the state, calls the core, and stores and executes the decision.
If a server crashes during a pass, the next pass completes the work.
"""
