"""Shared memory of a node: slots and rank pages on tmpfs, owned by the agent, outliving ranks and the agent itself."""
