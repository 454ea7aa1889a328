"""`make bench-data-plane`: Everstep beside the systems that one could use instead, in one run, on one state, beside the floors of this machine.

    __main__.py      the run: which launches in which order
    systems.py       the peers and their virtual environments
    launches.py      two rank processes of a peer, or of the floors
    everstep.py      Everstep's side: a job on two real nodes, killed and restored
    char_gpt.py      what every-step copies cost a real model
    rank/            what runs in the rank processes
    rows.py          samples become figures and verdicts (pure)
    report.py        JSON, tables and the picture (pure but for `write`)

Invariant: what was measured is reported; a row that its floor or its reference does not bear out is called
inconclusive, never repeated.
"""
