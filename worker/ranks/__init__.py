"""Manages the rank processes of a node: their environment, their files, and the shim that starts and outlives them."""
