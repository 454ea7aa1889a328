"""Runs one generation on one node: loads shards, serves ranks, votes on commits of steps, and ends all of this work."""
