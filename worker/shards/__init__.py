"""The shards that this node owns: the state of each shard in the rounds, its slots, and its rank's page."""
