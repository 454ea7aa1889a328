"""Benchmark of the data plane (snapshots, replicas and restores): `make bench-data-plane`.

One run measures Everstep and other checkpoint systems (the compared systems, `PEERS` in the code) with the same state.
It also measures floors: bounds that no system can beat on this machine, such as the time of a plain memcpy.

    __main__.py      the harness: runs the launches in order
    systems.py       the compared systems and their virtual environments
    launches.py      two rank processes of a compared system, or two processes that measure floors
    everstep.py      the measurement of Everstep: a job on two nodes, whose ranks are killed and restored
    char_gpt.py      the cost of keeping every step of a small GPT
    rank/            programs of the rank processes
    rows.py          conversion of measured samples to table rows with verdicts (pure)
    report.py        results, and the page and the picture in `docs/` (pure)

Invariant: all measurements are reported, and none is repeated. A row is inconclusive if its floor changed, or if the
value that it is compared with is unreliable.
"""
