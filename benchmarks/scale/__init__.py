"""Placement and rounds of many nodes: `make bench-scale`.

    __main__.py   the command
    placement.py  how long plans and exact odds of recovery take, what they say, and what is known of them from
    elsewhere
    rounds.py     how long a round takes of real agents' parts, flat and over the tree
    report.py     .everstep/bench/scale.json and docs/benchmarks-scale.md (pure but for `write`)

Invariant: what is timed is the product's own code; of several timings of one call the slowest is judged.
"""
