"""The agent process of a node, and its connection to the control plane.

It executes commands, sends reports, and stores the agent's own log and the promise. The promise is the highest
generation that the node has agreed to join.
"""
