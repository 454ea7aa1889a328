"""One generation on one node: load shards, serve ranks, take part in rounds, and clean up at the end."""
