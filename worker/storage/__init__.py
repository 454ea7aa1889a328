"""Stores checkpoints durably: one safetensors object per shard, uploaded from a sealed slot and restored into one.

Invariant: the objects of a shard contain exactly the content of its slot, and restored data matches the digest in the
plan. Tensors that several shards share are in objects of their own (`worker.storage.shared_tensors`).
This package writes no manifest. The control plane decides which steps are stored and which objects form a checkpoint.
"""
