"""Benchmark of how long failures interrupt training under Everstep, torchrun and torchft: `make bench-recovery`."""
