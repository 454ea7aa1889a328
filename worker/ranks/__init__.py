"""Rank processes on a node: their user, environment and files, and the shim that outlives the agent."""
