"""Connects the agents of a generation: sessions, transfers of shards, and the rounds that commit steps."""
