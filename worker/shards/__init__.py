"""The shards that this node owns: each shard's state in the rounds, its slots, and the page shared with its rank."""
