"""Benchmark of the data plane (snapshots, replicas and restores): `make bench-data-plane`.

One run measures Everstep and other checkpoint systems (`PEERS`) with the same state, and floors.

    __main__.py      the harness: runs the launches in order
    systems.py       the compared systems and their virtual environments
    launches.py      two rank processes of a compared system, or two processes that measure floors
    everstep.py      the measurement of Everstep: a job on two nodes, whose ranks are killed and restored
    char_gpt.py      the cost of keeping every step of a small GPT
    rank/            programs of the rank processes
    rows.py          conversion of measured samples to table rows with verdicts (pure)
    report.py        results, and the page and the picture in `docs/` (pure)
"""
