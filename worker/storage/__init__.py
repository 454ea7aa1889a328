"""Durable storage of checkpoints: sealed slots are uploaded and restored, one safetensors object per shard.

Invariant: an object contains exactly the content of the sealed slot, and restored data matches the digest in the plan.
This package writes no manifest. The control plane decides which steps are kept and which objects form a checkpoint.
"""
