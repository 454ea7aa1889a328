"""Rank processes of a node: their environment, their files, and the shim that starts them and outlives the agent."""
