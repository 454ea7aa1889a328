"""Benchmark of the integration of transformers: `make bench-integrations`.

jobs.py      the compared systems, and one job per launch on a local cluster
report.py    results, limits and page
"""
