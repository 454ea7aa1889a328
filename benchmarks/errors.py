"""Defines the error that all benchmarks raise.

BenchmarkFailed     a measurement failed; the message names the job or process and the path of the logs
"""

from __future__ import annotations


class BenchmarkFailed(Exception):
    """A measurement failed, so the benchmark writes no results. The message names the job or process and its logs."""
