"""Runs the first steps of a script three times and compares them bit for bit.

`everstep jobs submit --check-determinism` submits such a job.

Invariant: without the variable `EVERSTEP_CHECK_DETERMINISM`, no module of this package observes or changes the script.
"""
