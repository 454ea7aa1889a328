"""Planted corruptions of checkpoints and replicas, over the readers that training and exports use.

`python -m tests.corruption` plants 10,000 of them and reports the counts.
"""
