"""Manages the shared memory of a node: slots and rank pages on tmpfs, which outlive the ranks and the agent."""
