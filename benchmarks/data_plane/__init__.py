"""Benchmark of the data plane: `make bench-data-plane`.

One run compares Everstep with alternative systems on the same state, beside the floors of this machine.

    __main__.py      the run: order of the launches
    systems.py       the peers and their virtual environments
    launches.py      two rank processes of a peer or of the floors
    everstep.py      Everstep's side: a job on two real nodes, killed and restored
    char_gpt.py      the cost of every-step copies for a real model
    rank/            programs of the rank processes
    rows.py          samples become figures with verdicts (pure)
    report.py        JSON, tables and the picture (pure except for `write`)

Invariant: all measurements are reported. A row that its floor or reference does not support is marked as inconclusive,
and never repeated.
"""
