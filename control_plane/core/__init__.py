"""The pure decisions of the control plane: verdicts on nodes, actions for jobs and fleets, restores and placement.

Invariant: pure. Observations, specifications and the time are arguments, and each decision is a return value; all of
these objects are frozen. The same input gives the same decision. This package uses no database, socket, AWS client or
clock.
"""
