"""Runs one generation on one node: loads shards, serves ranks, takes part in the rounds, and ends all of this work."""
