"""What faults of the data plane cost training: `make bench-faults`.

    __main__.py  the command: a cluster in network namespaces, every case, the report
    cases.py     the faults, each struck from outside at running processes and taken back
    runs.py      one case: a job, steps before, during and after its fault, and what the API says meanwhile
    figures.py   what ranks wrote down becomes figures, and figures verdicts (pure)
    report.py    .everstep/bench/faults.json and docs/benchmarks-faults.md, with picture.py's picture beside it

Invariant: nothing of the product is replaced or told that it is being measured; times are the script's own.
"""
