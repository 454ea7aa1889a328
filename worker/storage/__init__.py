"""The durable tier, as an agent sees it: sealed slots to an object store and back, one safetensors object per shard.

Invariant: what is stored is what was sealed, and what is restored hashes to the digest that the plan names. Which steps
are kept, and which sets of objects make a checkpoint, is the control plane's business: no manifest is written here.
"""
