"""Stores checkpoints durably: one safetensors object per shard, uploaded from a sealed slot and restored into one.

Invariant: the objects of a shard contain exactly the content of its slot, and restored data matches the digest in the
plan. This package writes no manifest.
"""
