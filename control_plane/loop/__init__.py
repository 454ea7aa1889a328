"""Reconciliation of jobs and fleets: loops, agents' connections, polls of AWS.

    agents ────────┐
    cloud_watch ───┼─▶ observer ──▶ core.job | core.fleets ──▶ executor   a pass of `runner`, under the entity's lease
    database ──────┘

Invariant: this package decides nothing. One round of a loop over one job or fleet is a pass. A pass reads the state,
calls the core, stores the decision and executes it. If a server crashes during a pass, the next pass completes the
work.
"""
