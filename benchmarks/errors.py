"""Errors of the benchmarks.

BenchmarkFailed     a job did not do what was to be measured; the message says which one, and where the logs are
"""

from __future__ import annotations


class BenchmarkFailed(Exception):
    """There is nothing to report."""
