"""Stores checkpoints durably: one safetensors object per shard, uploaded from a sealed slot and restored into one.

Invariant: an object contains exactly the content of its slot, and restored data matches the digest in the plan. This
package writes no manifest. The control plane decides which steps are stored and which objects form a checkpoint.
"""
