"""One generation on one node: the member loads shards, serves ranks, runs rounds, and ends all of this work."""
