"""Benchmark of snapshots that share the network with training: `make bench-interleave`.

Each rank waits in place of computation and runs real collectives over a slow virtual network. The benchmark compares
Everstep's way to send snapshots with the schemes of GEMINI's Figure 16.
"""
