"""Benchmark of training while agents, connections or memory between nodes are disturbed: `make bench-faults`.

    __main__.py  the command: starts a cluster in network namespaces, runs all cases, writes the page of results
    cases.py     the faults, which change running processes or connections from outside and then undo the change
    runs.py      one case: a job with steps before, during and after a fault, and the API's reports in this time
    figures.py   conversion of the ranks' traces to rows with verdicts (pure)
    report.py    results, and the page in `docs/` (pure); picture.py draws the page's picture

Invariant: Everstep runs unchanged and cannot detect the measurement. Times come from the training script.
"""
