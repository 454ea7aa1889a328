"""Errors of the benchmarks.

BenchmarkFailed     a job did not do what the benchmark measures; the message names the job and the logs' path
"""

from __future__ import annotations


class BenchmarkFailed(Exception):
    """The benchmark failed; there is nothing to report."""
