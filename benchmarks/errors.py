"""Errors of the benchmarks.

BenchmarkFailed     a measurement failed; the message names the job or process and the path of the logs
"""

from __future__ import annotations


class BenchmarkFailed(Exception):
    """The benchmark failed; there is nothing to report."""
