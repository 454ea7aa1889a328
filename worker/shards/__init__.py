"""The shards that this node owns: each shard's state in the commit protocol, its slots, and its rank's shared page."""
