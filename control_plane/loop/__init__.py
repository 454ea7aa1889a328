"""Contains the loops that bring jobs and fleets to their wanted state, the registry of agents, and the poller of AWS.

    agents ────────┐
    cloud_watch ───┼─▶ observer ──▶ core.job | core.fleets ──▶ executor   a pass, under the lease of the job or fleet
    database ──────┘

Invariant: this package decides nothing. The *core* (`control_plane.core`) decides. A *pass* handles one job or one
fleet once: it reads the state, calls the core, stores the decision and executes it. A *sweep* is one round of passes
over all jobs or all fleets. If a server crashes during a pass, the next pass completes the work.
"""
