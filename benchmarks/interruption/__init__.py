"""Benchmark of interruptions of training by failures, under Everstep, torchrun and torchft (`make bench-recovery`)."""
