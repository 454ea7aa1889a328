"""Benchmark of training under faults of the data plane: `make bench-faults`.

    __main__.py  the command: a cluster in network namespaces, all cases, the report
    cases.py     the faults; each is injected from outside into running processes, then removed
    runs.py      one case: a job, steps before, during and after its fault, and the API's reports meanwhile
    figures.py   conversion of the ranks' traces to rows with verdicts (pure)
    report.py    results and page, with the picture of picture.py (pure)

Invariant: the product runs unchanged and cannot detect the measurement. Times come from the training script.
"""
