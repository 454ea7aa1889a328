"""Making it so: a loop over jobs and one over fleets, who is connected, and the watch on AWS.

    agents ────────┐
    cloud_watch ───┼─▶ observer ──▶ core.job | core.fleets ──▶ executor       one pass of `runner`, under the entity's lease
    database ──────┘

Invariant: nothing is decided here. A pass sees, asks the core, does and stores what it says; it may die anywhere, and
the next one makes it good.
"""
