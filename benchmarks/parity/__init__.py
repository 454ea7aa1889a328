"""Benchmark of parity in memory beside two copies: `make bench-parity`.

group.py     four members in one process: steps, memory, and the recovery of one shard
xor.py       candidates for the XOR of chunks
report.py    results, limits and page
"""
