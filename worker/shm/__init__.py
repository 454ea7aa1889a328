"""Manages the sealed memory of a node: slots and rank pages, which outlive the ranks and the agent."""
