"""The control plane's decisions: which nodes are lost, what jobs and fleets do next, and what a job restores.

Invariant: pure. Each decision is the return value of a function of observations, specifications and the time. The
package uses no database, socket, AWS client or clock.
"""
