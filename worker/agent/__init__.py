"""The agent process of a node, and its connection to the control plane.

It executes commands, sends reports, and stores the node's promise and the agent's own log.
"""
