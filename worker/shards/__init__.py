"""The shards that this node owns: each rank's pure `Shard` together with its slots and its page."""
