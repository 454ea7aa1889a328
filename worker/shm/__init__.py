"""Shared memory of a node: slots and rank pages on tmpfs.

The agent owns them, and they outlive ranks and the agent.
"""
