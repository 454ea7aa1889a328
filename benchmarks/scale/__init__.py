"""Benchmark of placement and rounds with many nodes: `make bench-scale`.

    __main__.py   the command
    placement.py  duration and results of plans and exact recovery probabilities, compared with published values
    rounds.py     duration of a round with the parts of real agents, flat and over the tree
    report.py     .everstep/bench/scale.json and docs/benchmarks-scale.md (pure except for `write`)

Invariant: the timed code is the product's own. Of several timings of one call, the slowest is judged.
"""
