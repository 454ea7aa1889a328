"""Benchmark that compares parity in memory with two copies of each shard: `make bench-parity`.

group.py     a group of four nodes in one process: steps, memory, and the recovery of one shard xor.py       duration of
the XOR of two chunks, by several implementations report.py    results, limits, and the page in `docs/`
"""
