"""The control plane's decisions: which nodes are lost, what jobs and fleets do next, and what a job restores.

Invariant: pure. A decision is the return value of a function. Its arguments are observations, specifications and the
time. All of these objects are immutable. The same input gives the same decision. This package uses no database, socket,
AWS client or clock.
"""
