"""Benchmark of placement and rounds with many nodes: `make bench-scale`.

    __main__.py   the command
    placement.py  duration of placement, and its exact recovery probabilities, compared with published values
    rounds.py     duration of a round between real agents' parts, in a flat tree and in the product's tree
    report.py     results, limits and page (pure)

Invariant: the timed code is the product's own. The slowest of several timings of one call gets the verdict.
"""
