"""Benchmark of snapshots that share the network with training: `make bench-interleave`.

Each rank waits in place of computation and runs real collectives over a slow virtual network. The benchmark compares
Everstep's way to send snapshots with the schemes in Figure 16 of the paper about GEMINI, another checkpoint system.
"""
