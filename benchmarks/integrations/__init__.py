"""Benchmark of Everstep's integration with Hugging Face transformers: `make bench-integrations`.

jobs.py      launches of one Trainer with each compared system, as jobs on a local cluster
report.py    results, limits, and the page in `docs/`
"""
