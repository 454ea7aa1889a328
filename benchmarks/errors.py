"""Defines the error that all benchmarks raise."""

from __future__ import annotations


class BenchmarkFailed(Exception):
    """A measurement failed, so no results are written. The message names the job or process and its logs."""
