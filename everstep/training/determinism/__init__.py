"""Repeats the first steps of a script and compares them bit for bit (`everstep jobs submit --check-determinism`).

Invariant: without the variable `EVERSTEP_CHECK_DETERMINISM`, no module of this package observes or changes the script.
"""
