"""Shared memory of a node: slots and rank pages on tmpfs.

The agent owns these files, which outlive the ranks and the agent.
"""
