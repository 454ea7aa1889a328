"""Corruptions of checkpoints and replicas that are planted on purpose. Training and exports must not load any of them.

`python -m tests.corruption` plants 10,000 of them and reports the counts.
"""
