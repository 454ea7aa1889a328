"""The shards of this node: the pure `Shard` of each rank, with its slots and its page."""
