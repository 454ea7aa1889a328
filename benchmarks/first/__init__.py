"""Benchmark of blocked times, slowdown and recovery times on one local cluster: `make bench-first`."""
