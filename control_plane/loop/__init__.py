"""The loops that bring jobs and fleets to their wanted state, the registry of agents, and the poller of AWS.

    agents ────────┐
    cloud_watch ───┼─▶ observer ──▶ core.job | core.fleets ──▶ executor   a pass, under the lease of the job or fleet
    database ──────┘

Invariant: this package decides nothing; `control_plane.core` decides. If a server crashes during a *pass* (the handling
of one job or fleet once), the next pass completes the work.
"""
