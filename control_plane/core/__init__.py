"""The control plane's decisions: verdicts on nodes, actions for jobs and fleets, restores and placement.

Invariant: pure. A decision is the return value of a function. Its arguments are observations, specifications and the
time. All of these objects are frozen. The same input gives the same decision. This package uses no database, socket,
AWS client or clock.
"""
