"""Benchmark of placement and rounds with many nodes: `make bench-scale`.

    __main__.py   the command
    placement.py  duration of placement (the choice of holders); recovery probabilities, compared with published ones
    rounds.py     duration of a round with up to 1,024 agents, in a flat tree and in Everstep's tree
    report.py     results, limits, and the page in `docs/` (pure)

Invariant: the timed code is Everstep's own. If a call is timed several times, the slowest time is compared with the
limit.
"""
