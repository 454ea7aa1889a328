"""Connects the agents of a generation: sessions, transfers of shards, and the votes that commit steps (rounds)."""
